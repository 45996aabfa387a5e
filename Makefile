# `make demo` and `make test` set themselves up; `make help` lists the rest.
.DEFAULT_GOAL := help
.PHONY: setup demo agent test test-each test-harnesses test-slow test-tinker bench lint check-vllm docs dist clean help

BIN := .venv/bin
READY := .venv/.ready
# dill writes a module by value unless its path is one of an installation, and `datasets` then fails on pyarrow.
TINKER := .venv-tinker/site-packages
DOCS := .venv-docs/bin
DOCS_READY := .venv-docs/.ready
PYTHON ?= python3

$(READY): requirements/cpu.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh
	@touch $@

setup: $(READY) ## build .venv: torch, vLLM for CPU, everything pinned, penstock (about 3 GB)

demo: $(READY) ## train a small model with rollouts from two real vLLM engines, updated in flight
	@$(BIN)/penstock train examples/DEMO.yaml --fresh

agent: $(READY) ## train a small model that guesses by what it is answered, over several turns
	@$(BIN)/penstock train examples/AGENT.yaml --fresh

test: $(READY) ## every test but the slow ones, in three processes (9 minutes on two quiet cores)
	@$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test-each: $(READY) ## the shortest of each slow kind: facade, broadcast, a real death, Ray (2 minutes)
	@$(BIN)/pytest -m each

test-harnesses: $(READY) ## agents of six frameworks through the gateway, each in an environment of its own (1.3 GB)
	@$(BIN)/python scripts/test_harnesses.py $(HARNESSES)

test-slow: $(READY) ## the tests that take minutes
	@$(BIN)/pytest -m slow

$(TINKER)/.ready: requirements/tinker-tests.lock
	@$(PYTHON) -m pip --disable-pip-version-check -qq install --no-deps --upgrade --target $(TINKER) --requirement $<
	@touch $@

test-tinker: $(READY) $(TINKER)/.ready ## the Tinker service under recipes of the cookbook and on PostgreSQL (3 minutes)
	@PYTHONPATH=$(CURDIR)/$(TINKER) $(BIN)/pytest -m slow tests/tinker/test_cookbook.py tests/tinker/test_api_database.py

bench: $(READY) ## every benchmark, one JSON document each
	@status=0; for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file || status=1; done; exit $$status

lint: $(READY) ## ruff check, ruff format, pyright (strict; benchmarks: basic)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/pyright -p benchmarks

check-vllm: $(READY) ## which names of vLLM's that the plugin uses 0.26, 0.32, 0.33 and the newest lack (downloads 0.6 GB)
	@$(BIN)/python scripts/check_vllm.py

$(DOCS_READY): requirements/docs.lock
	@$(PYTHON) -m venv .venv-docs
	@$(DOCS)/python -m pip --disable-pip-version-check -qq install --no-deps --requirement requirements/docs.lock
	@touch $@

docs: $(DOCS_READY) ## build the documentation's site in site/; a broken link is an error (no GPU, no vLLM, no torch)
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --quiet --clean && echo "site/index.html"

dist: $(DOCS_READY) ## build wheel and sdist in dist/
	@rm -rf build dist
	@$(DOCS)/python -m build --no-isolation --outdir dist . >/dev/null && ls dist

clean: ## remove caches and build folders (.venv and runs/ stay)
	@rm -rf .pytest_cache .ruff_cache .hypothesis build dist site src/*.egg-info
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
