# Everything runs in .venv, which the first target that needs it sets up.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench format clean

demo: .venv/ready  ## Simulate a small GPT on this machine's shape and write the report
	@mkdir -p out
	$(BIN)/pipedejavu simulate preset:1f1b --workers 4 --microbatches 8 --samples 4 --model gpt-tiny \
		--html out/report.html --trace out/trace.json
	@echo "Open out/report.html in a browser, and out/trace.json in Perfetto (ui.perfetto.dev)."

test: .venv/ready  ## Run the tests
	$(BIN)/python -m pytest -m "not slow and not gpu"

lint: .venv/ready  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/ready  ## Measure the simulator's speed
	$(BIN)/python bench/simulate.py

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv out dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
