PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: install serve test lint

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable ".[test]"
	touch $(STAMP)

serve: $(STAMP)
	$(VENV)/bin/serve $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: $(STAMP) lint
	$(VENV)/bin/python -m pytest -m "not slow" -n auto --maxprocesses 4 --dist loadfile $(ARGS)
