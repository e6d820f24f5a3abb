# Everything a newcomer, a reviewer and CI run, under the same names. `make` alone explains.
#
# Set-up is a side effect: each target brings the virtual environment up to date first, which
# costs nothing when pyproject.toml and the constraints have not changed.

PYTHON      ?= python3
VENV        ?= .venv
EXTRAS      ?= dev
CONSTRAINTS ?= requirements/constraints.txt
JOBS        ?= auto
# Where torch alone is taken from; empty means wherever pip looks. On Linux x86-64 the torch of the
# public index is the CUDA build, some 3 GB with its libraries. To get the CPU build instead:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
# docs/decisions/0002-torch-pin.md has the reasons.
TORCH_INDEX ?=
# Passed on as they are, as in: make test ARGS='-k split_merge --lf'
ARGS        ?=

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

comma := ,
BIN   := $(abspath $(VENV))/bin
PY    := $(BIN)/python
PIP   := $(PY) -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS)
STAMP := $(VENV)/.installed
STAMP_EXTRAS := $(STAMP)-$(subst $(comma),-,$(EXTRAS))
SHELL_SCRIPTS = .ci/run $(wildcard tools/*.sh)

# The tools run each other by name (jactionlint calls shellcheck); this way they find ours.
export PATH := $(BIN):$(PATH)
export VIRTUAL_ENV := $(abspath $(VENV))

.PHONY: help
help: ## this text
	@echo 'Minuet. Each target sets up $(VENV) by itself; start with `make demo`.'
	@echo
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Settings, with their present values:'
	@echo '  PYTHON=$(PYTHON)      the Python (3.11 or newer) that $(VENV) is made from'
	@echo '  VENV=$(VENV)          where to install'
	@echo '  EXTRAS=$(EXTRAS)          what else to install; dev has all that tests need'
	@echo '  TORCH_INDEX=$(TORCH_INDEX)         package index for torch alone; the Makefile says when to set it'
	@echo '  JOBS=$(JOBS)           test processes'
	@echo '  ARGS=$(ARGS)                passed on to pytest'

# --- use it ------------------------------------------------------------------------------------

.PHONY: demo
demo: $(STAMP) ## show Minuet at work on this machine, no GPU needed
	@bash tools/demo.sh

.PHONY: setup
setup: $(STAMP_EXTRAS) ## set up only

# --- check it ----------------------------------------------------------------------------------

# One thread in each process: the processes already fill the cores.
.PHONY: test
test: $(STAMP_EXTRAS) ## every test that needs no GPU, in parallel
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
	  $(PY) -m pytest -m 'not gpu' -n $(JOBS) --dist worksteal --durations=15 $(ARGS)

.PHONY: test-gpu
test-gpu: $(STAMP_EXTRAS) ## the tests that need a GPU, one at a time
	$(PY) -m pytest -m gpu -n 0 --durations=15 $(ARGS)

.PHONY: check
check: lint types contracts workflows docs-check catalog ## all that needs no test run: the next six

.PHONY: lint
lint: $(STAMP_EXTRAS) ## ruff, codespell, shellcheck, declared dependencies, file sizes
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	git ls-files --cached --others --exclude-standard -z | xargs -0 $(BIN)/codespell
	$(BIN)/shellcheck $(SHELL_SCRIPTS)
	$(BIN)/deptry src
	git ls-files -z ':!src/minuet/models/bundled/*.safetensors' | \
	  xargs -0 $(BIN)/check-added-large-files --enforce-all --maxkb=1024

.PHONY: types
types: $(STAMP_EXTRAS) ## mypy, strict
	$(BIN)/mypy

.PHONY: contracts
contracts: $(STAMP_EXTRAS) ## who may import whom (import-linter)
	$(BIN)/lint-imports --no-logo --no-cache

.PHONY: workflows
workflows: $(STAMP_EXTRAS) ## the GitHub workflows (jactionlint)
	$(BIN)/jactionlint --profile pedantic --strict-exit

.PHONY: docs-check
docs-check: $(STAMP_EXTRAS) ## the generated pages are what `make docs` writes
	$(PY) -m minuet.docs --check

.PHONY: catalog
catalog: $(STAMP_EXTRAS) ## the entries of the evaluation catalog are valid
	$(PY) -m minuet eval --check

# --- change it ---------------------------------------------------------------------------------

.PHONY: fix
fix: $(STAMP_EXTRAS) ## let ruff repair what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: docs
docs: $(STAMP) ## write the generated pages
	$(PY) -m minuet.docs --write

.PHONY: hooks
hooks: $(STAMP_EXTRAS) ## run the quick checks at each commit (pre-commit)
	$(BIN)/pre-commit install

.PHONY: clean
clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up ------------------------------------------------------------------------------------

$(PY):
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Minuet needs Python 3.11 or newer; PYTHON=$(PYTHON) is $$("$(PYTHON)" --version 2>&1)." >&2; \
	  echo "Name another one, as in: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo '==> $(VENV), from $(PYTHON)'
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch goes in alone and first, so that no dependency of a dependency picks the build.
$(STAMP): pyproject.toml $(CONSTRAINTS) | $(PY)
	@echo '==> torch, from $(or $(TORCH_INDEX),where pip looks)'
	@$(if $(TORCH_INDEX),,command -v nvidia-smi > /dev/null || \
	  echo '    (no NVIDIA GPU here: if this is slow, a CUDA build is coming; see TORCH_INDEX in `make help`)')
	@$(PIP) torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@echo '==> minuet'
	@$(PIP) --editable .
	@touch $@

$(STAMP_EXTRAS): $(STAMP)
	@echo '==> minuet[$(EXTRAS)]'
	@$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@
