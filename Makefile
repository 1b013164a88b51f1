# Two commands do everything on a clean clone: `make demo` and `make test`. Set-up is venv + pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRITON := $(VENV)/triton

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/isthmus train recipes/demo.toml

# Two files at a time; then, with the machine to itself, what measures how long steps take over thin links; then
# the GPU's kernels, under Triton's interpreter.
test: $(READY) $(TRITON)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -n 2 --dist loadfile --ignore tests/fleet/test_namespaces.py
	$(BIN)/pytest tests/fleet/test_namespaces.py
	PYTHONPATH=$(TRITON) $(BIN)/pytest tests/sparse/test_fused.py tests/model/test_adam.py

bench: $(READY)
	$(BIN)/python bench/codec.py
	$(BIN)/python bench/simulator.py

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
