"""Closed forms of a transformer: parameters, activations, logits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

__all__ = ["ActivationFormula", "TransformerShape", "activation_bytes", "logits_and_loss_bytes"]

ActivationFormula = Literal["uniform", "published"]


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a transformer of the GPT-2 family and of one micro-batch.

    Args:
        layers: Number of layers, L.
        hidden: Width, H; the feed-forward part is 4H wide.
        heads: Attention heads, A.
        sequence: Tokens of one sequence, S.
        batch: Sequences on one device, B.
        vocabulary: Entries of the (tied) embedding, V; 0 leaves embedding and logits out.

    Raises:
        ValueError: If a size is too small or the heads do not divide the width.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int = 1
    vocabulary: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "vocabulary" else 1
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")
        if self.hidden % self.heads:
            raise ValueError(
                f"`hidden` must be a multiple of `heads`, got {self.hidden} and {self.heads}. "
                "Give the width of the residual stream and the number of query heads."
            )

    @property
    def parameters(self) -> int:
        """Parameter elements, exact for GPT-2 whose positions number ``sequence``.

        12 L H² + 13 L H + (V + S) H (arXiv 2104.04473, eq. 2) and 2 H of the final layer norm. Without
        vocabulary only the layers count.
        """
        layers = self.layers * (12 * self.hidden**2 + 13 * self.hidden)
        if not self.vocabulary:
            return layers
        return layers + (self.vocabulary + self.sequence + 2) * self.hidden

    @property
    def layer_elements(self) -> tuple[int, int]:
        """Activation elements of one layer: linear part 19 B S H, and attention scores 3 B A S²."""
        linear = 19 * self.batch * self.sequence * self.hidden
        return linear, 3 * self.batch * self.heads * self.sequence**2


def activation_bytes(
    shape: TransformerShape,
    *,
    element_bytes: int = 2,
    recompute: bool = False,
    fused_attention: bool = False,
    formula: ActivationFormula = "uniform",
) -> int:
    """Bytes that the layers keep for the backward pass, embedding and logits left out.

    One layer keeps, in elements of ``element_bytes`` bytes e:

    - ``"uniform"``: e (19 B S H + 3 B A S²), which counts every stored element alike;
    - ``"published"``: (16 e + 2) B S H + (2 e + 1) B A S², where dropout masks take one byte. In half
      precision this is the published S B H (34 + 5 A S / H) (arXiv 2205.05198, eq. 1).

    Args:
        shape: Sizes.
        element_bytes: Bytes of one activation element.
        recompute: Keep the inputs of all layers, B S H elements each, and the inside of one layer.
        fused_attention: Leave out the S² term.
        formula: Which of the two formulas.

    Returns:
        Size in bytes.

    Raises:
        ValueError: If ``formula`` is unknown.

    Example:
        >>> shape = TransformerShape(layers=1, hidden=4096, heads=32, sequence=2048)
        >>> activation_bytes(shape)
        1124073472
    """
    choices = get_args(ActivationFormula)
    if formula not in choices:
        raise ValueError(f"Unknown formula {formula!r}. Choose one of: {', '.join(choices)}.")
    stream = shape.batch * shape.sequence * shape.hidden
    linear, scores = (element_bytes * elements for elements in shape.layer_elements)
    if formula == "published":
        linear = (16 * element_bytes + 2) * stream
        scores = (2 * element_bytes + 1) * shape.batch * shape.heads * shape.sequence**2
    layer = linear if fused_attention else linear + scores
    return shape.layers * element_bytes * stream + layer if recompute else shape.layers * layer


def logits_and_loss_bytes(shape: TransformerShape, *, element_bytes: int = 2) -> tuple[int, int]:
    """Bytes of the logits and of the copies that cross-entropy makes of them, at its backward's peak.

    Cross-entropy works in FP32. Beside the logits live the log-probabilities, their gradient and the
    gradient of the logits; an FP32 cast of half-precision logits is freed before that.

    Args:
        shape: Sizes; no vocabulary gives ``(0, 0)``.
        element_bytes: Bytes of one logit as the model computes it.

    Returns:
        ``(logits, loss copies)`` in bytes.

    Example:
        >>> logits_and_loss_bytes(TransformerShape(1, 64, 1, sequence=10, vocabulary=100))
        (2000, 12000)
    """
    elements = shape.batch * shape.sequence * shape.vocabulary
    return element_bytes * elements, 3 * 4 * elements
