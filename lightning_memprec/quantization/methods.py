"""Quantization methods by name: a preset of the scheme, and how the integers are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.targets import Target

__all__ = ["Method", "Solution", "Solver", "method_names", "register_method", "resolve"]

Solver = Callable[
    [nn.Module, "list[Target]", "Iterable[Any] | None", Callable[[nn.Module, Any], Any]],
    "Mapping[str, Mapping[str, Quantized]]",
]


class Solution(dict[str, dict[str, Quantized]]):
    """Quantized matrices by target and weight name, from a solver that has something to say about some layers.

    Args:
        weights: The matrices.
        notes: What was not done as asked, by target; shown in the report.
        inputs: Scale and zero point of static activations that the solver chose, by target.
        biases: Biases that it chose, by target, FP32.
    """

    def __init__(self, weights: Mapping[str, Mapping[str, Quantized]], notes: dict[str, str]) -> None:
        super().__init__({name: dict(own) for name, own in weights.items()})
        self.notes = notes
        self.inputs: dict[str, tuple[Tensor, Tensor | None]] = {}
        self.biases: dict[str, Tensor] = {}

    def complete(self, targets: list[Target]) -> list[Target]:
        """Return targets that build layers with the inputs' scales and the biases of this solution."""
        return [
            replace(
                target,
                inputs=self.inputs.get(target.name, target.inputs),
                bias=self.biases.get(target.name, target.bias),
            )
            for target in targets
        ]


@dataclass(frozen=True)
class Method:
    """A named way to quantize.

    Args:
        name: What users write.
        scheme: Preset; keywords of ``quantize_`` override its parts.
        solver: Finds the integers: called with the float model, the targets, the calibration batches and the function
            that runs a batch; returns quantized matrices by target and weight name. ``None`` rounds to nearest.
        needs_calibration: Whether it cannot do without batches; static activations never can.
    """

    name: str
    scheme: Scheme
    solver: Solver | None = None
    needs_calibration: bool = False


_METHODS: dict[str, Method] = {}


def register_method(method: Method) -> None:
    """Make a method known to ``quantize_``.

    Raises:
        ValueError: If the name is taken.
    """
    if method.name in _METHODS:
        raise ValueError(f"There is a method {method.name!r} already. Choose another name.")
    _METHODS[method.name] = method


def method_names() -> list[str]:
    """Return the names of all methods."""
    return list(_METHODS)


def resolve(name: str, overrides: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Method:
    """Return a method with parts of its preset overridden.

    Args:
        name: Name of the method.
        overrides: Fields of :class:`~lightning_memprec.quantization.modules.base.Scheme`; ``None`` keeps the preset.
        options: Fields of its solver that differ from the defaults.

    Raises:
        ValueError: If there is no such method, the parts do not fit together, or an option does not exist.
    """
    if name not in _METHODS:
        raise ValueError(f"There is no method {name!r}. Choose one of: {', '.join(_METHODS)}.")
    method = _METHODS[name]
    changes = {key: value for key, value in overrides.items() if value is not None}
    if "group_size" in changes:
        changes.setdefault("weight_granularity", "group")
    elif changes.get("weight_granularity", "group") != "group":
        changes["group_size"] = None
    if changes.get("activations") == "float" and "outlier_threshold" not in changes:
        changes["outlier_threshold"] = None
    scheme = replace(method.scheme, **changes)
    needs = method.needs_calibration or scheme.activations == "static"
    solver = _with_options(method, options) if options else method.solver
    return replace(method, scheme=scheme, solver=solver, needs_calibration=needs)


def _with_options(method: Method, options: Mapping[str, Any]) -> Solver:
    solver: Any = method.solver
    if not is_dataclass(solver) or isinstance(solver, type):
        raise ValueError(
            f"The method {method.name!r} has no options, got {dict(options)}. Drop `method_options`."
        )
    known = {field.name: getattr(solver, field.name) for field in fields(solver) if field.init}
    for name, value in options.items():
        if name not in known:
            listed = ", ".join(f"{key} ({default!r})" for key, default in known.items())
            raise ValueError(f"The method {method.name!r} has no option {name!r}. Its options are: {listed}.")
        # The defaults tell the types; an integer may stand for a float, but not for a bool.
        kind, given = type(known[name]), type(value)
        if known[name] is not None and given is not kind and (given, kind) != (int, float):
            raise ValueError(
                f"The option {name!r} of {method.name!r} must be {kind.__name__}, got {value!r}."
                f" Its default is {known[name]!r}."
            )
    return cast("Solver", replace(solver, **options))


register_method(Method("weight_only", Scheme()))
register_method(Method("absmax", Scheme(weight_granularity="tensor", activations="tensor")))
register_method(
    Method("zeropoint", Scheme(weight_granularity="tensor", activations="tensor", mapping="affine"))
)
register_method(Method("vectorwise", Scheme(activations="token")))
# Threshold: section 3.2 of arXiv 2208.07339.
register_method(Method("llm_int8", Scheme(activations="token", outlier_threshold=6.0)))
