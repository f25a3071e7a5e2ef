# Two commands: `make demo` sets up and runs the main job, `make test` sets up and runs the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check install
# Pip compiles what it installs on one core, which takes as long again; so all cores do it after,
# and leave alone what is no Python of today, such as templates, and what few or none import: that
# is two fifths of it, and compiled when it is imported.
INSTALL := $(PIP) --no-compile -c constraints.txt
RARE := /(tests?|transformers/models|diffusers|ray|_inductor|sklearn|databricks|pip|torch/testing|torchgen|fontTools|matplotlib|mypyc?|numba/cuda|peft/tuners|playwright|pygments/lexers|setuptools|narwhals|gunicorn|docker|graphql|aiohttp)/
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib || true
# What a run needs, and what tests need beside it: launchers, browsers, linters.
RUNS := $(VENV)/.runs
TESTS := $(VENV)/.tests

# Else each of the hundreds of processes that tests start would compile our own sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test check bench bench-torch clean

setup: $(TESTS)

# The pip that comes with Python 3.11 takes twice as long to look through the versions there are.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fxpart needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=26' || true

$(RUNS): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	$(COMPILE)
	touch $@

# Installing takes one core and the network: meanwhile the others compile the loops, which need little
# of it. `make test` compiles what is left of them, and fails if they do not compile. And pytest
# rewrites the assertions of the tests, although most cannot be imported yet: else each worker would.
$(TESTS): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) numba scipy pytest
	nice $(BIN)/python -m tests.precompile >/dev/null 2>&1 & \
	nice $(BIN)/python -m pytest --collect-only --noconftest --tb=no -qq >/dev/null 2>&1 & \
	$(INSTALL) -e '.[dev]' && { $(COMPILE); } && wait
	touch $(RUNS) $@

demo: $(RUNS)
	$(BIN)/python -m runner mode=kl_based devices=4x16gb

# Half as many workers again as cores: much of the time a test waits for processes that it started.
# Files in their own order: those with few tests take the longest, and would be left to one worker.
WORKERS = $(shell expr $$($(PYTHON) -c 'import os; print(os.cpu_count())') \* 3 / 2)

# Loops are compiled beforehand: workers that start together would each compile the same.
test: $(TESTS)
	$(BIN)/python -m tests.precompile
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: $(TESTS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The figures of docs/benchmarks.md: minutes each. bench-torch takes an hour.
bench: $(TESTS)
	$(BIN)/python -m benchmarks.main_job
	$(BIN)/python -m benchmarks.presets
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.candidates
	$(BIN)/python -m benchmarks.same_answer
	$(BIN)/python -m benchmarks.random_problems
	$(BIN)/python -m benchmarks.split_cut
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.memory_profile
	$(BIN)/python -m benchmarks.symbolic
	$(BIN)/python -m benchmarks.batch_dim
	$(BIN)/python -m benchmarks.training_scale
	$(BIN)/python -m benchmarks.execution
	$(BIN)/python -m benchmarks.execution --pipeline
	$(BIN)/python -m benchmarks.sweep_scale
	$(BIN)/python -m benchmarks.kills
	$(BIN)/python -m benchmarks.writers
	$(BIN)/python -m benchmarks.launchers
	$(BIN)/python -m benchmarks.architectures

bench-torch: $(TESTS)
	$(BIN)/python -m benchmarks.against_torch

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find fxpart runner tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
