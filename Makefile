# `make sweep` runs the main job and `make test` the tests; each makes its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: sweep test quick lint clean

sweep: $(VENV)/installed
	$(BIN)/python -m powersgd_lab.sweep $(ARGS)

test: lint
	$(BIN)/pytest

quick: lint
	$(BIN)/pytest -m "not slow"

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.11"'
	@echo "setting up $(VENV), once: this takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[images,notebooks,test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
