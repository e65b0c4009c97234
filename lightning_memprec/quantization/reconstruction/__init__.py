"""Methods that learn integers from data, one file each; importing this package registers them."""

from __future__ import annotations

from lightning_memprec.quantization.reconstruction.adaquant import AdaQuant
from lightning_memprec.quantization.reconstruction.brecq import BRECQ
from lightning_memprec.quantization.reconstruction.gptq import GPTQ
from lightning_memprec.quantization.reconstruction.layer_wise import LayerWise
from lightning_memprec.quantization.reconstruction.obq import OBQ
from lightning_memprec.quantization.reconstruction.zeroquant import ZeroQuant

__all__ = ["BRECQ", "GPTQ", "OBQ", "AdaQuant", "LayerWise", "ZeroQuant"]
