# Everything runs from .venv, made on first use from any Python >= 3.11 (PYTHON=… to choose one).
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/ready
# Most tests wait for servers and Spark, so three processes keep two cores busy. A file's tests share what they started.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

demo: $(READY) ## two sites and a centre on this machine, with the Dagster UI; ARGS='--nodes 500'
	$(BIN)/sr-assets demo $(ARGS)

test-fast: $(READY) ## the tests that start no server, no Spark and no other process; ARGS='-k settings'
	$(PYTEST) -m 'not process' $(ARGS)

properties: $(READY) ## search for examples that break a property, for some minutes; ARGS='-k senders'
	$(PYTEST) -m 'hypothesis and not process' --hypothesis-profile=search --timeout 0 $(ARGS)

coverage: $(READY) ## the fast tests, and a floor of what they cover; ARGS='--cov-report=term-missing:skip-covered'
	$(PYTEST) -m 'not process' --cov --cov-report= $(ARGS)

test: $(READY) ## the test suite without the faults; ARGS='-k tracking'
	$(PYTEST) --ignore=sr_assets_tests/faults $(ARGS)

test-faults: $(READY) ## kill, stop and starve runs, workers and servers, and compare what is left; ARGS='-k outbox'
	$(PYTEST) sr_assets_tests/faults $(ARGS)

check: fmt-check lint types coverage ## what CI runs: format, lint, types, the fast tests' coverage, then all tests in one go
	$(PYTEST)

bench: $(READY) ## the figures of this machine, as a table and JSON
	$(BIN)/python -m sr_assets_bench $(ARGS)

soak: $(READY) ## random kills, then source and target are compared; SECONDS=300 SEED=7 ARGS=--json
	$(BIN)/python -m sr_assets_tests.soak $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

dev: export DAGSTER_HOME ?= $(CURDIR)/.sr_assets/dagster
dev: $(READY) ## dagster dev for the configuration named by SR_ASSETS_CONFIG
	mkdir -p "$$DAGSTER_HOME" && { test -e "$$DAGSTER_HOME/dagster.yaml" || cp dagster.yaml "$$DAGSTER_HOME"; } && $(BIN)/dagster dev -w workspace.yaml $(ARGS)

fmt: $(READY) ## format the code, and apply the fixes that ruff knows
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

fmt-check: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY) ## ruff
	$(BIN)/ruff check .

types: $(READY) ## mypy --strict on the package and the tests
	$(BIN)/mypy

help: ## this list
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' Makefile

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv found: install one, or name it with PYTHON=/path/to/python3"; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || "$(PYTHON)" -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[ui,embedded,charts,postgres]' --group dev
	@touch $@

.NOTPARALLEL:
.PHONY: demo test-fast properties coverage test test-faults check bench soak dev fmt fmt-check lint types help
