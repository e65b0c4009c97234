"""Low-rank adapters (LoRA, arXiv 2106.09685): train few new weights beside frozen ones."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from torch import nn

from lightning_memprec.memory.remedies.change import Change, prepared
from lightning_memprec.memory.remedies.snippet import Code

__all__ = ["adapters"]

# The default of LLaMA-Factory and the middle of what PEFT's guides use; need hardly depends on it.
_RANK = 16


def adapters(model: nn.Module | None) -> Iterator[Change]:
    """Yield LoRA on all linear layers where these hold most of what is trained, and PEFT is installed."""
    if model is None or find_spec("peft") is None:
        return
    layers = {name: child for name, child in model.named_modules() if type(child) is nn.Linear}
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    in_linear = sum(layer.weight.numel() for layer in layers.values() if layer.weight.requires_grad)
    if 2 * in_linear < trained or not layers:
        return
    added = sum(_RANK * (layer.in_features + layer.out_features) for layer in layers.values())
    yield Change(
        "low_rank_adapters",
        f"low-rank adapters (LoRA) of rank {_RANK}",
        f"peft.inject_adapter_in_model(peft.LoraConfig(r={_RANK}, target_modules=[…your linear layers…]), model)",
        f"trains {added / trained:.1%} as many parameters, all others are frozen",
        lambda p: prepared(p, _inject),
        topics=frozenset({"adapters"}),
        code=Code(
            statements=(
                "layers = [name for name, child in model.named_modules() if type(child) is torch.nn.Linear]",
                f"inject_adapter_in_model(LoraConfig(r={_RANK}, target_modules=layers), model)",
            ),
            imports=("import torch", "from peft import LoraConfig, inject_adapter_in_model"),
        ),
    )


def _inject(module: nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name, child in module.named_modules() if type(child) is nn.Linear]
    inject_adapter_in_model(LoraConfig(r=_RANK, target_modules=names), module)
