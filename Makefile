# Everything runs in .venv, which the first target that needs it sets up.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docs extras wheel bench format clean

demo: .venv/ready  ## Train a small byte-level GPT on the standard library's text, with the plan that is best here
	@rm -rf out/demo
	$(BIN)/pipedejavu train zoo:gpt-tiny --plan auto --batch 16 --steps 60 --audit --run-dir out/demo
	$(BIN)/pipedejavu compare out/demo
	@echo "Open out/demo/report.html in a browser."

test: .venv/ready  ## Run the tests
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

lint: .venv/ready  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

extras: .venv/more  ## Run the examples and pages that need packages of others
	$(BIN)/python -m pytest tests/test_examples.py tests/test_docs.py -k "hybrid_ or larger"

wheel: .venv/ready  ## Build and install the wheel, with a compiler and without one
	$(BIN)/python -m pytest tests/test_wheel.py

docs: .venv/more  ## Build the site of docs/ into out/site; a warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: .venv/ready  ## Measure the speed of the simulator and of the engine
	$(BIN)/python bench/simulate.py
	$(BIN)/python bench/engine.py

.venv/ready: pyproject.toml hatch_build.py src/pipedejavu/optim/native.c src/pipedejavu/graph_data/sampler.c
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,data,dev]'
	@touch $@

.venv/more: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs,examples]'
	@touch $@

clean:
	rm -rf .venv out dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
