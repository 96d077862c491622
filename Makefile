PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
# Heavy, and particular about their own dependencies: they have an environment to themselves.
CLIENTS := .venv-clients

.PHONY: install serve test test-clients lint

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
	$(VENV)/bin/python -m pytest -m "not slow and not clients" -n auto --maxprocesses 4 --dist loadfile $(ARGS)

$(CLIENTS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --editable ".[test,clients]"
	touch $@

test-clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest -m clients tests/clients $(ARGS)
