# Every target sets up what it needs; `make demo` and `make test` work on a fresh machine.
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" OMP_WAIT_POLICY=passive PYTHONPATH="$(CURDIR)" $(BIN)/python
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ALGORITHM ?= grpo
SEED ?= 0

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

# torch goes in alone and first, so that no other package chooses its build
$(VENV)/.reference: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[reference]'
	touch $@

$(VENV)/.dev: $(VENV)/.reference
	$(PIP) -c constraints.txt -e '.[reference,dev]'
	touch $@

setup: $(VENV)/.dev  ## make the virtual environment with everything for work on the code

proto: $(VENV)/.dev  ## regenerate sluice/api from protos/
	$(RUN) tools/gen_protos.py

lint: $(VENV)/.dev  ## style, types, layers, contract
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) tools/check_house.py
	PATH="$(CURDIR)/$(BIN):$$PATH" lint-imports --no-logo
	$(RUN) tools/gen_protos.py --check
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/released.binpb

test: lint  ## what CI runs: lint, unit, service, contract, short end-to-end
	$(RUN) -m pytest -q

demo: $(VENV)/.reference  ## a tiny model learns by GRPO over all services
	$(RUN) -m examples.demo --seed $(SEED) --algorithm $(ALGORITHM)

demo-smollm2: $(VENV)/.reference  ## the real SmolLM2-135M learns to compare two numbers, then to add
	$(RUN) -m examples.demo_smollm2 --task chain_sum --steps 60 --stop-at-reward 0.6 --target 0.3
	$(RUN) -m examples.demo_smollm2

verify: $(VENV)/.dev  ## the long version: more seeds, benchmarks
	for seed in 0 1 2; do $(RUN) -m examples.demo --seed $$seed --run-dir runs/verify-$$seed; done
	$(MAKE) bench

bench: bench-planner bench-logprob  ## side by side measurements, one summary line each

bench-planner: $(VENV)/.dev
	$(RUN) benchmarks/planner.py

bench-logprob: $(VENV)/.dev
	$(RUN) benchmarks/logprob.py

clean:  ## remove the virtual environment, runs and caches
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: help setup proto lint test demo demo-smollm2 verify bench bench-planner bench-logprob clean
