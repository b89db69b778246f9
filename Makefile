# Everything runs from a virtual environment that these targets make themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# one thread per process: two threads on a busy machine are many times slower for small models
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test test-processes test-trainer test-service test-fast test-zoo lint format docs bench clean

$(VENV)/installed: pyproject.toml reward_service/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -e "./reward_service[dev]"
	touch $@

# a tiny SD3 pipeline learns handwritten digits: fine-tuning, LoRA, reinforcement learning, judged images
quickstart: $(VENV)/installed
	$(BIN)/python examples/quickstart/quickstart.py --out outputs/quickstart $(ARGS)

# Three suites, two at a time: the trainer without and with processes of its own, and the reward service.
test: $(VENV)/installed
	$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target test-processes test-trainer test-service

test-processes: $(VENV)/installed
	$(BIN)/python -m pytest -m "process and not zoo" $(ARGS)

test-trainer: $(VENV)/installed
	$(BIN)/python -m pytest -m "not process and not zoo" $(ARGS)

test-service: $(VENV)/installed
	cd reward_service && ../$(BIN)/python -m pytest

# without the tests that start processes or train for long
test-fast: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -m "not process and not slow and not zoo" $(ARGS)

# stock pipelines of many families that are driven without code of their own (docs/models.md), and further cases of the
# longest tests
test-zoo: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -m zoo $(ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the documentation site in build/docs; a link that leads nowhere is an error
docs: $(VENV)/installed
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.run $(ARGS)

clean:
	rm -rf $(VENV) outputs .pytest_cache .ruff_cache
