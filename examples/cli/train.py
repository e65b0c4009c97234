"""A program with a LightningCLI.

Train with ``python train.py fit --config run.yaml``; plan with
``lightning-memprec estimate --config run.yaml --cli train:main``.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI
from tiny import TinyClassifier, TinyData


def main() -> None:
    LightningCLI(TinyClassifier, TinyData)


if __name__ == "__main__":
    main()
