"""Small parts of `torchrec.inference`: state dicts, and modules that predict; quantized tables are in `quant`."""
