from __future__ import annotations

from tests.plugins.conftest import _quiet_lightning as _quiet_lightning
