PY ?= python3
WORKERS ?= 2
BIN := .venv/bin

.PHONY: help setup demo test test-all test-oldest lint bench docs dist clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# Versions come from the second file; torch first, so that nothing else chooses its build.
.venv/.ready: pyproject.toml requirements/tested.txt
.venv-oldest/.ready: pyproject.toml requirements/oldest.txt
.venv/.ready .venv-oldest/.ready:
	$(PY) -m venv $(@D)
	$(@D)/bin/pip install --quiet --constraint $(word 2,$^) torch torchvision
	$(@D)/bin/pip install --quiet --constraint $(word 2,$^) --editable ".[dev]"
	touch $@

setup: .venv/.ready ## Create .venv with the tested versions

demo: .venv/.ready ## A run is refused, mended, trained and exported in int8 (CPU, under 3 minutes)
	$(BIN)/python examples/demo.py

# Files stay whole on a worker: some start two processes once for all their tests. A thread each: more would wait for
# each other's cores.
test: .venv/.ready ## Run the tests (WORKERS=2 at a time)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

test-all: .venv/.ready ## Run the tests with all their cases (about 20 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile -m ""

# Old packages warn about each other's deprecations, which is no fault of the package.
test-oldest: .venv-oldest/.ready ## Run the tests with the lowest allowed versions, in .venv-oldest
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
		-W ignore::DeprecationWarning

lint: .venv/.ready ## Check format, style, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.ready ## Print accuracy and speed beside peers, with machine and versions
	$(BIN)/python -m benchmarks.cpu_accuracy
	$(BIN)/python -m benchmarks.trace_speed
	$(BIN)/python -m benchmarks.master_step
	$(BIN)/python -m benchmarks.scaler_monitor_overhead
	$(BIN)/python -m benchmarks.int8_speed

docs: .venv/.ready ## Build the documentation into site/
	$(BIN)/pip install --quiet --constraint requirements/tested.txt --editable ".[docs]"
	$(BIN)/mkdocs build --strict

# `build` makes the wheel from the sdist, so that both are complete.
dist: .venv/.ready ## Build the sdist and the wheel into dist/ and check what is in them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m pytest tests/test_release.py -m ""

clean: ## Remove the environments and everything built
	rm -rf .venv .venv-oldest site dist .pytest_cache .mypy_cache .ruff_cache
