# Two commands matter: `make run` and `make check test`. Each sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
SERVE ?=
BENCH ?=
ASK ?= Why is the sky blue?

.PHONY: run install stubs native demo check test test-slow bench bench-peers kernels docs constraints contracts clean help

run: install  ## Serve the demo model, show one answer, go on until Ctrl-C. SERVE="…" adds options of `triptych serve`.
	@exec $(BIN)/triptych serve --ask "$(ASK)" $(SERVE)

install: $(INSTALLED) stubs native  ## The environment in .venv, and the native kernels for this CPU.

# torch goes first and by itself, so that no other package can choose its version. setuptools and
# grpcio-tools come with it because the project then builds in this environment, not in one of its own.
# The native kernels need none of it and are built beside; what fails there, `native` says. pip compiles
# Python files one by one, compileall on every core: without, each process would compile what it imports.
$(INSTALLED): pyproject.toml constraints.txt setup.py
	@echo "Installing into $(VENV); this takes a few minutes the first time."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m kernels.native.build > /dev/null 2>&1 & \
	$(PIP) torch==2.13.0 triton==3.7.1 && \
	$(PIP) setuptools==84.2.1 grpcio-tools==1.85.1 && \
	$(PIP) --no-build-isolation --editable '.[dev]' && \
	{ $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true; } && wait
	@touch $@

stubs: $(INSTALLED)
	@$(BIN)/python -m protos.build

# Without a compiler this says so, and the worker runs torch's kernels.
native: $(INSTALLED)
	@$(BIN)/python -m kernels.native.build > /dev/null || true

demo: install  ## Fetch the demo model into the cache folder and print its path.
	@$(BIN)/python -m services.local.demo

check: install  ## Lint, format, types, contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/protos

# Two processes, a file to one of them, in the order of the list: many tests wait for servers to start and end.
test: install  ## What must pass on a machine without a GPU; 7 to 8 minutes on 2 cores.
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: install  ## What does not fit into that.
	$(BIN)/python -m pytest -m slow --timeout 1800

bench: install  ## Figures of the demo model on this machine.
	$(BIN)/python -m tests.bench

bench-peers: install  ## Other servers beside ours, in turn, where they are installed. BENCH="…" adds options.
	$(BIN)/python -m tests.bench.peers $(BENCH)

kernels: install  ## Write what the Triton kernels take of a GPU into kernels/README.md; needs none. About a minute.
	$(BIN)/python -m kernels.compiled --write

docs: install  ## Write docs/settings.md from the settings.
	$(BIN)/triptych settings > docs/settings.md

contracts: install  ## Accept a change of the contracts: writes tests/protos/contracts.txt.
	$(BIN)/python -m tests.protos.describe > tests/protos/contracts.txt

constraints: install  ## Pin what is installed now.
	$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/+.*//' > constraints.txt

clean:  ## Remove what was built, the environment too.
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis protos/*_pb2.py protos/*_pb2.pyi protos/*_pb2_grpc.py

help:  ## This list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14
