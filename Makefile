# Everything runs in .venv, which `setup` makes from pyproject.toml and constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint docs package faults chaos mutants repeat bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "idml needs Python 3.11 or newer, found " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/idml demo

test: lint docs
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

package: setup
	$(BIN)/python tests/package_check.py --python $(PYTHON)

faults: setup
	IDML_KILLS=20 IDML_SCHEMA_EXAMPLES=400 IDML_FUZZ=3000 $(BIN)/python -m pytest tests/training/test_resume.py tests/methods/test_all_methods.py tests/training/test_bad_input.py \
		tests/search/test_kills.py tests/search/test_readers.py tests/search/test_damage.py tests/search/test_indexing.py tests/search/test_milvus.py tests/test_search_benchmark.py \
		tests/search/test_integrity.py tests/server/test_schema.py tests/test_fuzz.py tests/audit/test_decisions.py

chaos: setup
	$(BIN)/python tests/chaos.py --engine sqlite --seconds 900
	$(BIN)/python tests/chaos.py --engine milvus --seconds 900

mutants: setup
	$(BIN)/python tests/mutants.py

repeat: setup
	$(BIN)/python tests/repeat.py

bench: setup
	$(BIN)/python benchmarks/loss_step.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/allocator.py
	$(BIN)/python benchmarks/precision.py
	$(BIN)/python benchmarks/evaluate.py --size cub
	$(BIN)/python benchmarks/gallery.py
	$(BIN)/python benchmarks/serve.py
	$(BIN)/python benchmarks/onnx_runtime.py
	$(BIN)/python benchmarks/commands.py
	$(BIN)/python benchmarks/made_data.py

clean:
	rm -rf dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
