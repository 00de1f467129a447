# SPDX-License-Identifier: Apache-2.0
# CacheMend: `make demo` shows it working, `make test` tests it. `make help` lists the rest.

VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

# Neither Ray nor vLLM should phone home from a demo or a test run.
export RAY_USAGE_STATS_ENABLED ?= 0
export DO_NOT_TRACK ?= 1
export VENV
# Every replica and every worker of a job is a process of its own: without bytecode on disk each compiles torch and vLLM.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup models demo test lint format serve clean

help: ## Show this list
	@echo "CacheMend: RAG answers from precomputed, repaired KV caches."
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Start with: make demo    (about 10 minutes the first time, everything stays in this folder)"

setup: ## Make .venv from the frozen CPU lock file (3.4 GB, 2-3 minutes; instant when it is there)
	@tools/setup.sh

models: setup ## Fetch the two default models into models/ (190 MB of downloads; instant when they are there)
	@$(BIN)/cachemend models fetch

demo: setup ## Answer real questions with every repair method and print a table
	@$(BIN)/cachemend demo

test: models ## Run all tests (PYTEST_ARGS="-m 'not real'" for the fast ones)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## Put the code in the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

serve: models ## Start the OpenAI-compatible service on http://127.0.0.1:8000 (Ctrl-C ends it)
	$(BIN)/serve run serve_app:app

clean: ## Remove corpora, indexes, chunk caches and tool caches (keeps .venv and models)
	rm -rf data build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
