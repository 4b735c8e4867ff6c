# The entrance: `make demo` and `make test` set everything up on a machine with Python 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.ready

.PHONY: demo test lint study compare bench crash-test clean

$(SETUP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(SETUP)
	$(BIN)/asi demo --out runs/demo

# Tests run beside each other, so each has one thread: more of them would compete.
test: $(SETUP)
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

study: $(SETUP)
	$(BIN)/asi study all pydoc --out runs/study --steps 150

compare: $(SETUP)
	$(BIN)/asi compare pydoc --out runs/compare --minutes 3 --resume

crash-test: $(SETUP)
	$(BIN)/python tests/crash_test.py --kills 200

bench: $(SETUP)
	$(BIN)/python benchmarks/search_speed.py

clean:
	rm -rf $(VENV) build dist
