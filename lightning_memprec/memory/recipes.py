"""Bytes that one trainable parameter costs, by training recipe."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RECIPES", "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """Bytes that each trainable parameter costs.

    Args:
        name: Name in :data:`RECIPES`.
        description: What it stands for, in words.
        parameters_bytes: Weights used in forward and backward.
        gradients_bytes: Gradients.
        optimizer_states_bytes: States of the optimizer, such as Adam's two moments.
        master_bytes: FP32 copy of half-precision weights.
        activation_element_bytes: Bytes of one activation element: 4 in FP32, 2 in half precision and AMP.
    """

    name: str
    description: str
    parameters_bytes: float
    gradients_bytes: float
    optimizer_states_bytes: float
    master_bytes: float = 0
    activation_element_bytes: int = 4

    @property
    def bytes_per_parameter(self) -> float:
        """Sum of the four parts."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_states_bytes + self.master_bytes


# Two one-byte moments, and for each block of 256 elements one FP32 scale per moment
# (bitsandbytes, arXiv 2110.02861; block size of its 8-bit optimizers).
_ADAM_8BIT_BYTES = 2 * (1 + 4 / 256)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32-adam", "FP32 weights, Adam or AdamW (Lightning's 32-true)", 4, 4, 8),
        Recipe("amp-adam", "FP32 weights under autocast, Adam (16-mixed, bf16-mixed)", 4, 4, 8, 0, 2),
        Recipe("half-master-adam", "half weights with FP32 masters and moments", 2, 2, 8, 4, 2),
        Recipe("half-adam-fp32-moments", "half weights, no masters, FP32 moments", 2, 2, 8, 0, 2),
        # torch.optim creates its states in the parameters' dtype, so this is what 16-true really costs.
        Recipe(
            "half-adam",
            "half weights, torch's own Adam: half moments too (16-true, bf16-true)",
            2,
            2,
            4,
            0,
            2,
        ),
        Recipe("fp32-sgd", "FP32 weights, SGD without momentum", 4, 4, 0),
        Recipe("fp32-sgd-momentum", "FP32 weights, SGD with momentum", 4, 4, 4),
        # Row and column sums of an (n, m) matrix take 4 (n + m) / (n m) bytes: 0.002 at 4096 x 4096.
        Recipe("fp32-adafactor", "FP32 weights, Adafactor: its factored states count as 0", 4, 4, 0),
        Recipe("fp32-adam-8bit", "FP32 weights, 8-bit Adam", 4, 4, _ADAM_8BIT_BYTES),
        Recipe("half-adam-8bit", "half weights, 8-bit Adam", 2, 2, _ADAM_8BIT_BYTES, 0, 2),
    )
}
