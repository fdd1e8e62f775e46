# The commands of this repository; `make help` lists them. Each installs what it needs into .venv first.
#
#   PYTHON       the interpreter .venv is made with; default: the first of the list below that is 3.11 or newer
#   CONSTRAINTS  a pip constraints file; default: constraints.txt where CI=true, else none
#   TORCH_INDEX  a package index that torch is taken from, or "none"; default: see scripts/install.py

BIN := .venv/bin
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
CONSTRAINTS ?= $(if $(filter true,$(CI)),constraints.txt)
export CONSTRAINTS TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: demo test check lines clean help

demo: .venv/.installed-train ## train a small model on the shipped text, export it, check it, generate from it
	$(BIN)/crucible demo

test: .venv/.installed-dev ## run every test that needs no GPU
	$(BIN)/python -m pytest

check: .venv/.installed-dev ## lint, format, types, import rules, line budget
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/null/test_import_rules.py
	$(BIN)/python scripts/lines.py

lines: ## code lines per package against their budget
	@$(or $(PYTHON),$(no_python)) scripts/lines.py

clean: ## remove .venv, build products and caches; data, runs and artifacts stay
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv/.installed-%: pyproject.toml constraints.txt scripts/install.py
	$(or $(PYTHON),$(no_python)) scripts/install.py $*
	@touch $@

no_python = $(error no Python 3.11 or newer with its venv module found; on Debian and Ubuntu: \
	apt-get install python3-venv. Another interpreter: make PYTHON=/path/to/python3)
