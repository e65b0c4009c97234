"""Training steps whose real memory on the CPU is compared with the estimate.

The list was fixed before anything was measured; it is not to be tuned to what the estimate does well.
"""

from __future__ import annotations

from tests.memory.zoo import attention, convolution, dense, recurrent
from tests.memory.zoo.case import Case, Family

__all__ = ["ZOO", "Case", "Family"]

ZOO: tuple[Case, ...] = (*attention.CASES, *dense.CASES, *convolution.CASES, *recurrent.CASES)
