# Everything runs from .venv, created on first use from any Python >= 3.11 (PYTHON=… selects one).
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# The package with what the demo needs; and with the tools of its developers too.
INSTALLED := .venv/installed
READY := .venv/ready
# Most tests wait for servers and Spark, so four processes keep two cores busy. Tests of one file share servers.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
# Each of the suite's hundreds of processes would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# The tests of `make check`.
GATE := not long and not nightly

demo: $(INSTALLED) ## run two sites and a centre on this machine, with the Dagster UI; ARGS='--nodes 500'
	$(BIN)/sr-assets demo $(ARGS)

install: $(INSTALLED) ## install the package into .venv, with what the demo and the tutorials need

docs: $(READY) ## build the documentation site into sr_assets/site, where `sr-assets up` serves it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

pictures: $(READY) ## draw the diagrams and timelines, and take the pictures of the documents; needs chromium and npm
	PYTHONPATH=. $(BIN)/python docs/diagrams.py && $(BIN)/python docs/timelines.py && $(BIN)/python -m sr_assets_bench.pictures

test-fast: $(READY) ## run the tests that start no server, no Spark and no other process; ARGS='-k settings'
	$(PYTEST) -m 'not process' $(ARGS)

properties: $(READY) ## search for examples that break a property; ARGS='-k senders'
	$(PYTEST) -m hypothesis --hypothesis-profile=search --timeout 0 $(ARGS)

coverage: $(READY) ## run the fast tests and require a minimum coverage; ARGS='--cov-report=term-missing:skip-covered'
	$(PYTEST) -m 'not process' --cov --cov-report= $(ARGS)

test: $(READY) ## run the tests of `check` except the fault tests; ARGS='-k tracking'
	$(PYTEST) -m "$(GATE)" --ignore=sr_assets_tests/faults $(ARGS)

test-faults: $(READY) ## kill, suspend and starve runs, workers and servers, and check the data; ARGS='-k outbox'
	$(PYTEST) -m "$(GATE)" sr_assets_tests/faults $(ARGS)

test-nightly: $(READY) properties ## run the cases that `make check` leaves out, and search for examples that break a property
	$(PYTEST) -m nightly $(ARGS)

test-long: $(READY) ## run the tests that take minutes: soak, benchmarks, Spark clusters; before a release
	$(PYTEST) -m long $(ARGS)

test-packages: deb rpm ## install the packages in a Debian chroot, run, upgrade and remove them; as root, with debootstrap
	$(BIN)/python -m pytest -v sr_assets_tests/packages $(ARGS)

# In a fresh clone, each of the four workers would compile all tests.
check: fmt-check lint ## run all CI steps: format, lint, types beside all tests but the nightly and long ones; ARGS='--maxfail 1'
	@types=$$(mktemp); $(BIN)/mypy >$$types 2>&1 & mypy=$$!; \
	[ -d sr_assets_tests/__pycache__ ] || $(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1; \
	$(PYTEST) -m "$(GATE)" $(ARGS); failed=$$?; \
	wait $$mypy || { failed=1; cat $$types; }; \
	rm $$types; exit $$failed

costs: $(READY) ## run the tests of `make check` and record what each file costs, in sr_assets_tests/costs.json
	$(PYTEST) -m "$(GATE)" --costs=sr_assets_tests/costs.json $(ARGS)

golden: $(READY) ## record a home of this version, which all later versions must open; before a release. NAME=home-1.2.0-2026-12-31
	$(BIN)/python -W ignore -m sr_assets_tests.golden.record $(NAME)

bench: $(READY) ## measure this machine; prints a table and JSON
	$(BIN)/python -m sr_assets_bench $(ARGS)

soak: $(READY) ## kill at random, then compare source and target; SECONDS=300 SEED=7 ARGS=--json
	$(BIN)/python -m sr_assets_bench.soak $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

simulate: $(READY) ## run simulated histories with faults, and compare each with the rules; SECONDS=60 SEED=1 ARGS='--histories 1'
	$(BIN)/python -W ignore -m sr_assets_tests.sim $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

simulate-night: $(READY) ## run 100,000 histories that no earlier night has run, in about twelve hours on two cores
	$(MAKE) simulate SECONDS=50000 SEED=$$(date +%y%m%d)00000 ARGS="--histories 100000 $(ARGS)"

LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate -c constraints.txt
lock: .venv/release ## pin what packages and images contain, with hashes, in packaging/*lock.txt; after a change of constraints.txt
	$(LOCK) --extra ui --extra java --extra charts --extra postgres pyproject.toml -o packaging/lock.txt
	echo setuptools | $(LOCK) - -o packaging/build-lock.txt

audit: .venv/release ## look for known vulnerabilities of what packages and images contain; needs the network
	$(BIN)/pip-audit --disable-pip --require-hashes -r packaging/lock.txt $(ARGS)

dist: docs .venv/release ## build the wheel, the sdist and the list of contents of the packages into dist/
	rm -rf build dist/sr_assets-* dist/sbom.cdx.json && mkdir -p dist
	$(BIN)/cyclonedx-py requirements packaging/lock.txt --pyproject pyproject.toml --output-reproducible -o dist/sbom.cdx.json
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist"); build_meta.build_wheel("dist")'

deb: dist ## build a Debian package into dist/; PYTHON=/usr/bin/python3.12 selects its Python
	packaging/build deb

rpm: dist ## build an RPM package into dist/; PYTHON=/usr/bin/python3.12 selects its Python
	packaging/build rpm

dev: export DAGSTER_HOME ?= $(CURDIR)/.sr_assets/dagster
dev: $(READY) ## run dagster dev with the configuration in SR_ASSETS_CONFIG
	mkdir -p "$$DAGSTER_HOME" && { test -e "$$DAGSTER_HOME/dagster.yaml" || cp dagster.yaml "$$DAGSTER_HOME"; } && $(BIN)/dagster dev -w workspace.yaml $(ARGS)

fmt: $(READY) ## format the code and apply ruff's fixes
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

fmt-check: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY) ## run ruff
	$(BIN)/ruff check .

types: $(READY) ## run mypy --strict on package, benchmark and tests
	$(BIN)/mypy

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' Makefile

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv found: install one, or set PYTHON=/path/to/python3"; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || "$(PYTHON)" -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt pip
	@echo 'installing 1.4 GB into .venv, which takes some minutes ...'
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[ui,embedded,charts]'
	@touch $@

$(READY): $(INSTALLED)
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[postgres]' --group dev
	@touch $@

.venv/release: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt --group release
	@touch $@

.NOTPARALLEL:
.PHONY: demo install docs pictures test-fast properties coverage test test-faults test-nightly test-long test-packages check costs golden bench soak simulate simulate-night lock audit dist deb rpm dev fmt fmt-check lint types help
