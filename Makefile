# `make demo` and `make test` need Python 3.11 or newer and a C library, nothing else.
# Everything is installed into .venv in this checkout, once; after that no network is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-for
INPUTS := pyproject.toml constraints.txt

# A virtual environment holds absolute paths. The stamp names the folder it was made in,
# so that a checkout that was moved, or an installation that was cut short, starts afresh.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
FRESH := --clear
endif

.PHONY: help venv demo test lint clean

help:
	@echo "make demo    quantize a real sentence encoder and compare it with fp32 and PyTorch int8"
	@echo "make test    run the whole test suite"
	@echo "make lint    run ruff and pyright"
	@echo "make venv    only set up $(VENV) (the others do it when needed)"
	@echo "make clean   remove $(VENV), caches and built files"

venv: $(STAMP)

demo: $(STAMP)
	@$(BIN)/lowbit demo

test: $(STAMP)
	@$(BIN)/python -m pytest

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(INPUTS)
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "error: $(PYTHON) not found; lowbit needs Python 3.11 or newer (make PYTHON=/path/to/python3)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$("$(PYTHON)" --version 2>&1) is too old; lowbit needs Python 3.11 or newer (make PYTHON=/path/to/python3)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv or ensurepip module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV); the first time this downloads several hundred MB and takes minutes."
	@"$(PYTHON)" -m venv $(FRESH) $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --upgrade pip -c constraints.txt
	@$(BIN)/python -m pip install -e '.[demo,lab,dev]' -c constraints.txt
	@printf '%s\n' "$(CURDIR)" > $(STAMP)
