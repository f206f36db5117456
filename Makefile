# SPDX-License-Identifier: Apache-2.0
# `make` lists the targets. Everything that they make lies in .venv (.venv-VERSION for another vLLM
# than the usual one), .cache and build.

PYTHON ?= python3
VLLM ?= 0.30.0
VENV := .venv$(addprefix -,$(filter-out 0.30.0,$(VLLM)))
BIN := $(VENV)/bin
MODEL := .cache/models/tiny
BENCH_MODEL := .cache/models/60m
BOOTSTRAP := $(PYTHON) tools/bootstrap.py --vllm $(VLLM)
PATCHES := $(PYTHON) tools/apply_patches.py

# Images of containers often set it: each of many processes would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
# Nothing here is fetched from a model hub.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
# What vLLM finds out about models; another version would write it anew.
export VLLM_CACHE_ROOT := $(CURDIR)/.cache/vllm-$(VLLM)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-quick test-pin test-triton wheel check-wheel bench lint patch unpatch status lock clean

help: ## list the targets
	@echo "make <target>:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14
	@echo "One folder of tests: make test TESTS=tests/unit; options of pytest: PYTEST_ARGS='-k lease'"
	@echo "Another vLLM, with an environment of its own: make demo VLLM=VERSION, VERSION one of:" \
	    $(patsubst patches/vllm-%/pin.toml,%,$(wildcard patches/vllm-[0-9]*/pin.toml))

venv: ## make .venv: engine, Mooncake, this package, patches (BOOTSTRAP_ARGS='--plan' to look first)
	@$(BOOTSTRAP) $(BOOTSTRAP_ARGS)

demo: venv ## prefill in one engine, decode in another, and compare the tokens with a single engine's
	@$(BIN)/python -m vllm_ascend_pd.testing.tiny_model --out $(MODEL)
	$(BIN)/python examples/offline_inference/disaggregated_prefill.py --model $(MODEL) --verify

# Processes, each of which takes the next file; WORKERS=0 runs all in one. Tests wait for engines and
# for deadlines: two of them leave a third of two cores idle, three a tenth. Each needs up to 6 GB.
WORKERS ?= $(shell awk '/MemTotal/ { n = int($$2 / 6e6); print (n < 4 ? n : 4) }' /proc/meminfo)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

TESTS ?= tests
test: venv ## run the tests
	$(PYTEST) $(TESTS) $(PYTEST_ARGS)

# What takes longest begins first: the other processes do the rest meanwhile.
QUICK := tests/integration/test_prefill_first.py::test_consumer_computes_nothing_of_the_prompt
QUICK += tests/engine tests/contract tests/unit
test-quick: venv ## run the tests of the package's parts, and a hand-over between real engines
	$(PYTEST) -q -m "not slow" $(QUICK) $(PYTEST_ARGS)

PIN_TESTS := tests/engine tests/schedulers $(addprefix tests/patches/test_,every_pin.py absent_package.py config_carrier.py \
    graph_downgrade.py model_runner_v2.py drafts_on_cpu.py input_batch.py accepted_counts.py mla_on_cpu.py refused_at_start.py worker_hooks.py) \
    $(addprefix tests/integration/test_,prefill_first.py decode_first.py pool.py failures.py aborts.py parked_loads.py \
    preemption.py reset.py identity.py speculation.py drafts.py seeds.py resume.py moves.py windows.py pool_windows.py \
    pipeline_parallel.py models_more.py two_versions.py)
test-pin: ## run the part of the tests that another vLLM must pass: make test-pin VLLM=VERSION
	@$(MAKE) --no-print-directory test VLLM=$(VLLM) TESTS="$(PIN_TESTS)"

TRITON := .cache/triton-3.9.0
$(TRITON):
	$(BIN)/python -m pip install --quiet --no-deps --target $@.new triton==3.9.0
	@mv $@.new $@

TRITON_TESTS := $(addprefix tests/integration/,test_model_runner_v2.py test_failures.py stress)
test-triton: venv $(TRITON) ## run tests of engines with Model Runner V2, in Triton's interpreter
	@$(MAKE) --no-print-directory test TESTS="$(or $(filter-out tests,$(TESTS)),$(TRITON_TESTS))" \
	    PYTEST_ARGS="--triton $(CURDIR)/$(TRITON) $(PYTEST_ARGS)"

bench: venv ## measure on a machine that does nothing else; see docs/benchmarks.md
	@$(BIN)/python -m vllm_ascend_pd.testing.tiny_model --size 60m --dtype bfloat16 --out $(BENCH_MODEL)
	$(BIN)/python benchmarks/off_is_off.py --model $(BENCH_MODEL) --rounds 20 --control
	$(BIN)/python benchmarks/lookup_hook.py --model $(BENCH_MODEL)
	$(BIN)/python benchmarks/copies.py
	$(BIN)/python benchmarks/data_path.py --rounds 80
	$(BIN)/python benchmarks/handover.py --model $(BENCH_MODEL)
	$(BIN)/python benchmarks/pool.py --model $(BENCH_MODEL)
	$(BIN)/python benchmarks/trace.py --model $(BENCH_MODEL)
	@$(BIN)/python -m vllm_ascend_pd.testing.tiny_model --out $(MODEL)
	$(BIN)/python benchmarks/planner.py --waiting --model $(MODEL) --dtype float32 --folder .cache/planner
	$(BIN)/python benchmarks/soak.py --model $(MODEL)

lint: venv ## run every check of .pre-commit-config.yaml on all files
	$(BIN)/pre-commit run --all-files
	$(BIN)/pre-commit run --all-files --hook-stage pre-push mypy

wheel: venv ## build wheels that install, patch and serve without this checkout, in dist
	rm -rf build/lib* build/bdist*
	PATH="$(CURDIR)/$(BIN):$$PATH" VLLM_ASCEND_PD_REQUIRE_NATIVE=1 $(VENV)/uv/bin/uv build --quiet --wheel \
	    --no-build-isolation --python $(BIN)/python --out-dir dist
	@$(PYTHON) tools/engine_alias.py dist $(VLLM)
	@cp tools/requirements/*.txt dist
	@ls dist

check-wheel: wheel ## install the wheels in a new environment, patch its engine, and serve
	$(PYTHON) tools/check_wheel.py

patch: venv ## apply the patches to the installed engine
	$(PATCHES) apply --python $(BIN)/python

unpatch: ## restore the engine's released files, byte for byte
	$(PATCHES) revert --python $(BIN)/python

status: ## say in which state each patched file is
	@$(PATCHES) status --python $(BIN)/python

lock: ## choose the versions in tools/requirements anew
	@$(BOOTSTRAP) --lock

clean: ## remove what was built, and caches; .venv stays
	rm -rf build dist .cache *.egg-info vllm_ascend_pd/_C*.so
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find vllm_ascend_pd tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
