# Both commands work on a fresh machine with Python >= 3.11 and pip: each makes .venv by itself.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint types docs

demo: $(VENV)/.demo
	$(RUN) -m dsv41 demo

test: $(VENV)/.dev
	$(RUN) -m pytest -n 2

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.dev
	$(RUN) -m pyright

# The site; a broken link or reference fails.
docs: $(VENV)/.dev
	$(RUN) -m sphinx -W --keep-going -q -b html docs build/docs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(RUN) -m pip install -q -c constraints.txt -e '.[text]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(RUN) -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.demo
