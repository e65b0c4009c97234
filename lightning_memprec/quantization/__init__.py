"""Int8 post-training quantization; knows tensors and nothing of Lightning."""

from __future__ import annotations

# Registers the methods that learn.
from lightning_memprec.quantization import reconstruction as reconstruction
