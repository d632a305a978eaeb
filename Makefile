# Everything runs in .venv, which `make setup` fills from constraints.txt. Nothing else need be installed but Python 3.11+ and pip.
PYTHON ?= python3
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
JOBS ?= 2
BASE ?= 42cc08c
SEED ?= 1
N ?= 20
MINUTES ?= 10
BIN := $(VENV)/bin
HELPERS := tests/ranks:tests/inputs:tests/measures:tests/covering:tests/strangers:.
TESTS := -n $(JOBS) --dist worksteal --durations=40 --durations-min=1 --junitxml=build/tests.xml
BENCHMARKS := train_step implementations hybrids images adapters experts loss_memory attention optimizers hf_io startup checkpoint_stall scaling layouts muon generate preferences rollouts tool_rollouts

.PHONY: help setup quickstart quickstart-rl pull-the-plug test test-fast test-changed test-faults fuzz covering mutants soak same convert-truth lint docs release bench bench-gpu first-gpu two-ranks cuda-shapes clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(VENV)/.for-users  ## a virtual environment that trains

quickstart: setup  ## train a tiny model on a generated task, on 2 CPU ranks
	$(BIN)/fsdp-trainer quickstart

quickstart-rl: setup  ## a tiny model that adds badly learns to add from rewards, on 2 CPU ranks
	$(BIN)/fsdp-trainer quickstart task=sums

pull-the-plug: setup  ## kill a rank in the middle of a save, damage a checkpoint, and see that the run ends the same
	$(BIN)/python tools/pull_the_plug.py

test: $(VENV)/.for-developers  ## all tests that run before a change lands: 15 to 30 minutes on two quiet cores
	$(BIN)/python -m pytest -q $(TESTS) -m "not faults"

test-fast: $(VENV)/.for-developers  ## the tests that start no ranks and take little time: under two minutes
	$(BIN)/python -m pytest -q $(TESTS) -m "not slow and not ranks and not faults"

test-changed: BASE = HEAD~1
test-changed: $(VENV)/.for-developers  ## the test files that reach what has changed since BASE=HEAD~1, nearest first
	$(BIN)/python tools/reach.py --since $(BASE) --run -q -n $(JOBS) -m "not faults"

test-faults: $(VENV)/.for-developers  ## what kills, fills and corrupts: half an hour
	$(BIN)/python -m pytest -q $(TESTS) -m faults

fuzz: $(VENV)/.for-developers  ## of another seed: combinations of methods, models and layouts, chats, tokenizers: SEED=1 N=20
	PYTHONPATH=$(HELPERS) $(BIN)/python tools/fuzz.py tokenizers $(SEED) $(N)00
	PYTHONPATH=$(HELPERS) $(BIN)/python tools/fuzz.py chats $(SEED) $(N)00
	PYTHONPATH=$(HELPERS) $(BIN)/python tools/fuzz.py combinations $(SEED) $(N)

fuzz-files: SEED = 1
fuzz-files: N = 1000
fuzz-files: $(VENV)/.for-developers  ## damaged and hostile files of every format: each read rightly or refused: SEED=1 N=5000 ONLY=GGUF
	PYTHONPATH=$(HELPERS) $(BIN)/python tools/fuzz.py files $(SEED) $(N) --only "$(ONLY)"

covering: $(VENV)/.for-developers  ## choose the combinations that make test runs again, after a new method, layout or optimizer
	PYTHONPATH=$(HELPERS) $(BIN)/python tools/fuzz.py combinations

mutants: $(VENV)/.for-developers  ## plant 66 faults, one at a time, and see which tests notice: hours
	$(BIN)/python tools/mutants.py --jobs $(JOBS) --out tools/mutants.json

soak: $(VENV)/.for-developers  ## random faults in runs of every method and layout, for MINUTES=10: each must end as an undisturbed run; SEED=N begins with episode N
	$(BIN)/python tools/soak.py $(MINUTES) $(SEED)

prove-faults: $(VENV)/.for-developers $(VENV)/.for-benchmarks  ## plant faults in folders and runs: `prove` must name each, and nothing on honest ones; ONLY=WORD
	ONLY="$(ONLY)" PYTHONPATH=$(HELPERS) $(BIN)/python tools/prove_faults.py

same: $(VENV)/.for-users  ## compare with the commit before a rebuild: BASE=COMMIT; all numbers, plans and weights must be equal
	$(BIN)/python tools/same.py $(BASE)

convert-truth: $(VENV)/.for-benchmarks  ## train configurations of transformers and TRL for real, and their recipes here, and compare: ARGS=--ours trains only here
	$(BIN)/python -m tools.convert_truth $(ARGS)

lint: $(VENV)/.for-developers  ## ruff, mypy, and how much there is to read, with its limits
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/measure.py

docs: $(VENV)/.for-docs  ## the documentation as a site in build/site; a broken link fails
	$(BIN)/python -m tools.reference --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "build/site/index.html opens in a browser. With search:  $(BIN)/python -m http.server -d build/site"

release: $(VENV)/.for-developers  ## the wheel and the sdist in build/release, each tried in an empty environment
	rm -rf build/release
	$(BIN)/python -m hatchling build -d build/release
	for file in build/release/*.whl build/release/*.tar.gz; do \
	  echo "== $$file, installed in an empty environment" \
	  && rm -rf build/try && $(PYTHON) -m venv build/try && build/try/bin/pip install -q -c constraints.txt $$file \
	  && (cd build/try && bin/fsdp-trainer --version && bin/fsdp-trainer recipes \
	    && bin/fsdp-trainer plan +recipe=llama8b_sft plan.gpu=h100 plan.world_size=8 \
	    && bin/fsdp-trainer quickstart steps=60 questions=10) || exit 1; done
	@ls -l build/release

bench: $(VENV)/.for-benchmarks  ## CPU benchmarks, each beside what one would use instead; ARGS=--check compares with the stored results
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

bench-gpu: $(VENV)/.for-benchmarks  ## the benchmark for one GPU
	$(BIN)/python -m benchmarks.gpu $(ARGS)

first-gpu: $(VENV)/.for-developers $(VENV)/.for-benchmarks  ## on one GPU, ten minutes: what is broken, then how fast; ARGS=--part=broken is the first half, ARGS=--device=cpu tries all without a GPU
	$(BIN)/python -m benchmarks.first_gpu $(ARGS)

two-ranks: $(VENV)/.for-benchmarks  ## on one GPU: every layout on two ranks that share it, beside one rank; ARGS=--device=cpu tries the cases without one
	$(BIN)/python -m benchmarks.two_ranks $(ARGS)

cuda-shapes: $(CUDA_VENV)/.for-cuda  ## a step of every kind of run with CUDA's operators, without a GPU; ARGS=--only=WORD. Installs 5 GB
	$(CUDA_VENV)/bin/python -m tools.cuda_shapes $(ARGS)

clean:           ## the environments and caches; runs stay
	rm -rf $(VENV) $(CUDA_VENV) .pytest_cache .mypy_cache .ruff_cache dist

# the build for CUDA is PyPI's, also where another index or folder of packages is configured
$(CUDA_VENV)/.for-cuda: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CUDA_VENV)
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(CUDA_VENV)/bin/pip install -q -c constraints.txt -e ".[ao,hf]" "nvidia-cuda-crt==13.0.*"
	@touch $@

$(VENV)/.for-users: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.for-developers: $(VENV)/.for-users
	$(BIN)/pip install -q -c constraints.txt -e ".[test,lint]"
	@touch $@

$(VENV)/.for-docs: $(VENV)/.for-users
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	@touch $@

$(VENV)/.for-benchmarks: $(VENV)/.for-users
	$(BIN)/pip install -q -c constraints.txt -e ".[bench]"
	@touch $@
