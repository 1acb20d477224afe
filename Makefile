# `make demo` and `make test` work in a fresh clone with nothing but python3 and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo aim test test-wide test-all lint types docs release clean

demo: .venv/ready
	$(BIN)/hookdiff run examples/basic.toml --plugins ema,amp,fid --overwrite

# The page of all runs that had the plugin aim, at http://127.0.0.1:43800.
aim: .venv/ready-dev
	$(BIN)/aim up --repo runs

# Without compiled files each process compiles hookdiff anew, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

# loadscope: the tests of a file run in one process, which makes their shared fixtures once.
test: .venv/ready-dev
	$(BIN)/python -m pytest -n auto --dist loadscope -m "not slow and not wide"

test-wide: .venv/ready-dev
	$(BIN)/python -m pytest -n auto --dist loadscope -m "wide and not slow"

test-all: .venv/ready-dev
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -n auto --dist loadscope

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready-dev
	$(BIN)/mypy

# The site of docs/: build/docs/index.html.
docs: .venv/ready-dev
	@echo "Making the site of docs/, which takes one to two minutes:"
	rm -rf build/docs
	$(BIN)/python -m sphinx -n -W --keep-going -q docs build/docs
	@echo "Done. Open in a browser: $(CURDIR)/build/docs/index.html"

# Needs no .venv: it installs what the wheel needs in an environment that it removes. With LEND=yes the packages are those
# of PYTHON, which has `.[dev]`, as in `make release VERSION=0.1.0 PYTHON=.venv/bin/python LEND=yes`.
release:
	$(PYTHON) tests/release.py "$(VERSION)" $(if $(LEND),--lend)

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -e .
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/pip install -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist
