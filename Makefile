# Every target sets up .venv by itself, and only when pyproject.toml or constraints.txt changed since.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-slow lint bench

help:
	@echo "make install    set up $(VENV) with everything"
	@echo "make demo       export, calibrate and inspect the shipped example; leaves demo-report/"
	@echo "make test       the tests (the slow ones apart)"
	@echo "make test-slow  only the slow tests"
	@echo "make lint       ruff, mypy and import-linter"
	@echo "make bench      time the demo's detector beside torch and peers; leaves out/bench/"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "mdps needs Python 3.11 or newer, and $(PYTHON) is older or missing: run make PYTHON=python3.12 (or another)." >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	@touch $@

demo: $(STAMP)
	$(BIN)/mdps demo

# One thread a worker, or they only slow each other down; a file to one worker, or both build what its tests share.
# A worker that dies is not replaced: with --dist loadfile the rest would be waited for without end.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' --max-worker-restart 0 --timeout 900 --durations 15

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# The packages lie at the root and are imported as mdps.*: mypy and import-linter find them through a link.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .typing && ln -sfn .. .typing/mdps
	$(BIN)/mypy
	PYTHONPATH=.typing $(BIN)/lint-imports --no-cache --no-logo

bench: $(STAMP)
	$(BIN)/mdps demo --out out/demo
	$(BIN)/mdps bench out/demo/bundle --ckpt benchmarks/demo/denoiser.safetensors --out out/bench
