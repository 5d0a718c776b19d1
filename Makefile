# make setup   build .venv, vLLM for CPU included
# make demo    the main job: a training loop feeds a running vLLM
# make test    every scenario once (under 15 minutes on 2 cores)
# make soak    repetitions, chaos and whole matrices; results go to results/
# make docs    the site, in build/docs
# make lint    ruff, mypy for three platforms

VENV := .venv
BIN := $(VENV)/bin
ENV := HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING
# Tests run beside each other, on tiny tensors: threads of each would only wait for cores.
# torch looks up the name of each connection's peer: an answer that is lost costs 1 s, not 5.
TEST_ENV := $(ENV) OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind RES_OPTIONS="timeout:1 attempts:3"

.PHONY: setup demo test soak families lint docs format wheel clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml scripts/setup.sh scripts/install_redis.sh scripts/vllm_requirements.py
	scripts/setup.sh

demo: setup
	$(ENV) $(BIN)/weightwire demo

test: setup
	$(TEST_ENV) $(BIN)/pytest -m "not soak" --numprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

soak: setup
	$(ENV) $(BIN)/python scripts/soak.py $(ARGS)

# Every model family against a cold engine; writes the table in docs/vllm.md.
families: setup
	$(ENV) $(BIN)/python scripts/soak.py --all --out results/families.json $(FAMILIES)
	$(BIN)/python scripts/families_table.py results/families.json

FAMILIES := tests/vllm/test_families.py tests/vllm/test_tensor_parallel.py \
	tests/vllm/test_data_parallel.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin
	$(BIN)/mypy --platform win32

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/docs

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: setup
	scripts/check_wheel.sh

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
