# make myths   the suite on what is here: CUDA, or the embedded pair of small models
# make test    the harness under test, on CPU
# make lint    ruff and mypy
# Each sets up .venv first. ARGS goes to pytest: make myths ARGS="--weights random"

VENV := .venv
# The first Python on the path that the pins are made for; name another with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
READY := $(VENV)/.ready

.PHONY: myths myths-without-clock test lint setup

myths: $(READY)
	$(VENV)/bin/python -m pytest myths -v --benchmark-columns=median,iqr,rounds $(ARGS)

myths-without-clock: $(READY)
	$(VENV)/bin/python -m pytest myths -v -m "not timing" $(ARGS)

test: $(READY)
	$(VENV)/bin/python -m pytest tests -n 2 --dist loadfile $(ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

setup: $(READY)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 on the path: install one, or name it with PYTHON=..." >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON): the first time downloads torch and takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@
