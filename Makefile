# The commands a person and CI both use. Needs only git, make and Python >= 3.11.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHONS := python3 python3.13 python3.12 python3.11

BESIDE_EACH_OTHER := -n 2 --dist loadgroup
SOAK := 20
CRASHES := 50
CRASH_SEED := $(shell date +%s)

.PHONY: help install run test test-uncompiled soak crash check format bench migrate clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 17

install: $(STAMP) ## Make .venv and install everything into it

# The stamp makes repeated calls fast: pip runs again only when the dependencies change.
$(STAMP): pyproject.toml
	@for python in $(PYTHONS); do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "Python >= 3.11 with the venv module is needed; looked for: $(PYTHONS)" >&2; exit 1; fi; \
	echo "making $(VENV) with $$($$found --version)"; \
	[ -x $(BIN)/python ] || $$found -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@echo 'compiling (once)'; $(BIN)/kv-indexer compile
	@touch $@

run: $(STAMP) ## Start the service with a simulated fleet of three engines; Ctrl-C stops both
	@exec $(BIN)/kv-indexer serve --simulate

test: $(STAMP) ## Run all tests
	$(BIN)/python -m pytest $(BESIDE_EACH_OTHER)

test-uncompiled: $(STAMP) ## Run all tests, the longest shortened, with the kernels as plain Python
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest $(BESIDE_EACH_OTHER)

soak: $(STAMP) ## Search new examples for the property tests, for half an hour; SOAK=N times as many as in a usual run
	KV_INDEX_SOAK=$(SOAK) $(BIN)/python -m pytest --timeout=0 $(BESIDE_EACH_OTHER) tests/property tests/unit

crash: $(STAMP) ## Kill the service at 50 random moments, for minutes; CRASHES=N CRASH_SEED=S to repeat a run
	KV_INDEX_CRASHES=$(CRASHES) KV_INDEX_CRASH_SEED=$(CRASH_SEED) $(BIN)/python -m pytest -s \
	  tests/e2e/test_killed_in_the_middle.py -k random_moments

check: $(STAMP) ## Format, lint, types, import rules, tests: what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest $(BESIDE_EACH_OTHER)

format: $(STAMP) ## Format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## Measure this machine, for minutes; BENCH_ARGS="--peer PYTHON" beside a peer, see docs/performance.md
	$(BIN)/python -m tests.benchmarks $(BENCH_ARGS)

migrate: $(STAMP) ## Bring the database to the newest schema
	$(BIN)/kv-indexer migrate

clean: ## Remove .venv and caches, but never ./data
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './data/*' -prune -exec rm -rf {} +
