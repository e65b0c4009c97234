from __future__ import annotations

import warnings

import pytest


@pytest.fixture(autouse=True)
def _quiet_lightning():
    """Warnings are errors; Lightning's hints about workers and logging intervals are not ours to mend."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")
        warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
        warnings.filterwarnings("ignore", message=".*have no `val_dataloader`.*")
        # Lightning 2.6 on torch 2.14.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield
