# Every target sets up what it needs; `make demo` and `make test` work on a fresh machine.
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" OMP_WAIT_POLICY=passive PYTHONPATH="$(CURDIR)" $(BIN)/python
TEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ALGORITHM ?= grpo
SEED ?= 0
BACKEND ?= reference
TP ?= 1

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

# torch goes in alone and first, so that no other package chooses its build
$(VENV)/.reference: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[reference]'
	touch $@

$(VENV)/.megatron: $(VENV)/.reference
	$(PIP) -c constraints.txt -e '.[reference,megatron]'
	touch $@

$(VENV)/.dev: $(VENV)/.megatron
	$(PIP) -c constraints.txt -e '.[reference,megatron,dev]'
	touch $@

# sglang-router brings its own pins, so it lives apart
build/sglang-router/.installed:
	$(PYTHON) -m venv build/sglang-router
	build/sglang-router/bin/python -m pip install --quiet sglang-router==0.3.2
	touch $@

setup: $(VENV)/.dev  ## make the virtual environment with everything for work on the code

proto: $(VENV)/.dev  ## regenerate sluice/api from protos/
	$(RUN) tools/gen_protos.py

docs: $(VENV)/.dev  ## regenerate docs/metrics.md from the code
	$(RUN) tools/metrics_docs.py

lint: $(VENV)/.dev  ## style, types, layers, contract, generated files
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) tools/check_house.py
	PATH="$(CURDIR)/$(BIN):$$PATH" lint-imports --no-logo
	$(RUN) tools/gen_protos.py --check
	$(RUN) tools/metrics_docs.py --check
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/released.binpb

test: lint  ## what CI runs: lint, unit, service, contract, short end-to-end
	$(TEST) --ignore tests/megatron
	$(TEST) tests/megatron -m fast

test-megatron: $(VENV)/.dev  ## Megatron-Core under every parallel layout against the reference
	$(TEST) tests/megatron

demo: $(VENV)/.$(BACKEND)  ## a tiny model learns by GRPO (ALGORITHM=, SEED=, BACKEND=megatron, TP=)
	$(RUN) -m examples.demo --seed $(SEED) --algorithm $(ALGORITHM) --backend $(BACKEND) --tensor $(TP)

demo-smollm2: $(VENV)/.reference  ## the real SmolLM2-135M learns to add, then to compare two numbers
	$(RUN) -m examples.demo_smollm2 --task chain_sum --steps 60 --stop-at-reward 0.5 --target 0.3
	$(RUN) -m examples.demo_smollm2

fault-matrix: $(VENV)/.dev  ## kill -9 between every two durable writes; lost answers
	$(RUN) -m tools.fault_matrix

compose-smoke: $(VENV)/.dev  ## build, bring up, train, scrape, kill and recover with docker compose
	$(RUN) -m tools.compose_smoke

verify: $(VENV)/.dev  ## the long version: three seeds, every algorithm, faults, layouts, benchmarks
	for seed in 0 1 2; do $(RUN) -m examples.demo --seed $$seed --run-dir runs/verify-$$seed; done
	for algorithm in rloo reinforce++ gspo cispo dr_grpo; do
		$(RUN) -m examples.demo --algorithm $$algorithm --run-dir runs/verify-$$algorithm
	done
	$(MAKE) fault-matrix test-megatron bench

bench: bench-planner bench-logprob bench-router  ## side by side, one summary line each

bench-planner: $(VENV)/.dev  ## micro-batch planner against first-fit and others
	$(RUN) benchmarks/planner.py

bench-logprob: $(VENV)/.dev  ## memory and time of fused log-probs
	$(RUN) benchmarks/logprob.py

bench-engine: $(VENV)/.dev  ## reference engine against transformers generate
	$(RUN) benchmarks/engine.py

bench-router: $(VENV)/.dev build/sglang-router/.installed  ## router against sglang-router
	$(RUN) -m benchmarks.router

clean:  ## remove the virtual environment, runs and caches
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: help setup proto docs lint test test-megatron demo demo-smollm2 fault-matrix compose-smoke \
	verify bench bench-planner bench-logprob bench-engine bench-router clean
