# make help lists the targets. Every target sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ALL_READY := $(VENV)/.all-ready
PEERS := .venv-peers
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && \
	$(BIN)/lint-imports --no-cache && $(BIN)/python tools/structure.py src/fedtailor

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-thorough test-times test-browser lint fuzz bench bench-gpu bench-peers evidence evidence-check docs dist wheel wheel-full schema notebooks pictures clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## Create .venv with the pinned versions

# torch first and alone: a direct request for the pinned version is what finds a local CPU build.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools numpy torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $(READY)

# what only some commands need: trackers, export, secure sums, the network, the site of the docs
$(ALL_READY): $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev,all,notebooks,release]'
	@touch $(ALL_READY)

demo: $(READY) ## Compare Local, FedAvg, FedRep and Ditto on non-iid digits (under a minute)
	$(BIN)/fedtailor demo

# lint runs beside the tests, its output comes after theirs; compiled once, our modules cost the processes of tests less
test: $(ALL_READY) ## Lint, type-check and run the tests (real-data tests when FEDTAILOR_DATA is set)
	@$(BIN)/python -m compileall -q src tests
	@{ $(LINT); } > $(VENV)/lint.log 2>&1 & lint=$$!; \
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not thorough'; tests=$$?; \
	wait $$lint; lint=$$?; cat $(VENV)/lint.log; exit $$((lint ? lint : tests))

test-thorough: $(ALL_READY) ## The other tests: every algorithm on every engine, case and device, and whole programs
	$(BIN)/python -m pytest -n 2 --dist worksteal -m thorough

TESTS ?= tests
test-times: $(ALL_READY) ## Processor seconds of each test, TESTS=tests/contract for some
	$(BIN)/python -m pytest -p tools.cpu_times $(TESTS)

test-browser: $(ALL_READY) ## The reports in a real browser (needs Chromium)
	$(BIN)/python -m pytest tests/report/test_browser.py

lint: $(ALL_READY) ## ruff and mypy over src, tests and benchmarks; the layers and the structure of src
	@$(LINT)

SECONDS ?= 600
fuzz: $(ALL_READY) ## Fuzz every parser, SECONDS=600 of the processor each; what is found lies in build/fuzz
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[fuzz]"
	@for parser in $$($(BIN)/python tools/fuzz.py --list); do \
		echo "$$parser"; $(BIN)/python tools/fuzz.py $$parser --seconds $(SECONDS) || exit 1; done

bench: $(ALL_READY) ## Speed, as a ratio to plain torch in the same run
	$(BIN)/python -m benchmarks.speed --json runs/bench/speed.json
	$(BIN)/python benchmarks/learn2pfed_epoch.py
	$(BIN)/python benchmarks/duw_cost.py
	$(BIN)/python benchmarks/equilibrium.py
	$(BIN)/python benchmarks/secure_sum.py

bench-gpu: $(ALL_READY) ## Seconds per round on a GPU beside the CPU's (for whoever has one; with torch for it in .venv)
	$(BIN)/python -m benchmarks.gpu --json runs/bench/gpu.json

# torch in both requests, so that nothing replaces the build that is at hand.
$(PEERS)/.ready:
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check setuptools numpy torch==2.13.0
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 \
		'flwr[simulation]==1.41.*' 'pfl[pytorch]==0.6.*' 'fedlab==1.3.*'
	@touch $@

bench-peers: $(READY) $(PEERS)/.ready ## The same tasks in Flower, pfl-research and FedLab, in an environment of their own
	$(BIN)/python -m benchmarks.peers --python $(PEERS)/bin/python --json runs/bench/peers.json

evidence: $(ALL_READY) ## The tables of docs/results (long; resumable; needs FEDTAILOR_DATA)
	$(BIN)/python benchmarks/federation.py
	$(BIN)/python -m benchmarks.evidence
	$(BIN)/python -m benchmarks.papers_page

evidence-check: $(ALL_READY) ## Rerun the miniatures of all rows, list and mark those whose numbers have changed (needs FEDTAILOR_DATA)
	$(BIN)/python -m benchmarks.evidence --check

docs: $(ALL_READY) ## Build the site (build/site), check its links, run the commands and code shown on it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest tests/docs -k 'not site_builds'

dist: $(ALL_READY) ## Build wheel and sdist into dist, twice, compare and check them
	$(BIN)/python tools/dist.py --twice

wheel: $(ALL_READY) ## Install the wheel into an empty environment and use it from an empty folder
	tools/try_wheel.sh $(BIN)/python

wheel-full: $(ALL_READY) ## The same with all dependencies installed anew (long)
	tools/try_wheel.sh $(BIN)/python --full

notebooks: ## Make the notebooks again from the pages of the docs
	$(PYTHON) tools/notebooks.py

pictures: $(ALL_READY) ## Make the pictures of README and gallery again (needs Chromium)
	tools/pictures.sh $(BIN)/python

schema: $(ALL_READY) ## Check every configuration against the JSON schema
	$(BIN)/fedtailor schema | $(BIN)/python tools/check_configs.py configs

clean: ## Remove .venv and caches
	rm -rf $(VENV) $(PEERS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
