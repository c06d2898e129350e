# Five minutes from a bare python3 (3.11 or newer): `make smoke` trains an agent, `make test` runs the tests.
PYTHON ?= python3
SGLANG_PYTHON ?= python3.11
VENV ?= .venv
UV_VERSION := 0.13.9
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CACHE := $(or $(POLYTURN_CACHE),$(HOME)/.cache/polyturn)
TRAININGS := $(patsubst %, tools/bench_%.py, learning contexts sampling algorithms curriculum)
SGLANG := $(CACHE)/sglang-$(shell cat tools/sglang_cpu/*.txt | cksum | cut -d' ' -f1)

.PHONY: setup proto lock lint format test test-runs test-real sglang test-sglang smoke smoke-ppo selftest bench bench-math long clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "polyturn: error: $$($(PYTHON) --version) is too old; set PYTHON to 3.11 or newer" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(VENV)/bin/uv pip install --system-certs --quiet --python $(PY) --require-hashes -r requirements.lock
	$(VENV)/bin/uv pip install --system-certs --quiet --python $(PY) --no-deps -e .
	@touch $@

proto: $(STAMP)
	$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. common/proto/rl.proto

lock: $(STAMP)
	$(VENV)/bin/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-emit-index-url --no-emit-find-links -o requirements.lock -q \
	  --extra learner --extra actors --extra launch --extra k8s --extra frozenlake --extra arithmetic --extra dev

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(PY)

test: $(STAMP)
	$(PY) -m pytest -m "not long" --ignore tests/real --ignore tests/e2e

test-runs: $(STAMP)  # whole runs of real processes: crashes and resumes, stalls, bad input
	$(PY) -m pytest -m "not long" tests/e2e

test-real: $(STAMP)  # real tokenizers, fetched once into $$POLYTURN_CACHE (~/.cache/polyturn)
	$(PY) -m pytest tests/real

# SGLang's own environment, built once outside of the tree. Its server runs on a CPU by tools/sglang_cpu/serve.py.
sglang: $(SGLANG)/.installed
	@echo "engine.python: $(SGLANG)/bin/python"

$(SGLANG)/.installed:
	$(SGLANG_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "polyturn: error: SGLang's environment needs Python 3.11, not $$($(SGLANG_PYTHON) --version); set SGLANG_PYTHON" >&2; exit 2; }
	rm -rf $(SGLANG)
	$(SGLANG_PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check -c tools/sglang_cpu/constraints.txt -r tools/sglang_cpu/requirements.txt
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check --no-deps -r tools/sglang_cpu/requirements-bare.txt
	@touch $@

test-sglang: $(STAMP) $(SGLANG)/.installed  # against a real SGLang server on this CPU
	POLYTURN_SGLANG=$(SGLANG)/bin/python $(PY) -m pytest tests/engine_contract
	$(PY) tools/launch.py local configs/selftest.toml --overwrite --name=selftest_sglang --engine.kind=sglang --engine.python=$(SGLANG)/bin/python
	$(PY) tools/check_run.py runs/selftest_sglang --flat-gap

smoke: $(STAMP)
	$(PY) tools/launch.py local configs/smoke.toml --overwrite

selftest: $(STAMP)  # twenty updates that change nothing: engine and learner compute the same policy all the time
	$(PY) tools/launch.py local configs/selftest.toml --overwrite
	$(PY) tools/check_run.py runs/selftest --flat-gap

smoke-ppo: $(STAMP)
	$(PY) tools/launch.py local configs/smoke_ppo.toml --overwrite

bench: $(STAMP)  # all but the trainings, which are in `long`, and bench-math, which installs its peers
	@for bench in $(filter-out tools/bench_math.py $(TRAININGS), $(wildcard tools/bench_*.py)); do echo "== $$bench"; $(PY) $$bench || exit 1; done

bench-math: $(STAMP)  # beside rlax, tunix and verl, in environments built once into $$POLYTURN_CACHE (~/.cache/polyturn)
	$(PY) tools/bench_math.py

long: $(STAMP)
	$(PY) -m pytest -m long --timeout 3600
	$(PY) tools/bench_learning.py
	$(PY) tools/bench_contexts.py
	$(PY) tools/bench_sampling.py
	$(PY) tools/bench_algorithms.py
	$(PY) tools/bench_curriculum.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
