# `make run` and `make test` need nothing but Python >= 3.11: on first use they create .venv and
# install everything else into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Before Python 3.12 measuring coverage doubles the time of the tests.
COVERAGE = $(shell $(BIN)/python -c 'import sys; print("--cov --cov-report=term \
  --cov-fail-under=90" if sys.version_info >= (3, 12) else "")')

.PHONY: help run test test-all check docs bench figures clean

help:  ## print this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): requirements.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedhet needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

run: $(READY)  ## compare seven methods on the digits, or run what ARGS says (ARGS="method=scaffold")
	$(BIN)/python -m fedhet $(or $(ARGS),experiment=first_look)

test: $(READY)  ## run the tests, including one real deployment; Python 3.12 measures coverage too
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not matrix" \
	  $(COVERAGE) $(ARGS)

test-all: $(READY)  ## run all tests, including the full matrix of engines
	$(BIN)/python -m pytest $(ARGS)

check: $(READY)  ## check the formatting, lint with ruff, and check types with mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)  ## run the benchmarks
	$(BIN)/python scripts/bench $(ARGS)

figures: $(READY)  ## measure the figures of README and docs anew (ONLY="readme moon", ARGS=--write)
	$(BIN)/python scripts/figures $(ONLY) $(ARGS)

docs: $(READY)  ## generate docs/methods.md from the docstrings, conf/ and docs/methods/
	$(BIN)/python scripts/methods_page.py

clean:  ## remove the environment and the caches; keep runs and data
	rm -rf $(VENV) .coverage* .pytest_cache .mypy_cache .ruff_cache build *.egg-info
