"""Small parts of `torchrec.inference`: state dicts, and modules that predict; quantised tables are in `quant`."""
