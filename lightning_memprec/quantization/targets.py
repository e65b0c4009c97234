"""Which modules of a model can be quantized, how their weights lie as matrices, and why others are left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.modules.base import Int8Module, Scheme
from lightning_memprec.quantization.modules.conv import Int8Conv, Int8ConvTranspose, conv_matrix
from lightning_memprec.quantization.modules.dequantizing import DequantizingModule
from lightning_memprec.quantization.modules.embedding import Int8Embedding
from lightning_memprec.quantization.modules.linear import Int8Linear
from lightning_memprec.quantization.weight_readers import read_by_parents

__all__ = ["Skipped", "Target", "find_targets"]

_Builder = Callable[[nn.Module, "dict[str, Quantized]", Scheme], nn.Module]


@dataclass(frozen=True)
class Target:
    """A module that will be replaced.

    Attributes:
        name: Its name in the model.
        module: The float module.
        scheme: How to quantize it; what the user asked for, less what does not apply to such a module.
        weights: Functions that return its matrices ``[channels, features]``, by the name of the weight.
        inputs: Scale and zero point of static activations, ``[1]``.
        bias: What takes the place of the layer's bias; for a layer that has one.
    """

    name: str
    module: nn.Module
    scheme: Scheme
    weights: dict[str, Callable[[], Tensor]] = field(repr=False)
    _build: _Builder = field(repr=False)
    inputs: tuple[Tensor, Tensor | None] | None = field(default=None, repr=False)
    bias: Tensor | None = field(default=None, repr=False)

    def build(self, quantized: dict[str, Quantized]) -> nn.Module:
        """Make the int8 module."""
        replacement = self._build(self.module, quantized, self.scheme)
        if self.inputs is not None:
            cast("Int8Module", replacement).set_inputs(*self.inputs)
        if self.bias is not None:
            given = cast("nn.Parameter", replacement.bias)
            replacement.bias = nn.Parameter(self.bias.to(given), requires_grad=given.requires_grad)
        return replacement


@dataclass(frozen=True)
class Skipped:
    """A module with weights that stay in floating point, and why."""

    name: str
    module: nn.Module
    reason: str


def find_targets(
    root: nn.Module, scheme: Scheme, include: list[str] | None = None, exclude: list[str] | None = None
) -> tuple[list[Target], list[Skipped]]:
    """Sort a model's modules into those to quantize and those to leave.

    Args:
        root: The model.
        scheme: How to quantize.
        include: Names, shell patterns of names (``"encoder.*"``) or class names to quantize; ``None`` for all.
        exclude: The same, to leave; it wins over ``include``.

    Raises:
        ValueError: If a pattern matches nothing, or if ``root`` itself is what would be replaced.
    """
    modules = dict(root.named_modules())
    _check_patterns(modules, [*(include or []), *(exclude or [])])
    targets: list[Target] = []
    skipped: list[Skipped] = []
    inside: list[str] = []  # Parts of a module that is replaced as a whole.
    others = read_by_parents(modules) | _adapters(modules)
    for name, module in modules.items():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        target = _target(name, module, scheme)
        if target is None:
            continue
        if isinstance(module, nn.MultiheadAttention):
            inside.append(f"{name}." if name else "")
        reason = _unwanted(name, module, include, exclude) or others.get(name) or _reason_to_skip(module)
        if reason is None:
            targets.append(target)
        else:
            skipped.append(Skipped(name, module, reason))
    if any(not target.name for target in targets):
        raise ValueError(
            f"The model itself is a `{type(root).__name__}`, which cannot be replaced in place."
            " Put it into `torch.nn.Sequential` first."
        )
    return _without_half_tied(root, targets, skipped)


def _check_patterns(modules: dict[str, nn.Module], patterns: list[str]) -> None:
    for pattern in patterns:
        if not any(_matches(pattern, name, module) for name, module in modules.items()):
            raise ValueError(
                f"{pattern!r} matches no module. Give a name, a pattern such as 'encoder.*', or a class name; names"
                f" begin with: {', '.join(sorted({name.partition('.')[0] for name in modules if name})) or 'none'}."
            )


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) or any(kind.__name__ == pattern for kind in type(module).__mro__[:-2])


def _unwanted(
    name: str, module: nn.Module, include: list[str] | None, exclude: list[str] | None
) -> str | None:
    if any(_matches(pattern, name, module) for pattern in exclude or []):
        return "excluded by name"
    if include is not None and not any(_matches(pattern, name, module) for pattern in include):
        return "not among those to include"
    return None


def _adapters(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Name the parts of peft's adapter layers that stay in floating point."""
    reasons = {}
    for name, module in modules.items():
        if not (hasattr(module, "base_layer") and _from_package(module, "peft")):
            continue
        prefix = f"{name}." if name else ""
        base = module.base_layer
        for part in modules:
            if part.startswith(prefix) and part != f"{prefix}base_layer":
                reasons[part] = "adapter; merge it first (`merge_and_unload()`) to quantize the sum"
        if len(getattr(module, "lora_magnitude_vector", ())) or isinstance(base, nn.MultiheadAttention):
            reasons[f"{prefix}base_layer"] = (
                "its adapter reads the weight; merge it first (`merge_and_unload()`)"
            )
    return reasons


def _from_package(module: nn.Module, package: str) -> bool:
    return any(kind.__module__.partition(".")[0] == package for kind in type(module).__mro__)


def _reason_to_skip(module: nn.Module) -> str | None:
    kind = _known_kind(module)
    if kind is None:
        return "not supported"
    if type(module).forward is not kind.forward or "forward" in module.__dict__:
        return f"`{type(module).__name__}` has a `forward` of its own"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "`max_norm` changes the weight at each call"
    if any(is_lazy(weight) for weight in module.parameters()):
        return "not initialized yet; run a batch through the model first"
    return _reason_of_weights(module)


def _reason_of_weights(module: nn.Module) -> str | None:
    whole = isinstance(module, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase))
    if parametrize.is_parametrized(module):
        return (
            "parametrized; call `torch.nn.utils.parametrize.remove_parametrizations` first" if whole else None
        )
    if not whole and "weight" not in module._parameters:
        return "`weight` is computed by a hook (old weight norm, pruning); remove that first"
    if module._forward_pre_hooks and any(name.endswith("_orig") for name, _ in module.named_parameters()):
        return "a weight is computed by a hook (pruning); remove that first"
    weights = list(module.parameters())
    if not all(weight.is_floating_point() for weight in weights):
        return "its weight holds no floating-point numbers"
    if any(type(weight) not in (nn.Parameter, Tensor) for weight in weights):
        return f"its weight is a `{type(weights[0].data).__name__}`, quantized or sharded by another tool"
    return None


def _is_gpt2_conv(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and _from_package(module, "transformers")


def _known_kind(module: nn.Module) -> type[nn.Module] | None:
    if _is_gpt2_conv(module):
        return type(module)
    kinds = (
        nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
        nn.Embedding, nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell,
    )  # fmt: skip
    return next((kind for kind in kinds if isinstance(module, kind)), None)


def _target(name: str, module: nn.Module, scheme: Scheme) -> Target | None:
    """Describe how a module would be quantized; ``None`` if it has no matrices that anyone would quantize."""
    floating = replace(scheme, activations="float", outlier_threshold=None)
    if _is_gpt2_conv(module):
        return Target(name, module, scheme, {"weight": lambda: _read(module).t()}, _linear)
    if isinstance(module, nn.Linear):
        return Target(name, module, scheme, {"weight": lambda: _read(module)}, _linear)
    if isinstance(module, _ConvNd):
        transposed = isinstance(module, _ConvTransposeNd)
        weights = {"weight": lambda: conv_matrix(_read(module), module.groups, transposed)}
        build = _conv_transpose if transposed else _conv
        return Target(name, module, replace(scheme, outlier_threshold=None), weights, build)
    if isinstance(module, nn.Embedding):
        return Target(name, module, floating, {"weight": lambda: _read(module)}, _embedding)
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)):
        matrices = {key: weight.detach for key, weight in module.named_parameters() if weight.dim() == 2}
        return Target(name, module, floating, matrices, _dequantizing)
    if isinstance(module, (nn.EmbeddingBag, nn.Bilinear)):
        return Target(name, module, floating, {}, _dequantizing)
    return None


def _read(module: nn.Module) -> Tensor:
    """Return a weight, parametrizations (weight norm) merged, without their side effects in training mode."""
    if not parametrize.is_parametrized(module):
        return cast("Tensor", module.weight).detach()
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        return cast("Tensor", module.weight).detach()
    finally:
        for part, mode in modes:
            part.training = mode


def _bias(module: nn.Module) -> nn.Parameter | None:
    bias = cast("Tensor | None", module.bias)
    if bias is None or isinstance(bias, nn.Parameter):
        return bias
    return nn.Parameter(bias.detach())


def _linear(module: nn.Module, quantized: dict[str, Quantized], scheme: Scheme) -> nn.Module:
    return Int8Linear(quantized["weight"], _bias(module), scheme, _read(module).dtype)


def _conv(module: nn.Module, quantized: dict[str, Quantized], scheme: Scheme) -> nn.Module:
    return Int8Conv(quantized["weight"], _bias(module), cast("_ConvNd", module), scheme)


def _conv_transpose(module: nn.Module, quantized: dict[str, Quantized], scheme: Scheme) -> nn.Module:
    return Int8ConvTranspose(quantized["weight"], _bias(module), cast("_ConvNd", module), scheme)


def _embedding(module: nn.Module, quantized: dict[str, Quantized], scheme: Scheme) -> nn.Module:
    return Int8Embedding(quantized["weight"], cast("nn.Embedding", module), scheme)


def _dequantizing(module: nn.Module, quantized: dict[str, Quantized], scheme: Scheme) -> nn.Module:
    children: dict[str, nn.Module] = {
        name: DequantizingModule(child, own, {}, scheme)
        for name, child in module.named_children()
        if (own := _below(quantized, f"{name}."))
    }
    own = {key: weight for key, weight in quantized.items() if "." not in key}
    return DequantizingModule(module, own, children, scheme)


def _below(quantized: dict[str, Quantized], prefix: str) -> dict[str, Quantized]:
    return {key[len(prefix) :]: weight for key, weight in quantized.items() if key.startswith(prefix)}


def _without_half_tied(
    root: nn.Module, targets: list[Target], skipped: list[Skipped]
) -> tuple[list[Target], list[Skipped]]:
    """Leave a target whose weight is also used by a module that stays: untied, the two would need more memory."""
    while True:
        chosen = {id(part) for target in targets for part in target.module.modules()}
        owners = {
            id(parameter): f"{name}.{key}" if name else key
            for name, module in root.named_modules()
            if id(module) not in chosen
            for key, parameter in module._parameters.items()
            if parameter is not None and not is_lazy(parameter) and parameter.dim() > 1
        }
        tied = [(t, owners[id(p)]) for t in targets for p in t.module.parameters() if id(p) in owners]
        if not tied:
            return targets, skipped
        reasons = {target.name: owner for target, owner in tied}
        skipped = skipped + [
            Skipped(t.name, t.module, f"tied to `{reasons[t.name]}`, which stays in floating point")
            for t in targets
            if t.name in reasons
        ]
        targets = [target for target in targets if target.name not in reasons]
