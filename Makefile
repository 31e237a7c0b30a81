# make train: set up, then the main job on the embedded photographs; RUN= names the run folder, runs/quickstart without.
# make format, lint, test-fast: the loop of a change (CONTRIBUTING.md).   make test, test-all: before it is handed on.
# make bench-gpu: the figures that docs/notes/performance.md wants of a GPU, as JSON in bench_results/. PART=step_l16 makes one
# of its parts; VENV= PYTHON=python3 takes an interpreter that has the dependencies, and installs nothing.
# VENV=/path puts the virtual environment elsewhere; PYTHON=python3.12 picks the interpreter; RANKS=4 the number of
# processes (default: one a GPU, at most two; two without a GPU).
VENV ?= .venv
PYTHON ?= python3
FREE_PORT = $$($(VENV)/bin/python -c 'from dino_ds.basics.machine import find_free_port; print(find_free_port())')
RANKS ?= $(shell $(VENV)/bin/python -c 'import torch; print(min(torch.cuda.device_count(), 2) or 2)')

READY := $(VENV)/.dino_ds_ready
.PHONY: train format lint test-fast test test-all test-ranks test-alone test-faults site tiers bench-gpu setup clean

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

# Parts of less than six minutes each, after which they are cut off; one that fails leaves the results of the others.
BENCH_PARTS := step_s16 step_b16 step_l16 ladder_s16 inference_s16
PART ?= $(BENCH_PARTS)
BENCH_PYTHON := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
BENCH_STEP := dino_ds bench step --json --config vits16 --ds_config ds_configs/zero1_bf16.json --model.drop_path 0 \
	--compare ds.dino_ds.compile=off,default --steps 15 --warmup 5
bench_step_s16 := $(BENCH_STEP) --batch 256
bench_step_b16 := $(BENCH_STEP) --batch 256 --model.backbone vit_base_patch16_224
bench_step_l16 := $(BENCH_STEP) --batch 96 --model.backbone vit_large_patch16_224
bench_ladder_s16 := dino_ds bench ladder --json --config vits16 --batch 64
bench_inference_s16 := dino_ds bench inference --json vit_small_patch16_224 --random --batches 1,16,256
bench-gpu: $(if $(VENV),setup)
	@$(BENCH_PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "bench-gpu: no GPU is found")'
	@$(MAKE) --no-print-directory -j1 --keep-going $(PART:%=bench-gpu-%)

$(BENCH_PARTS:%=bench-gpu-%): bench-gpu-%:
	@mkdir -p bench_results
	timeout 355 $(BENCH_PYTHON) -m $(bench_$*) > bench_results/$*.part
	@mv bench_results/$*.part bench_results/$*.json && ls -l bench_results/$*.json

setup: $(READY)

# Runs again when what is to be installed changes, and not otherwise.
$(READY): setup.py pyproject.toml
	sh .ci/setup "$(PYTHON)" "$(VENV)"

clean:
	rm -rf .venv build dist site *.egg-info
