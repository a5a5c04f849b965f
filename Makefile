# `make run` opens lora-bench, `make test` runs the whole test suite; both make .venv first if it is not there or not current.
.PHONY: run test check properties soak cases cases-terminal fuzz-files fuzz clean
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

# The stateful property tests of KV memory, slots and scheduler, and the oracle, with EXAMPLES new random lives of each instead of a few.
EXAMPLES ?= 10000
properties: $(VENV)/.test
	EXAMPLES=$(EXAMPLES) $(PY) -m pytest -q tests/test_kv_model.py tests/test_scheduler_model.py tests/test_adapter_store_random.py \
	  tests/test_kv_oracle.py $(ARGS)

# A long life of an engine on the default base and the sample adapters: every token is compared with a fresh engine's, memory must not grow.
soak: $(VENV)/.test
	exec $(PY) tests/soak.py --seconds $(SECONDS) $(ARGS)

# A bank of cases: CASES is its folder, with the judge in _tools; ARGS go to the judge (--only REGEX, --out FILE).
cases: $(VENV)/.test
	@[ -n "$(CASES)" ] || { echo "name the folder of the cases: make cases CASES=/path/to/cases" >&2; exit 2; }
	exec $(PY) "$(CASES)/_tools/run_cases.py" "$(CASES)" --driver "$(CURDIR)/$(PY) $(CURDIR)/tests/case_driver.py" $(ARGS)

# The terminal cases of a bank, which its judge leaves out.
cases-terminal: $(VENV)/.test
	@[ -n "$(CASES)" ] || { echo "name the folder of the cases: make cases-terminal CASES=/path/to/cases" >&2; exit 2; }
	exec $(PY) tests/case_terminal.py "$(CASES)" $(ARGS)

# The bank's own fuzzer: FILES are good files to break, ARGS say the rest (--base PATH, --as-adapter, --minutes N, --seed N).
fuzz-files: $(VENV)/.test
	@[ -n "$(CASES)" ] && [ -n "$(FILES)" ] || { echo "make fuzz-files CASES=/path/to/cases FILES='a.gguf ...' ARGS='--minutes 5'" >&2; exit 2; }
	exec $(PY) "$(CASES)/_tools/fuzz_files.py" $(FILES) --driver "$(CURDIR)/$(PY) $(CURDIR)/tests/case_driver.py" $(ARGS)

# Our own fuzz targets, all side by side, SECONDS each; findings and a summary go to OUT.
SECONDS ?= 60
OUT ?= build/fuzz
fuzz: $(VENV)/.test
	exec $(PY) tests/fuzz --seconds $(SECONDS) --out $(OUT) $(ARGS)

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
