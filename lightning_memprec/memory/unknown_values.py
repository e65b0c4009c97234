"""Questions about values that a trace does not know but can let pass: what is only logged, and what guards against NaN.

A value that depends on weights must not steer a trace. Most reads of one steer nothing: a loss that is appended to a
list or logged, a check that nothing is NaN or infinite, which a run that trains passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_memprec._errors import DataDependentError
from lightning_memprec.memory.known import MAX_KNOWN_NUMEL, KnownValues
from lightning_memprec.memory.result import Assumption

__all__ = ["UnknownNumber", "ValueAnswers"]

_ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow",
    "radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow",
)  # fmt: skip
_STEERING = ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "index", "trunc", "floor", "ceil")
_NUMBER_METHODS = ("is_integer", "as_integer_ratio", "hex")


class UnknownNumber(float):
    """What ``tensor.item()`` gives where the value is not known.

    It can be added, averaged, logged and printed. Where it would steer the step (a comparison, a condition, a number of
    repetitions) it raises the error that ``.item()`` would have raised. Code in C, such as ``math.isfinite`` or NumPy,
    sees the ordinary number 1.

    Args:
        error: Says where the value was read.
    """

    error: DataDependentError

    def __new__(cls, error: DataDependentError) -> UnknownNumber:
        """Remember the error; to C it is 1."""
        number = super().__new__(cls, 1.0)
        number.error = error
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.error,)

    def __repr__(self) -> str:
        return "nan"

    def __format__(self, spec: str) -> str:
        return "nan"  # Text steers nothing, and `:d` is no format of a float.

    def __hash__(self) -> int:
        return id(self)

    def __round__(self, digits: Any = None) -> Any:  # type: ignore[override]
        return self if digits is not None else self._steer()

    def _steer(self, *args: Any) -> NoReturn:
        raise DataDependentError(str(self.error), self.error.location)

    def _unary(self) -> UnknownNumber:
        return self

    def _binary(self, other: Any, *modulus: Any) -> Any:
        # A tensor multiplies itself with a number; all that Python and NumPy count with is real.
        return self if isinstance(other, (int, float)) else NotImplemented

    __neg__ = __pos__ = __abs__ = _unary  # type: ignore[assignment]


def _divmod(number: UnknownNumber, other: Any) -> Any:
    return (number, number) if isinstance(other, (int, float)) else NotImplemented


for _name in _ARITHMETIC:
    setattr(UnknownNumber, f"__{_name}__", _divmod if "divmod" in _name else UnknownNumber._binary)
for _name in _STEERING:
    setattr(UnknownNumber, f"__{_name}__", UnknownNumber._steer)
for _name in _NUMBER_METHODS:
    setattr(UnknownNumber, _name, UnknownNumber._steer)


class ValueAnswers:
    """Handlers of torch functions for :class:`~lightning_memprec.memory.redirect.DeviceRedirect`.

    Args:
        known: Contents known to the trace.
    """

    def __init__(self, known: KnownValues) -> None:
        self._known = known
        self._assumptions: dict[str, Assumption] = {}
        checks: dict[Any, bool] = {torch.isfinite: True, Tensor.isfinite: True} | dict.fromkeys(
            (
                torch.isnan, torch.isinf, torch.isposinf, torch.isneginf,
                Tensor.isnan, Tensor.isinf, Tensor.isposinf, Tensor.isneginf,
            ),
            False,
        )  # fmt: skip
        self._checks = checks
        self.handlers: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
            Tensor.item: self._item,
            **dict.fromkeys(checks, self._check),
        }

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What was answered without being known."""
        return tuple(self._assumptions.values())

    def _item(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except DataDependentError as error:
            where = f", first at {error.location}" if error.location else ""
            self._assume(
                "values_read",
                f"Numbers that the step reads and that steer nothing (`.item()`{where}) are left open.",
            )
            # Without its traceback, whose frames hold the step's tensors for as long as the number is kept.
            return UnknownNumber(DataDependentError(str(error), error.location))

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if (
            isinstance(out, Tensor)
            and out.is_meta
            and out not in self._known
            and out.numel() <= MAX_KNOWN_NUMEL
        ):
            self._assume(
                "finite_values",
                "Where the step asks, its values are taken to be finite: neither NaN nor infinite.",
            )
            self._known.remember(out, torch.full(out.shape, self._checks[func]))
        return out

    def _assume(self, name: str, text: str) -> None:
        self._assumptions.setdefault(name, Assumption(name, text, "traced"))
