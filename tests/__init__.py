"""Tests, as a package: some wheels install a `tests` of their own, which would be found instead."""
