# Two commands for users: `make demo` and `make test`. Both make .venv first when it is missing or out of date.
.PHONY: demo test lint format clean

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

demo: $(STAMP)
	$(BIN)/python tools/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest tests/test_imports.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv: $(STAMP)

# Without an NVIDIA GPU torch is pinned to the version of constraints.txt; with one, the torch that is asked for decides.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lastrow needs Python 3.11 or newer: make PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	if command -v nvidia-smi >/dev/null; then grep -v -E '^(torch|triton)==' constraints.txt; else cat constraints.txt; fi > .venv/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c .venv/constraints.txt -e '.[server,data,gpu,dev]'
	touch $(STAMP)

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
