# `make run` opens lora-bench, `make test` runs the whole test suite; both make .venv first if it is not there or not current.
.PHONY: run test check clean
.ONESHELL:
SHELL := /bin/sh
.SHELLFLAGS := -ec

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check

run: $(VENV)/.run
	@exec $(VENV)/bin/lora-bench $(ARGS)

test: $(VENV)/.test
	@$(PY) -m pytest $(ARGS)

check: $(VENV)/.test
	@$(PY) -m ruff check
	@$(PY) -m pytest $(ARGS)

# The newest Python of those we support that can make an environment with pip in it.
$(PY):
	@for python in $(PYTHON) python3.13 python3.12 python3.11 python3; do
	  "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || continue
	  found=$$python
	  "$$python" -c 'import venv, ensurepip' 2>/dev/null || continue
	  echo "making $(VENV) with $$("$$python" --version)"
	  rm -rf $(VENV)
	  "$$python" -m venv $(VENV)
	  exit 0
	done
	if [ -n "$${found-}" ]; then
	  echo "$$found has no venv and ensurepip modules. On Debian and Ubuntu: sudo apt install python3-venv; then run make again." >&2
	else
	  echo "lora-bench needs Python 3.11, 3.12 or 3.13; none is on PATH. Install one, or name it: make run PYTHON=/path/to/python3" >&2
	fi
	exit 1

$(VENV)/.run: pyproject.toml $(PY)
	@echo "installing lora-bench into $(VENV) (once; PyTorch is large)"
	$(PIP) -e .
	touch $@
	echo "installed; without make the command is $(VENV)/bin/lora-bench"

$(VENV)/.test: pyproject.toml $(PY)
	@echo "installing lora-bench and its test tools into $(VENV) (once)"
	$(PIP) -e '.[test]'
	touch $(VENV)/.run $@

clean:
	rm -rf $(VENV) build dist *.egg-info
