# Two commands set everything up on a machine with Python 3.11+, make and gcc:
#   make serve    .venv, packages, the default model, a server on 127.0.0.1:8000
#   make test     .venv, packages, the tests
# Packages are installed with the versions in constraints.txt. The stamp file in .venv is written last, so an interrupted
# installation is repeated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
AIDER := .venv-aider
TRL := .venv-trl
MODEL ?= smollm2
ARGS ?=
JOBS ?= 2
# One compute thread per test worker: more threads than cores make every worker slower.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
# Unmodified third-party clients; their own warnings are not errors here.
TEST_CLIENTS = ONEDRAW_PYTHON=$(CURDIR)/$(BIN)/python $(CLIENTS)/bin/python -m pytest tests/clients -o filterwarnings=ignore
.DEFAULT_GOAL := help
.PHONY: help serve cluster quick soak test test-long test-device test-clients check format bench docs clean

help:
	@echo "make serve        set up and serve $(MODEL) on 127.0.0.1:8000 (MODEL=…, ARGS='--port 9000')"
	@echo "make cluster      the same with two replicas of $(MODEL) in a Ray cluster of this machine (docs/cluster.md)"
	@echo "make test         set up and run the tests"
	@echo "make quick        under a minute: make check, and the contract on the fake backend"
	@echo "make check        format, lint, types, import contracts, duplicate names and import cycles"
	@echo "make format       rewrite the sources in the project's format"
	@echo "make test-long    soak, kill loops, large statistics, and property tests with new random cases"
	@echo "make soak         an hour of hostile clients and faults against two servers (ARGS='--minutes 10')"
	@echo "make test-device  the tests that need an accelerator"
	@echo "make test-clients third-party clients (Python and npm) against a server, in an environment of their own"
	@echo "make bench        measure $(MODEL) on this machine"
	@echo "make docs         regenerate docs/cli.md and docs/api.md"
	@echo "make clean        remove .venv and all caches of this folder"

serve: $(VENV)/.stamp-serve
	exec $(BIN)/onedraw serve $(MODEL) $(ARGS)

cluster: $(VENV)/.stamp-cluster
	exec $(BIN)/onedraw serve $(MODEL) --replicas 2 --threads 1 $(ARGS)

quick: check
	$(PYTEST) -q --dist load tests/laws/test_fake.py $(ARGS)

test: $(VENV)/.stamp-test
	$(PYTEST) -m "not long and not device" $(ARGS)

test-long: $(VENV)/.stamp-test $(CLIENTS)/.stamp $(AIDER)/.stamp $(TRL)/.stamp
	$(PYTEST) -m "long or hypothesis" --hypothesis-profile=searching $(ARGS)
	$(TEST_CLIENTS) -m long

soak: $(VENV)/.stamp-test
	$(BIN)/python -m bench.soak $(ARGS)

test-device: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m device tests/device $(ARGS)

test-clients: $(VENV)/.stamp-test $(CLIENTS)/.stamp
	$(TEST_CLIENTS) -m "not long" $(ARGS)

check: $(VENV)/.stamp-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.census

format: $(VENV)/.stamp-check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.stamp-serve
	$(BIN)/onedraw bench $(MODEL) $(ARGS)

docs: $(VENV)/.stamp-serve
	$(BIN)/python -m onedraw.cli.cli_docs > docs/cli.md.tmp
	mv docs/cli.md.tmp docs/cli.md
	$(BIN)/python -m onedraw.server.api_docs > docs/api.md.tmp
	mv docs/api.md.tmp docs/api.md
	$(BIN)/python -m tools.memory_table

clean:
	rm -rf $(VENV) $(CLIENTS) $(AIDER) $(TRL) tests/clients/node/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------- set-up

$(VENV)/.stamp-serve: EXTRAS := serve,structured,terminal,models
$(VENV)/.stamp-cluster: EXTRAS := serve,structured,terminal,models,ray
$(VENV)/.stamp-test: EXTRAS := serve,structured,terminal,models,xla,ray,otel,test,browser
$(VENV)/.stamp-check: EXTRAS := serve,structured,terminal,models,xla,ray,otel,test,browser,check

# Remove a .venv whose Python does not run, that was moved, or in which an installation was interrupted.
$(shell [ ! -e $(VENV) ] || { $(BIN)/python -c 'import pip' && grep -qF '$(CURDIR)/$(VENV)' $(VENV)/pyvenv.cfg \
    && [ ! -e $(VENV)/.installing ]; } 2>/dev/null || rm -rf $(VENV))

OLD_PYTHON := Onedraw needs Python 3.11 or later: make PYTHON=python3.12 …

$(VENV)/.stamp-%: pyproject.toml constraints.txt
	@[ -e $(VENV) ] || { $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(OLD_PYTHON)")' \
	    && echo "making $(VENV)" && $(PYTHON) -m venv $(VENV); }
	@touch $(VENV)/.installing
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@rm $(VENV)/.installing
	@touch $@

# npm packages are installed only if npm is there; their tests are skipped with a reason otherwise.
$(CLIENTS)/.stamp: tests/clients/requirements.txt tests/clients/node/package-lock.json
	@[ -x $(CLIENTS)/bin/python ] || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -r tests/clients/requirements.txt
	@if command -v npm > /dev/null; then cd tests/clients/node && npm ci --no-audit --no-fund; fi
	@touch $@

# Aider requires exact versions of everything that it imports, so it has an environment of its own.
$(AIDER)/.stamp: Makefile
	@[ -x $(AIDER)/bin/python ] || $(PYTHON) -m venv $(AIDER)
	$(AIDER)/bin/python -m pip install --disable-pip-version-check aider-chat==0.86.2
	@touch $@

# TRL needs torch and transformers, which no other client does.
$(TRL)/.stamp: Makefile constraints.txt
	@[ -x $(TRL)/bin/python ] || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --disable-pip-version-check -c constraints.txt trl==1.16.0 aiohttp requests
	@touch $@
