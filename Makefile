# `make run` and `make test` need nothing but Python >= 3.11: on first use they create .venv and
# install everything else into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOWEST := .venv-lowest
NEWEST := .venv-newest
# Two processes; the tests of a file stay in one of them, because they share what it prepares.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# What ONLY names; all tests without it.
TESTS = $(patsubst tests/papers,papers/tests,$(addprefix tests/,$(ONLY)))
FAST := -m "not slow and not matrix"
# Percent of the lines that `make test` executes at least, in all files and in some packages.
COVERED := 90:fedhet/* 95:fedhet/*.py 95:fedhet/methods/* 95:fedhet/core/* \
  95:fedhet/core/server/merging.py 95:fedhet/core/server/admission.py \
  70:fedhet/flower/* 70:fedhet/engines/* 70:fedhet/deploy/* \
  70:fedhet/study/*

.PHONY: help run test test-slow test-all test-lowest test-newest test-installed coverage check \
  docs bench figures bundle clean

help:  ## print this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml papers/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedhet needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]' -e papers
	@touch $@

run: $(READY)  ## compare seven methods on the digits, or run what ARGS says (ARGS="method=scaffold")
	$(BIN)/python -m fedhet $(or $(ARGS),experiment=first_look)

test: $(READY)  ## the fast tests, about five minutes; ONLY=methods: of one folder, in one process
	$(BIN)/python $(if $(ONLY),-m pytest,$(PYTEST)) $(FAST) $(TESTS) $(ARGS)

test-slow: $(READY)  ## the other tests, but for the matrix of engines; about ten minutes
	$(BIN)/python $(PYTEST) -m "slow and not matrix" $(TESTS) $(ARGS)

test-all: test test-slow  ## all tests; the matrix of engines and deployments takes an hour
	$(BIN)/python -m pytest -m matrix $(TESTS) $(ARGS)

test-lowest:  ## the fast tests with the oldest dependencies allowed, in .venv-lowest (6 GB)
	mkdir -p $(LOWEST)
	sed -nE '/^dep/,/^\]/s/ *"([a-z0-9-]+)>=([0-9.]+).*/\1==\2/p' pyproject.toml \
	  > $(LOWEST)/constraints.txt
	PIP_CONSTRAINT=$(CURDIR)/$(LOWEST)/constraints.txt $(MAKE) test VENV=$(LOWEST)

test-newest: $(READY)  ## the tests of Flower with its newest release, and its newest pre-release
	@# Each environment has Flower alone, and finds all else in $(VENV). Flower looks for its version
	@# under the name flwr, which the nightly has not.
	@for flower in flwr "flwr-nightly --pre"; do \
	  env=$(NEWEST)/$${flower%% *}; \
	  $(BIN)/python -m venv --upgrade-deps $$env && packages=$$(echo $$env/lib/python*/site-packages) \
	  && $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > $$packages/others.pth \
	  && $$env/bin/python -m pip install --quiet --ignore-installed --no-deps $$flower \
	  && $$env/bin/python -m pip install --quiet $$flower || exit; \
	  for info in $$packages/flwr_nightly-*.dist-info; do \
	    test ! -e $$info || cp -r $$info $$(echo $$info | sed s/flwr_nightly/flwr/); \
	  done; \
	  $$env/bin/python -m pip list --path $$packages | grep ^flwr; \
	  PYTHONPATH=$(CURDIR) $$env/bin/python $(PYTEST) -m "deployment or not matrix" \
	    tests/engines tests/deploy tests/contracts tests/config/test_bundle.py $(ARGS) \
	    || failed=yes; \
	done; test -z "$$failed"

test-installed: $(READY)  ## wheel, app bundle and docs/flower.md in empty environments (24 GB)
	$(BIN)/python -m pytest -m matrix tests/config/test_packaging.py \
	  tests/engines/test_foreign_app.py $(ARGS)

coverage: $(READY)  ## which lines the fast tests execute, and whether they are enough
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) $(FAST) $(ARGS)
	@# A process that a test has killed may leave half a file, of which coverage would warn.
	$(BIN)/python -W ignore -m coverage combine --quiet
	rm -f .coverage.*
	$(BIN)/coverage report
	@set -f; for rule in $(COVERED); do \
	  printf '%s of %s, at least %s: ' "lines" "$${rule#*:}" "$${rule%%:*}"; \
	  $(BIN)/coverage report --include="$${rule#*:}" --format=total --fail-under="$${rule%%:*}" \
	    || failed=yes; \
	done; test -z "$$failed"

check: $(READY)  ## check formatting, lint with ruff, check types with mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/size --check

bench: $(READY)  ## run the benchmarks
	$(BIN)/python scripts/bench $(ARGS)

figures: $(READY)  ## measure the figures of README and docs anew (ONLY="readme moon", ARGS=--write)
	$(BIN)/python scripts/figures $(ONLY) $(ARGS)

docs: $(READY)  ## make all pages, with their pictures, from papers/results and docstrings: pages/
	$(BIN)/python -m papers
	$(BIN)/python scripts/methods_page.py

bundle: $(READY)  ## build the Flower app, and what `flwr app publish` takes in build/fedhet
	rm -rf build
	$(BIN)/python scripts/bundle.py build/fedhet
	cd build && $(abspath $(BIN))/flwr build --app fedhet \
	  && $(abspath $(BIN))/python -m zipfile -e *.fab fedhet

clean:  ## remove the environment and the caches; keep runs and data
	rm -rf $(VENV) $(LOWEST) $(NEWEST) .coverage* .pytest_cache .mypy_cache .ruff_cache build *.egg-info
