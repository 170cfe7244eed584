# Five verbs: demo test check bench docs. Each works on a fresh machine that has only python3 (3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check bench docs install clean

demo: install
	$(BIN)/headrace demo

test: check
	@echo "Fetching what the tests need besides the packages, if it is missing: Java 17 (190 MB), Spark's Kafka connector"
	@echo "(10 MB), a Kafka broker (44 MB); and making an archive of Spark's classes (200 MB)."
	-@$(BIN)/headrace doctor --quick --install-java --install-kafka --warm --port 0
	@$(BIN)/python -m tests.kafka.broker
	$(BIN)/python -m pytest -n 2

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_house.py

bench: install
	$(BIN)/headrace bench ycsb --save benchmarks/results/ycsb_serial.json
	$(BIN)/headrace bench ycsb --zipf 0.99 --save benchmarks/results/ycsb_serial_zipf_0.99.json
	$(BIN)/headrace bench ycsb --workers 2 --save benchmarks/results/ycsb_2_workers.json
	$(BIN)/headrace bench ycsb --workers 2 --zipf 0.99 --save benchmarks/results/ycsb_2_workers_zipf_0.99.json
	$(BIN)/headrace bench ycsb --workers 2 --zipf 0.999 --save benchmarks/results/ycsb_2_workers_zipf_0.999.json
	$(BIN)/headrace bench hot --workers 2 --save benchmarks/results/hot_2_workers.json
	$(BIN)/headrace bench epochs --save benchmarks/results/epochs.json
	$(BIN)/headrace bench ycsb --durable --save benchmarks/results/ycsb_durable.json
	$(BIN)/headrace bench ycsb --through spark --save benchmarks/results/ycsb_through_spark.json
	$(BIN)/headrace bench http --save benchmarks/results/http.json
	$(BIN)/headrace bench tables --save benchmarks/results/tables.json
	$(BIN)/headrace bench snapshots --save benchmarks/results/snapshots.json
	$(BIN)/headrace bench recovery --save benchmarks/results/recovery.json
	for state in struct dataclass decimal wide; do \
	    $(BIN)/headrace bench ycsb --state $$state --save benchmarks/results/state_$$state.json && \
	    $(BIN)/headrace bench ycsb --state $$state --durable --save benchmarks/results/state_$${state}_durable.json && \
	    $(BIN)/headrace bench ycsb --state $$state --workers 2 --save benchmarks/results/state_$${state}_2_workers.json \
	    || exit 1; done
	$(BIN)/python benchmarks/speed.py

docs: install
	$(BIN)/python -m pytest tests/test_docs.py tests/test_examples.py

install: $(READY)

# A virtual environment with everything in it, and a Java 17 or 21 for Spark: the machine's, or one in the user's cache.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Headrace needs Python 3.11 or later, this is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@echo "Fetching Python packages into .venv (PySpark alone is 450 MB: this takes a minute or two) ..."
	$(PYTHON) -m venv .venv || { echo "This python3 cannot make virtual environments: on Debian or Ubuntu, apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/headrace doctor --quick --install-java --port 0
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
