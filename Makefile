# Everything starts from a fresh machine with Python >= 3.11 and pip.
#   make demo    set up, then serve a real MoE, rebalance it live and prove it
#   make test    set up, then lint, types, import rules and all tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# Extra words for `eplb demo`, pytest and benchmarks: make demo DEMO="--seconds 60", make test PYTEST="-k gate",
# make bench-planner BENCH="--row drift --peer-vllm ../vllm"
DEMO ?=
PYTEST ?=
BENCH ?=
# Releases of engines: make test-engines ENGINES="--vllm 0.33.0 --sglang"
ENGINES ?=
# One part alone: make test-vllm-e2e E2E="--only offline"
E2E ?=
# make sim SEEDS=100000; make sim MUTATIONS=1
SEEDS ?= 5000
MUTATIONS ?=
# make soak SOAK="--minutes 20 --faults 800 --seed 7"
SOAK ?=

.PHONY: help setup demo test sim soak test-long lint types imports unit test-engines test-vllm-e2e proto check-proto bench-planner planning-page clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "eplb-service needs Python 3.11 or newer; this is %s. Set PYTHON=…" % sys.version.split()[0])'
	@echo "setting up $(VENV) (once; some minutes: torch and ortools are large, and the planner's kernels are compiled)"
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make $(VENV): is the venv module installed (Debian: apt-get install python3-venv)?" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m eplb_service.policy.warm_up  # compiles the planner's kernels once, not in the first plan
	@touch $(STAMP)

setup: $(STAMP)  ## make .venv with everything in it

demo: $(STAMP)  ## run the main job end to end and prove it (under 2 minutes)
	@$(BIN)/eplb demo $(DEMO)

test: $(STAMP) lint types imports unit  ## everything: lint, types, import rules, tests

lint: $(STAMP)  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy --strict over everything written by hand
	@$(BIN)/mypy

imports: $(STAMP)  ## which package may import which
	@$(BIN)/lint-imports --no-logo

unit: $(STAMP)  ## pytest: unit, contract, simulation, integration
ifeq ($(strip $(PYTEST)),)
	@$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile -m "not long" tests/unit tests/contract tests/sim tests/scenarios tests/model
	@$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=2 --dist=loadfile -m "not long" tests/integration tests/gpu
else
	@$(BIN)/python -m pytest $(PYTEST)
endif

sim: $(STAMP)  ## simulated faults by seeds: make sim SEEDS=100000, or make sim MUTATIONS=1: each rule off, its violation searched
	@$(BIN)/python -m tests.sim --seeds $(SEEDS) $(if $(MUTATIONS),--mutations)

soak: $(STAMP)  ## serve for minutes while every part is killed, stopped and cut off, tokens compared (SOAK="--survives": ranks too)
	@$(BIN)/python -m tests.soak $(SOAK)

test-long: $(STAMP)  ## every fault of a whole fleet in every phase, short soaks, a weighted fleet, demos with broken flips
	@$(BIN)/python -m pytest -m long tests

proto: $(STAMP)  ## generate the protocol code again
	@$(BIN)/python proto/generate.py

test-engines: $(STAMP)  ## our plug-ins in vLLM's and SGLang's own code: fetches their wheels (400 MB each, kept: 1 MB)
	@$(BIN)/python -m tests.engines $(ENGINES)

test-vllm-e2e: $(STAMP)  ## a real vLLM serving on CPUs, advised by a real planner (once: an environment of 4 GB; then some minutes)
	@$(BIN)/python -m tests.vllm_e2e $(E2E)

check-proto: $(STAMP)  ## fail when the committed protocol code is stale
	@$(BIN)/python proto/generate.py --check

bench-planner: $(STAMP)  ## the planning engine's figures, beside peers where BENCH gives them (about 5 minutes)
	@$(BIN)/python -m benchmarks.planner $(BENCH)

bench-gpu: $(STAMP)  ## what only a GPU can show, in under 5 minutes (BENCH="--out DIR"; BENCH="--device cpu --quick" tries it)
	@$(BIN)/python -m benchmarks.gpu $(BENCH)

planning-page: $(STAMP)  ## run the commands of docs/planning.md again and put in what they print, pictures too
	@$(BIN)/python -m benchmarks.planning_page

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
