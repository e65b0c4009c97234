from __future__ import annotations

import warnings

import pytest


@pytest.fixture(autouse=True)
def _their_warnings():
    """What other packages warn of is theirs to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
