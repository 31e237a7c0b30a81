# make train: set up, then the main job on the embedded photographs; RUN= names the run folder, runs/quickstart without.
# make format, lint, test-fast: the loop of a change (CONTRIBUTING.md).   make test, test-all: before it is handed on.
# make gpu-check: whether all works on your GPU, and how fast, in a quarter of an hour; OUT= names the folder of results.
# VENV=/path puts the virtual environment elsewhere; PYTHON=python3.12 picks the interpreter; RANKS=4 the number of
# processes (default: one a GPU, at most two; two without a GPU).
VENV ?= .venv
PYTHON ?= python3
FREE_PORT = $$($(VENV)/bin/python -c 'from dino_ds.basics.machine import find_free_port; print(find_free_port())')
RANKS ?= $(shell $(VENV)/bin/python -c 'import torch; print(min(torch.cuda.device_count(), 2) or 2)')

READY := $(VENV)/.dino_ds_ready
.PHONY: train format lint test-fast test test-all test-ranks test-alone test-faults site tiers gpu-check setup clean

train: setup
	PATH="$(abspath $(VENV))/bin:$$PATH" deepspeed --quiet --num_gpus $(RANKS) --master_port $(FREE_PORT) dino_ds/train.py \
		--ds_config ds_configs/zero0_fp32.json --config quickstart $(if $(RUN),--run_dir $(RUN))

# Of this clone what is ours: a user may keep programs of his own in it.
OURS := dino_ds docs scripts tests setup.py README.md CONTRIBUTING.md
format: setup
	$(VENV)/bin/ruff format $(OURS) && $(VENV)/bin/ruff check --fix $(OURS)

lint: setup
	$(VENV)/bin/ruff check $(OURS) && $(VENV)/bin/ruff format --check $(OURS) && $(VENV)/bin/mypy

# No ranks, no engines, nothing that takes a quarter of a second: at most a minute on two cores. TESTS=tests/data runs a part.
TESTS ?=
test-fast: setup
	$(VENV)/bin/python -m pytest -q -m fast $(TESTS)

# Every property, tables by a sample of their cells; test-all: with every cell. Two processes, one thread each, as idle
# ones that wait for work would take the other's core. The first runs what starts ranks, then files of the second, whose
# output comes at the end; that one begins with what compares rounded arithmetic, without AVX: other sums than this CPU's.
MARKS = $(if $(filter test-all,$@),(full or not full),not full)
NO_AVX := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
test test-all: setup
	@taken=$$(mktemp -d); export DINO_DS_TESTS_TAKEN=$$taken; \
	$(MAKE) --no-print-directory -k -j2 MARKS="$(MARKS)" test-ranks test-alone; failed=$$?; rm -r $$taken; exit $$failed

PYTEST := env -u MAKEFLAGS -u MFLAGS OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest
test-ranks:
	@$(PYTEST) -m "$(MARKS)$(if $(DINO_DS_TESTS_TAKEN),, and ranks)"

test-alone:
	@log=$$(mktemp); failed=; \
	$(NO_AVX) DINO_DS_TESTS_TAKEN= $(PYTEST) -m "numerical and not gpu and $(MARKS)" > $$log 2>&1 || failed="tests-without-AVX"; \
	$(PYTEST) -m "$(MARKS) and not ranks" >> $$log 2>&1 || failed="$$failed tests"; \
	cat $$log; rm $$log; [ -z "$$failed" ] || { echo "failed, see above: $$failed" >&2; exit 1; }

# Two real ranks and every kind of fault; malformed and hostile files.
test-faults: setup
	$(VENV)/bin/python -m pytest -m faults

# The documentation as a site in site/, with the page of all options; a broken link is an error.
site: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

# The ds configs by GPU tier and their table, anew from the planner.
tiers: setup
	$(VENV)/bin/python -m scripts.tiers

# Says so in a line where there is no GPU. VENV= PYTHON=python3 takes an interpreter that has the dependencies.
OUT ?= gpu_check
gpu-check: $(if $(VENV),setup)
	$(if $(VENV),$(VENV)/bin/python,$(PYTHON)) -m scripts.gpu_check --out "$(OUT)"

setup: $(READY)

# Runs again when what is to be installed changes, and not otherwise.
$(READY): setup.py pyproject.toml
	sh .ci/setup "$(PYTHON)" "$(VENV)"

clean:
	rm -rf .venv build dist site *.egg-info
