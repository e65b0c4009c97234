"""FP32 master weights of half-precision models; knows tensors and nothing of Lightning."""
