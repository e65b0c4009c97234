"""How a module is executed where that changes what it needs: compiled, or in another memory format."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_memprec.memory.result import Assumption

__all__ = ["execution_notes"]


def execution_notes(module: nn.Module) -> Iterator[Assumption]:
    """Say what the estimate makes of ``torch.compile`` and of channels-last weights, where they are used.

    Args:
        module: The module that was traced.
    """
    if any(_is_compiled(child) for child in module.modules()):
        yield Assumption(
            "torch_compile",
            "`torch.compile` is not followed: the step is traced as it runs without it. Fused operators need less "
            "than that; CUDA graphs (`mode='reduce-overhead'`) keep memory pools of their own and need more.",
            "torch/_inductor/cudagraph_trees.py",
        )
    if any(_is_channels_last(parameter) for parameter in module.parameters()):
        yield Assumption(
            "channels_last",
            "Weights are in the channels_last format: convolutions are traced, and cuDNN is asked, in that format.",
            "aten/src/ATen/native/ConvUtils.h",
        )


def _is_compiled(module: nn.Module) -> bool:
    # `torch.compile(module)`, a compiled `forward`, `module.compile()`, a LightningModule that came compiled to its
    # Trainer. Told by attributes, since importing the compiler takes a second.
    return (
        "_orig_mod" in module._modules
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        or any(getattr(module, name, None) is not None for name in ("_compiled_call_impl", "_compiler_ctx"))
    )


def _is_channels_last(parameter: nn.Parameter) -> bool:
    return (
        not is_lazy(parameter)
        and parameter.dim() == 4
        and not parameter.is_contiguous()
        and parameter.is_contiguous(memory_format=torch.channels_last)
    )
