"""TorchRec's metrics of training loops: weighted, by task, over a window and a lifetime."""
