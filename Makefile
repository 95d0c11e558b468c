# Everything a newcomer types: `make demo`, `make test`, `make check`. `make` alone lists the targets and the knobs.

PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
LOWEST ?= .venv-lowest
PIP_FLAGS ?=
WORK ?= build/demo
SRC ?=
ARGS ?=
FUZZ_S ?= 1200
JOBS ?= 1

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A file's tests stay together, and with them what they share. Tests that measure time may fail beside busy neighbours.
SPREAD := $(if $(filter-out 0 1,$(JOBS)),-n $(JOBS) --dist loadfile)
export SRC WORK

.PHONY: help venv demo test peers peers-most peers-mds peers-and-fuzz lowest nightly fuzz check lint types docs format clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo              pack real photographs, verify them, iterate two epochs, write a contact sheet'
	@echo 'make demo SRC=folder   the same with your own JPEGs; the folder is only read'
	@echo 'make test              the tests; `make nightly` adds the slow ones'
	@echo 'make peers             the tests against the libraries of others, in environments of their own'
	@echo 'make lowest            the tests with the oldest versions of its packages that shardkit allows'
	@echo 'make fuzz              every reader of foreign bytes on random ones, for FUZZ_S seconds'
	@echo 'make check             lint, types, tests, docs: what CI runs'
	@echo 'make lint types docs   one part of it; `make format` rewrites the sources to fit the linter'
	@echo 'make clean             remove the environment, the caches and the results of the demo'
	@echo
	@echo 'Knobs, as in `make demo WORK=/mnt/nvme/demo`:'
	@echo '  PYTHON     the interpreter to start from, 3.11 or newer      (now: $(PYTHON))'
	@echo '  VENV       the virtual environment that is made and used     (now: $(VENV))'
	@echo '  LOWEST     the environment of `make lowest`                  (now: $(LOWEST))'
	@echo '  PEERS      the environments of `make peers`, the second with -mds behind it  (now: $(PEERS))'
	@echo '  WORK       where the demo puts its photographs and shards    (now: $(WORK))'
	@echo '  JOBS       processes that share the tests                    (now: $(JOBS))'
	@echo '  ARGS       further arguments for pytest, e.g. ARGS="-k tar"'
	@echo '  FUZZ_S     seconds of `make fuzz`                            (now: $(FUZZ_S))'
	@echo '  PIP_FLAGS  further arguments for pip, e.g. the index of the CPU-only builds of torch that pytorch.org names,'
	@echo '             which saves a download of gigabytes on a machine without a GPU'

venv: $(READY)

# An environment is made again when the requirements change. An interrupted installation leaves no stamp.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo 'make: $(PYTHON) is not here; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: shardkit needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo 'make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@echo '== installing into $(VENV) (once; the first time takes minutes)'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(PIP_FLAGS) -e '.[dev]'
	@touch $@

# Two, since MosaicML's library wants older versions of what the others want newer ones of.
$(PEERS)/.ready: pyproject.toml constraints.txt scripts/mend_torchvision.py
	@echo '== installing into $(PEERS)'
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt $(PIP_FLAGS) -e '.[peers]'
	@$(PEERS)/bin/python scripts/mend_torchvision.py
	@touch $@

$(PEERS)-mds/.ready: pyproject.toml constraints-mds.txt scripts/mend_torchvision.py
	@echo '== installing into $(PEERS)-mds'
	@$(PYTHON) -m venv $(PEERS)-mds
	@$(PEERS)-mds/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints-mds.txt $(PIP_FLAGS) -e '.[peers-mds]'
	@$(PEERS)-mds/bin/python scripts/mend_torchvision.py
	@touch $@

# Here a library that is missing fails the test that needs it, which elsewhere skips itself.
peers: peers-most peers-mds
peers-most peers-mds: export SHARDKIT_REQUIRE_PEERS := 1

peers-most: $(PEERS)/.ready
	@echo '== tests against the libraries of others'
	@$(PEERS)/bin/python -m pytest -q -p no:cacheprovider -m 'peers and not mds' tests/converting tests/exporting tests/hostile $(ARGS)

peers-mds: $(PEERS)-mds/.ready
	@echo '== tests against the library of MosaicML'
	@$(PEERS)-mds/bin/python -m pytest -q -p no:cacheprovider -m mds tests/converting tests/hostile $(ARGS)

peers-and-fuzz: peers
	@$(MAKE) --no-print-directory fuzz

$(LOWEST)/.ready: pyproject.toml constraints-lowest.txt
	@echo '== installing into $(LOWEST)'
	@$(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-lowest.txt $(PIP_FLAGS) -e . hypothesis pytest pytest-timeout scikit-learn webdataset
	@touch $@

# What needs no optional package; two tests ask for what only newer versions of Pillow read.
lowest: $(LOWEST)/.ready
	@echo '== tests with the oldest versions that are allowed'
	@$(LOWEST)/bin/python -m pytest -q -p no:cacheprovider -m 'not slow and not peers and not gpu' -k 'not dali and not wids and not mpo and not corpus' $(addprefix tests/,format storage dataset packing indexing verifying repairing extracting converting) $(ARGS)

demo: $(READY)
	@$(BIN)/python scripts/demo.py --work "$$WORK" $(if $(SRC),--src "$$SRC")

test: $(READY)
	@echo '== tests'
	@$(BIN)/python -m pytest -q $(SPREAD) -m 'not slow' $(ARGS)

# The long sweeps, too: every system call that a pack makes fails in every way. Then the oldest versions, and twenty minutes of fuzzing, half of them of tars.
nightly: $(READY)
	@echo '== all tests'
	@$(BIN)/python -m pytest -q $(SPREAD) $(ARGS)
	@$(MAKE) --no-print-directory lowest fuzz

fuzz: $(READY)
	@echo '== fuzzing for $(FUZZ_S) s'
	@SHARDKIT_FUZZ_S=$(FUZZ_S) $(BIN)/python -m pytest -q tests/hostile/test_fuzz.py tests/hostile/test_fuzz_files.py

check: lint types test docs
	@echo '== all checks passed'

lint: $(READY)
	@echo '== lint'
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo 'make: the sources above are not formatted; run: make format' >&2; exit 1; }

types: $(READY)
	@echo '== types'
	@$(BIN)/mypy --no-error-summary

# The examples in the docstrings, then the pages: links, commands, exit codes and the examples in them.
docs: $(READY)
	@echo '== docs'
	@$(BIN)/python -m pytest -q --doctest-modules shardkit tests/test_docs.py

format: $(READY)
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

clean:
	@for folder in $(VENV) $(PEERS) $(PEERS)-mds $(LOWEST); do test ! -e $$folder/pyvenv.cfg || rm -rf $$folder; done
	@rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find shardkit scripts tests -name __pycache__ -prune -exec rm -rf {} +
