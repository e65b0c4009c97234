"""Lightning plugins. Names are looked up lazily: importing this package does not import Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_memprec.plugins.master_weights import MasterWeightPrecision

__all__ = ["MasterWeightPrecision"]


def __getattr__(name: str) -> Any:
    if name == "MasterWeightPrecision":
        from lightning_memprec.plugins.master_weights import MasterWeightPrecision

        return MasterWeightPrecision
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
