# `make run` and `make test` need nothing but Python >= 3.11: each makes .venv and installs what it needs on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help run test test-all check bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedhet needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

run: $(READY)  ## the main job: FedNorm against non-IID clients on the embedded digits (ARGS="method=scaffold ...")
	$(BIN)/python -m fedhet $(ARGS)

test: $(READY)  ## the tests, one real deployment among them, and coverage
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not matrix" --cov --cov-report=term --cov-fail-under=90 $(ARGS)

test-all: $(READY)  ## all tests, the full matrix of engines among them
	$(BIN)/python -m pytest $(ARGS)

check: $(READY)  ## formatting, ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)  ## the benchmarks
	$(BIN)/python scripts/bench $(ARGS)

.PHONY: docs
docs: $(READY)  ## generate docs/methods.md from the docstrings, conf/ and docs/methods/
	$(BIN)/python scripts/methods_page.py

clean:  ## remove the environment and caches, never runs or data
	rm -rf $(VENV) .coverage* .pytest_cache .mypy_cache .ruff_cache build *.egg-info
