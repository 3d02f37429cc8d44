# Without a GPU; nothing is downloaded but packages. `make` lists the targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV ?= .venv
export VENV
BIN := $(VENV)/bin
ARGS ?=
# Processes that share the tests, a file at a time; 0 runs them in one, as a debugger needs. More than
# cores is no faster: end-to-end tests have two busy processes each.
WORKERS ?= 2

# PYTHONSAFEPATH: the folder kernels/ would shadow a PyPI package of that name, which transformers
# imports. OMP_NUM_THREADS: teams of spinning threads on shared cores cost 10x. TORCHDYNAMO_DISABLE: as
# `tandemkv serve` runs SGLang on a CPU; compiling its penalties takes half a minute.
TEST_ENV := PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 SGLANG_USE_CPU_ENGINE=1 \
    TORCHDYNAMO_DISABLE=1
PACKAGES := server inference_rank cache_rank kernels
KUBERNETES_VERSION := 1.33
# The first with resource.k8s.io/v1.
DRA_VERSION := 1.34
# Longest file that CI accepts, in lines.
MAX_LINES := 500
# In the order that tests/conftest.py gives: servers among what needs one core or waits.
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup serve test test-newest check-newest test-all lint format deploy-lint types imports size wheel lock sbom ci acceptance clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: ## make or update .venv (SGLang on CPU, this package, the tools); resumes when interrupted
	@deploy/cpu/setup.sh

serve: setup ## serve the embedded model on loopback; options in ARGS="..."
	@PYTHONSAFEPATH=1 $(BIN)/tandemkv serve smollm2 $(ARGS)

test: setup ## the tests that CI runs, end to end included (no GPU, nothing slow)
	@$(TEST_ENV) $(BIN)/pytest $(SHARED) -m "not gpu and not multi_gpu and not slow" $(ARGS)

test-newest: setup ## the plugin's unit tests and tokens equal to stock's, on the newest SGLang that is taken
	@deploy/cpu/setup.sh --newest
	@$(TEST_ENV) $(VENV)-newest/bin/python -m pytest $(SHARED) -m "not gpu and not multi_gpu and not slow" \
	    tests/unit/inference_rank tests/e2e/test_shared.py $(ARGS)

# A minute or two of setup where nothing is installed yet, and four minutes of tests.
check-newest: setup ## of these what CI runs: the contract, and servers of two processes beside stock's
	@deploy/cpu/setup.sh --newest
	@$(TEST_ENV) $(VENV)-newest/bin/python -m pytest $(SHARED) -m "not gpu and not multi_gpu and not slow" \
	    tests/unit/inference_rank/test_sglang_contract.py tests/unit/inference_rank/test_sglang_versions.py \
	    tests/unit/inference_rank/test_start_method.py tests/unit/inference_rank/test_edge_install.py \
	    tests/unit/server/test_sglang_args.py \
	    tests/unit/server/test_embedded_model.py tests/e2e/test_shared.py $(ARGS)

test-all: setup ## also the slow tests
	@$(TEST_ENV) $(BIN)/pytest $(SHARED) -m "not gpu and not multi_gpu" $(ARGS)

lint: setup ## ruff and codespell
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell

format: setup ## let ruff rewrite the files
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

deploy-lint: setup ## hadolint, Kubernetes and Compose schemas over deploy/ (offline)
	@$(BIN)/hadolint deploy/cpu/Dockerfile deploy/gpu/Dockerfile
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/gpu/compose.yaml
	@git ls-files -co --exclude-standard 'deploy/kubernetes/*.yaml' | \
	    grep -v -e kustomization -e /settings -e pair-dra | \
	    xargs $(BIN)/kubernetes-validate --strict --quiet -k $(KUBERNETES_VERSION)
	@$(BIN)/kubernetes-validate --strict --quiet -k $(DRA_VERSION) \
	    deploy/kubernetes/pair-dra/resource-claim-template.yaml

types: setup ## mypy, strict, through a farm of links (.ns): see pyproject.toml
	@mkdir -p .ns/tandemkv
	@for name in $(PACKAGES); do ln -sfn "../../$$name" ".ns/tandemkv/$$name"; done
	@$(BIN)/mypy

imports: setup ## import-linter: who may import whom
	@PYTHONSAFEPATH=1 $(BIN)/lint-imports --no-cache

size: ## no file above the limit; prints the total
	@git ls-files -co --exclude-standard '*.py' | while read -r file; do \
	    if [[ -f $$file ]]; then wc -l "$$file"; fi; done | \
	awk '$$1 > $(MAX_LINES) {print "too long (more than $(MAX_LINES) lines): " $$2 ", " $$1; bad = 1} \
	    {total += $$1; if ($$2 !~ /^tests\//) product += $$1} \
	    END {print "Python: " NR " files, " total " lines, " product " of them outside tests/"; exit bad}'

wheel: setup ## build the wheel into dist/, install it into a fresh environment, import every module
	@.ci/check_wheel

lock: setup ## write the lock files anew; ARGS=--upgrade for the newest versions (needs a package index)
	@deploy/lock.sh $(ARGS)

sbom: setup ## list what is installed, with licences, as CycloneDX in dist/sbom.cdx.json
	@mkdir -p dist
	@$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	    --output-file dist/sbom.cdx.json $(BIN)/python
	@$(BIN)/python -c 'import json; found = json.load(open("dist/sbom.cdx.json")); \
	    print("sbom: dist/sbom.cdx.json,", len(found["components"]), "packages")'

ci: ## all that CI runs
	@.ci/run

acceptance: setup ## the acceptance list
	@PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/acceptance/run.py $(ARGS)

clean: ## remove what builds and tools left; .venv and .venv-newest stay
	rm -rf build dist .ns *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
