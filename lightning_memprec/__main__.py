"""Run the console command as ``python -m lightning_memprec``."""

from __future__ import annotations

import sys

from lightning_memprec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
