"""A few of the random runs of ``benchmarks/soak.py``."""

from __future__ import annotations

import pytest

from benchmarks._soak_runs import draw_run
from tests.memory.zoo.comparison import compare

# The first of each family that is done in a moment, of unlike loops, precisions and optimizers.
SEEDS = {"autoencoder": 3, "contrastive": 23, "decoder": 11, "encoder": 25, "mlp": 43, "recurrent": 17}


@pytest.mark.parametrize("family", SEEDS)
def test_a_drawn_run_is_estimated_to_two_per_cent(family):
    case, chosen = draw_run(SEEDS[family])
    assert chosen["family"] == family
    assert abs(compare(case).error) <= 0.02, chosen


def test_a_seed_draws_the_same_run_again():
    (first, drawn), (second, drawn_again) = draw_run(7), draw_run(7)
    assert drawn == drawn_again
    assert drawn != draw_run(8)[1]
    shapes = [[parameter.shape for parameter in case.make()[0].parameters()] for case in (first, second)]
    assert shapes[0] == shapes[1]
