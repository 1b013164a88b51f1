# On a clean clone: `make demo` trains, `make check` is the quick part of the tests, `make test` every rule once,
# `make soak` the rest. Set-up is venv + pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRITON := $(VENV)/triton

.PHONY: demo check test soak bench clean

demo: $(READY)
	$(BIN)/isthmus train demo

# Lint, types, the tests of the method, and fleets in one process: under a minute on two idle cores.
METHOD := tests/layout tests/model tests/outer tests/sparse tests/subspace tests/fleet/test_in_process.py \
    tests/test_config.py tests/test_files.py tests/test_imports.py
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest -n 2 --dist worksteal $(METHOD)

# Every rule, two files at a time; then the GPU's kernels, under Triton's interpreter.
test: $(READY) $(TRITON)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
	PYTHONPATH=$(TRITON) $(BIN)/pytest tests/sparse/test_fused.py tests/model/test_adam.py

# What needs processes, network namespaces, servers, Slurm, a browser, fuzzing or minutes: half an hour, and no
# test longer than ten minutes.
soak: $(READY)
	$(BIN)/pytest -m soak -n 2 --dist loadfile --no-loadscope-reorder --timeout 600 --session-timeout 2100

bench: $(READY)
	$(BIN)/python bench/codec.py
	$(BIN)/python bench/rounds.py --rounds 6
	$(BIN)/python bench/storm.py --minutes 3

# torch goes first and pinned: an open range would pull gigabytes of CUDA packages on a machine without a GPU.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

# Apart from the packages, because a torch that finds Triton loads it into every process. Without a wheel for this
# machine the tests of the kernels skip.
$(TRITON): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ -c constraints.txt triton || mkdir -p $@

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .ruff_cache .hypothesis
