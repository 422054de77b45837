# `make demo` and `make test` need Python, pip and make; everything else is installed here.
PYTHON ?= python3
PORT ?= 8080
HOST ?= 127.0.0.1
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
ifeq ($(shell uname -s),Darwin)
EXTRA ?=
else ifneq ($(shell command -v nvidia-smi 2>/dev/null),)
EXTRA ?= cuda13
else
EXTRA ?= cpu
endif
comma := ,
RUN_EXTRAS := $(if $(EXTRA),[$(EXTRA)])
DEV_EXTRAS := [$(if $(EXTRA),$(EXTRA)$(comma))dev]
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
BIN := .venv/bin

.PHONY: demo test check lint fast fuzz install dev clean

demo: install
	$(BIN)/mlxhost up --models demo --host $(HOST) --port $(PORT)

test: dev
	$(PYTEST) $(ARGS)

check: dev lint fast

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fast: dev
	$(PYTEST) -m "not slow and not demo"

fuzz: dev
	$(BIN)/python tests/fuzz/run.py --frames 1000000

install: .venv/.installed

dev: .venv/.dev

.uv/bin/uv:
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target .uv uv

.venv/bin/python: | $(UV)
	$(UV) venv --quiet --python $(PYTHON) .venv

.venv/.installed: pyproject.toml .ci/constraints.txt | .venv/bin/python
	$(UV) pip install --quiet --python .venv/bin/python -c .ci/constraints.txt -e ".$(RUN_EXTRAS)"
	@touch $@

.venv/.dev: .venv/.installed
	$(UV) pip install --quiet --python .venv/bin/python -c .ci/constraints.txt -e ".$(DEV_EXTRAS)"
	@touch $@

clean:
	rm -rf .venv .uv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
