# Every target makes its own environment: `make run` and `make test` are all that a fresh clone needs.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=

.PHONY: run serve test lint bench wheel clean

run: $(VENV)/.run
	$(PY) example.py $(ARGS)

serve: $(VENV)/.serve
	$(PY) -m nanoinfer serve $(ARGS)

# Two workers: most tests keep one core busy. The files that take longest are begun first (tests/conftest.py).
test: $(VENV)/.test
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(VENV)/.run
	$(PY) bench.py $(ARGS)

wheel: $(VENV)/.run
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

# The stamps remember what was installed, so that a second call costs nothing.
$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.venv
	$(PY) -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.serve: pyproject.toml $(VENV)/.venv
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[serve]'
	touch $@ $(VENV)/.run

# pip would compile 14,000 files on one core. Some are templates and no Python, which pip ignores, too.
$(VENV)/.test: pyproject.toml $(VENV)/.venv
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile -e '.[test]'
	$(PY) -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@ $(VENV)/.run $(VENV)/.serve

clean:
	rm -rf $(VENV) dist build *.egg-info
