"""Statistics of outlier features, as in the LLM.int8() paper (arXiv 2208.07339, section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["OutlierStatistics"]

# "at least one value with a magnitude of at least 6 … in at least 25% of layers and 6% of all sequence dimensions".
_SHARE_OF_LAYERS, _SHARE_OF_TOKENS = 0.25, 0.06


class OutlierStatistics:
    """Counts, layer by layer, the input features that reach a magnitude.

    Args:
        threshold: Magnitude from which on a value is an outlier.

    Example:
        >>> statistics = OutlierStatistics(6.0)
        >>> statistics.update("fc", torch.tensor([[0.1, 7.0], [0.2, 0.3]]))
        >>> statistics.columns("fc")
        [1]
    """

    def __init__(self, threshold: float = 6.0) -> None:
        self.threshold = threshold
        self._hits: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._tokens_hit: dict[str, int] = {}

    def update(self, name: str, values: Tensor) -> None:
        """Count one input of a layer.

        Args:
            name: The layer.
            values: Activations ``[*, features]``.
        """
        rows = values.detach().flatten(0, -2) if values.dim() > 1 else values.detach()[None]
        over = rows.abs() >= self.threshold
        hits = over.sum(dim=0).cpu()
        self._hits[name] = self._hits[name] + hits if name in self._hits else hits
        self._tokens[name] = self._tokens.get(name, 0) + over.shape[0]
        self._tokens_hit[name] = self._tokens_hit.get(name, 0) + int(over.any(dim=1).sum())

    def columns(self, name: str) -> list[int]:
        """Return the features of a layer that reached the threshold; none if no data came by."""
        return [int(index) for index in self._hits[name].nonzero().flatten()] if name in self._hits else []

    def count(self, name: str) -> int | None:
        """Return how many features of a layer reached the threshold; ``None`` if no data came by."""
        return len(self.columns(name)) if name in self._hits else None

    def systematic(self) -> dict[int, list[int]]:
        """Return the outlier features of the model, by the width of the layers they run through.

        By the paper's criterion a feature counts if it reaches the threshold in at least 25 % of the layers (of that
        width) and at 6 % of the tokens there.
        """
        by_width: dict[int, list[Tensor]] = {}
        for name, hits in self._hits.items():
            share = hits / max(1, self._tokens[name])
            by_width.setdefault(hits.numel(), []).append(share >= _SHARE_OF_TOKENS)
        found = {}
        for width, layers in by_width.items():
            features = (torch.stack(layers).float().mean(dim=0) >= _SHARE_OF_LAYERS).nonzero().flatten()
            if features.numel():
                found[width] = [int(feature) for feature in features]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the shares of layers, of input features and of tokens that hold outliers, as plain values."""
        layers = len(self._hits)
        features = sum(hits.numel() for hits in self._hits.values())
        return {
            "threshold": self.threshold,
            "share_of_layers": sum(bool(hits.any()) for hits in self._hits.values()) / max(1, layers),
            "share_of_features": sum(int((h > 0).sum()) for h in self._hits.values()) / max(1, features),
            "share_of_tokens": sum(self._tokens_hit.values()) / max(1, sum(self._tokens.values())),
            "systematic_features": self.systematic(),
        }
