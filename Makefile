# make train: set up, then the main job on the embedded photographs.   make test: set up, then the tests.
# VENV=/path puts the virtual environment elsewhere; PYTHON=python3.12 picks the interpreter; RANKS=4 the number of
# processes (default: one a GPU, at most two; two without a GPU).
VENV ?= .venv
PYTHON ?= python3
RANKS ?= $(shell $(VENV)/bin/python -c 'import torch; print(min(torch.cuda.device_count(), 2) or 2)')
RUN ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

READY := $(VENV)/.dino_ds_ready
.PHONY: train test lint setup clean

train: setup
	PATH="$(abspath $(VENV))/bin:$$PATH" deepspeed --quiet --num_gpus $(RANKS) dino_ds/train.py \
		--ds_config ds_configs/zero0_fp32.json --config quickstart --run_dir $(RUN)

test: setup
	$(VENV)/bin/python -m pytest

lint: setup
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

setup: $(READY)

# Runs again when what is to be installed changes, and not otherwise.
$(READY): setup.py pyproject.toml
	sh .ci/setup "$(PYTHON)" "$(VENV)"

clean:
	rm -rf .venv build *.egg-info
