# The commands a person types. `make` alone lists them.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin

# What is handed on to `kvduplex`: MODEL=folder-or-id, PORT=8000, ARGS="any other option"; CLUSTER is a cluster file.
CLUSTER ?= infra-cdk/clusters/cpu-smoke.yaml
MODEL ?=
PORT ?=
ARGS ?=
SERVE_ARGS := $(if $(MODEL),--model $(MODEL)) $(if $(PORT),--port $(PORT)) $(ARGS)

# Accelerators: the recipe, and the environments with their engines (Neuron's comes with its machine image).
RECIPE ?=
GPU_VENV ?= .venv-gpu
NEURON_VENV ?= $(lastword .venv-neuron $(sort $(wildcard /opt/aws_neuronx_venv_pytorch_inference_vllm_*)))
ACCELERATOR := .make/accelerator.sh
RECIPE_ARGS := $(if $(RECIPE),--recipe $(RECIPE)) $(SERVE_ARGS)

export PYTHON TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help setup setup-base setup-neuron setup-gpu serve-cpu serve-neuron serve-gpu router doctor test test-fast test-e2e test-soak test-image setup-infra test-infra synth \
	lint types imports docs docs-serve \
	bench bench-smoke bench-router bench-routing bench-decisions bench-simulate lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

setup: ## Make the environment with the CPU engine (every other target calls it)
	@.make/setup.sh $(VENV) engine

setup-base: ## Make the environment without engines; enough for test-fast and lint
	@.make/setup.sh $(VENV) base

serve-cpu: setup ## Start one prefill and one decode engine (real vLLM, CPU) and the router
	@exec $(BIN)/kvduplex serve cpu $(SERVE_ARGS)

serve-neuron: ## Start a recipe on NeuronCores, and the router: make serve-neuron RECIPE=name-or-file.yaml
	@bin=$$($(ACCELERATOR) find neuron $(NEURON_VENV) $(VENV)) && exec $$bin/kvduplex serve neuron $(RECIPE_ARGS)

serve-gpu: ## Start a recipe on GPUs, and the router: make serve-gpu RECIPE=name-or-file.yaml
	@bin=$$($(ACCELERATOR) find gpu $(GPU_VENV) $(VENV)) && exec $$bin/kvduplex serve gpu $(RECIPE_ARGS)

setup-neuron: ## Put kvduplex into the environment of a Neuron machine image (NEURON_VENV)
	@$(ACCELERATOR) make neuron $(NEURON_VENV)

setup-gpu: ## Make the environment with the GPU engine (GPU_VENV)
	@$(ACCELERATOR) make gpu $(GPU_VENV)

router: setup ## Start the router alone: make router ARGS="--prefill URL --decode URL"
	@exec $(BIN)/kvduplex router $(ARGS)

doctor: setup ## Say what this host has, what is wrong with it, and how to mend it
	@exec $(BIN)/kvduplex doctor $(ARGS)

test: lint types imports docs test-fast test-e2e ## Everything that must be green: checks, unit, contract and real-engine tests

test-fast: ## Unit and contract tests; no engines
	@.make/setup.sh $(VENV) any
	$(BIN)/pytest -q -n 2 --dist worksteal -m "not engine and not hardware and not infra and not image" --durations=5 $(ARGS)

test-e2e: setup ## Tests that start real vLLM engines
	$(BIN)/pytest -q -m engine --timeout=600 --durations=10 tests/e2e tests/chaos $(ARGS)

test-hardware: ## Tests that need this host's accelerator; RECIPE adds one that is served
	@kind=$$([ -e /dev/nvidia0 ] && echo gpu || echo neuron); [ $$kind = gpu ] && env=$(GPU_VENV) || env=$(NEURON_VENV); \
	bin=$$($(ACCELERATOR) find $$kind $$env $(VENV)) && \
	KVDUPLEX_TEST_RECIPE="$(RECIPE)" exec $$bin/python -m pytest -q -m hardware -W default tests/hardware $(ARGS)

test-soak: setup ## 5,000 turns of every kind of history and 100 kills, on real engines (hours)
	KVDUPLEX_TURNS=5000 KVDUPLEX_KILLS=100 $(BIN)/pytest -q -m engine --timeout=36000 tests/e2e/test_leased_pair.py tests/chaos $(ARGS)

test-image: setup ## Provision the cpu image into a root of its own and serve from it (root, debootstrap; 3 to 6 minutes)
	$(BIN)/pytest -q -m image --durations=10 tests/infra/ami/test_image.py $(ARGS)

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup-infra: setup ## Add the CDK and its command line to the environment (needs Node.js)
	@.make/setup-infra.sh $(VENV)

test-infra: setup-infra ## AWS offline: types, every cluster synthesised, linted and deployed in memory, launches; as root the image too
	$(BIN)/mypy infra-cdk tests/infra/cdk
	$(BIN)/pytest -q -m "infra or image" --durations=10 tests/infra $(ARGS)

synth: setup-infra ## Synthesise a cluster: make synth CLUSTER=infra-cdk/clusters/trn2.yaml
	$(BIN)/python infra-cdk/app.py --cluster $(CLUSTER) --output infra-cdk/cdk.out

types: setup ## mypy, strict
	$(BIN)/mypy

imports: setup ## import-linter: the arrows between the rooms
	$(BIN)/lint-imports --no-cache

docs: setup ## Build the documentation, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f .mkdocs.yml

docs-serve: setup ## Read the documentation in a browser while writing it
	$(BIN)/mkdocs serve -f .mkdocs.yml

bench: setup ## The multi-turn benchmark on this machine's CPUs, with report, in .bench/ (20 minutes; ARGS=--quick: 3)
	$(BIN)/kvduplex bench multiturn --serve cpu --report $(ARGS)

bench-smoke: setup ## Turn 2 with and without reuse, side by side on real engines
	$(BIN)/kvduplex bench smoke $(ARGS)

bench-router: ## The router's own CPU per request: make bench-router ARGS="--peer vllm-router"
	@.make/setup.sh $(VENV) any
	$(BIN)/kvduplex bench router $(ARGS)

bench-routing: ## Routing policies beside vllm-router's over simulated engines: make bench-routing ARGS="--trace agents"
	@.make/setup.sh $(VENV) any
	@[ -x .venv-peer/bin/vllm-router ] || { $(BIN)/python -m venv .venv-peer && .venv-peer/bin/pip install -q vllm-router==0.1.17; }
	$(BIN)/kvduplex bench routing --peer .venv-peer/bin/vllm-router --output .bench/routing $(ARGS)

bench-decisions: ## CPU time of routing decisions, and memory of the block index: make bench-decisions ARGS="--engines 64"
	@.make/setup.sh $(VENV) any
	$(BIN)/python -m kvduplex_router.routing.timing $(ARGS)

bench-simulate: ## Fleets in virtual time, from timing profiles: make bench-simulate ARGS="--study ttl"
	@.make/setup.sh $(VENV) any
	$(BIN)/kvduplex bench simulate $(ARGS)

lock: setup ## Resolve the dependencies anew and write the pins
	$(BIN)/python .make/lock.py

clean: ## Remove the environment and everything built
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
