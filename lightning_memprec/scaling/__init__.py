"""Loss-scale health and the choice of a precision; knows tensors and nothing of Lightning."""
