# make help lists the targets. Every target sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench evidence docs clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY) ## Create .venv with the pinned versions

# torch first and alone: a direct request for the pinned version is what finds a local CPU build.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools numpy torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev,flare]'
	@touch $(READY)

demo: $(READY) ## Compare Local, FedAvg, FedRep and Ditto on non-iid digits (under a minute)
	$(BIN)/fedtailor compare configs/demo.toml

test: $(READY) lint ## Lint, type-check and run all tests (real-data tests when FEDTAILOR_DATA is set)
	$(BIN)/python -m pytest -n 2

lint: $(READY) ## ruff and mypy over src, tests and benchmarks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## Speed, as a ratio to plain torch in the same run
	$(BIN)/python benchmarks/local_step.py
	$(BIN)/python benchmarks/learn2pfed_epoch.py
	$(BIN)/python benchmarks/duw_cost.py
	$(BIN)/python benchmarks/equilibrium.py

evidence: $(READY) ## The tables of docs/results (long; resumable; needs FEDTAILOR_DATA)
	$(BIN)/python benchmarks/evidence.py
	$(BIN)/python benchmarks/federation.py

docs: $(READY) ## Check that the commands and code shown in the docs run
	$(BIN)/python -m pytest tests/docs

clean: ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
