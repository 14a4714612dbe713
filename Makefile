# Each target sets up what it needs: a machine with Python 3.10+ and make is enough.
#   make demo      the main job, end to end        make test    the tests
#   make lint      ruff and mypy                    make bench   the benchmarks
# TORCH chooses another torch:  make test TORCH='torch==2.11.0'
#                               make demo TORCH=system   (the one this Python already has)
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= $(shell grep '^torch==' constraints.txt)
ARGS   ?=
bin    := $(VENV)/bin
stamp  := $(VENV)/.installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)

.PHONY: venv servers demo test lint bench clean
venv: $(stamp)

# The torch line is taken out of the constraints and installed first, so that TORCH can differ from it.
$(stamp): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "airdata needs Python 3.10 or newer; choose one with PYTHON=...")'
	$(PYTHON) -m venv $(if $(filter system,$(TORCH)),--system-site-packages) $(VENV)
	sed '/^torch==/d' constraints.txt > $(VENV)/constraints.txt
	$(if $(filter system,$(TORCH)),,$(bin)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt '$(TORCH)')
	$(bin)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	rm -f $(VENV)/.installed-* && touch $@

demo: venv
	$(bin)/python examples/digits.py $(ARGS)

test: venv servers
	$(bin)/python -m pytest $(ARGS)

# An Azure storage server for the tests; without npm they say that they need it. This release runs on any Node.
servers: .servers/.installed
.servers/.installed:
	mkdir -p .servers
	npm install --prefix .servers --no-audit --no-fund --silent azurite@3.35.0 && touch $@ || echo "no Azure server for the tests"

lint: venv
	$(bin)/ruff check src tests examples benchmarks
	$(bin)/ruff format --check src tests examples benchmarks
	$(bin)/mypy

bench: venv
	$(bin)/python benchmarks/run.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
