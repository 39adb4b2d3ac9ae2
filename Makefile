# The first two set-up commands of the README are `make demo` and `make test`; both work on a bare clone.
TORCH ?= torch==2.13.0
PYTHON ?= python3.11
OUT ?= demo-out
BIN := .venv/bin
export PYTHONSAFEPATH := 1
export PYTHONDONTWRITEBYTECODE := # else each run would compile all tests anew: half a minute
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: install demo test test-long e2e alone page chromium prometheus titan harness p2p wheel mutations chaos bench \
    watching blame attacks quality strangers check docs format proto reference clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@echo "installs torch and all else in .venv: 1.7 GB with $(TORCH), a few minutes"
	$(PYTHON) -m venv .venv
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[all]"
	$(BIN)/python -m compileall -q comm configs coordinator node outer_opt # not in ten processes at the first run
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --editable ".[dev]"
	touch $@

demo: .venv/installed
	$(BIN)/atoll demo --out "$(OUT)"

PYTEST := $(BIN)/pytest --durations 10
CORES := -n logical --dist worksteal
E2E := tests/e2e tests/node/bench tests/tools/bench # where real processes are run: to collect all takes half a minute

# Minutes: unit tests, transcripts, 5 seeds of the simulation, a sample of the mutations, a run of real processes.
# What starts whole runs comes alone: these are about time, too.
test: .venv/installed-dev
	$(PYTEST) --timeout 300 -m "not long and not e2e" $(CORES)
	$(PYTEST) --timeout 300 -m "not long and e2e" tests/e2e

# Everything else that must pass. Emulated networks need root.
test-long: .venv/installed-dev chromium prometheus
	$(PYTEST) --timeout 1200 -m "long and not e2e and not chaos" $(CORES)
	$(PYTEST) --timeout 1200 -m "long and e2e and not alone and not chaos" $(E2E)

# All runs of real processes, of which the above has one of each kind: about an hour.
e2e: .venv/installed-dev chromium prometheus
	$(PYTEST) --timeout 1200 -m "e2e and not alone" $(E2E)

# What takes the seconds of real processes: on a machine that has nothing else to do.
alone: .venv/installed-dev
	$(PYTEST) --timeout 1200 -m alone

# The coordinator's page in Chromium, and the pictures of it in docs/watching/: two minutes.
page: .venv/installed-dev chromium
	ATOLL_PICTURES=docs/watching $(PYTEST) --timeout 300 -m "long or not long" tests/page

# Debian's Chromium, where it is not there and this is root; else the tests that need it say what to do.
chromium:
	@command -v chromium chromium-browser google-chrome > /dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; fi

# Likewise Debian's Prometheus with promtool, for the tests of metrics and alerts.
prometheus:
	@command -v promtool > /dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus > /dev/null; fi

# The engine torchtitan on a CPU, in an environment of its own: it wants other versions of what else is installed.
titan: .titan-venv/installed
	.titan-venv/bin/pytest --durations 5 -m "long or not long" tests/titan

TITAN_PIP := .titan-venv/bin/pip install --quiet --constraint constraints-titan.txt
.titan-venv/installed: pyproject.toml constraints-titan.txt
	$(PYTHON) -m venv .titan-venv
	$(TITAN_PIP) "$(TORCH)"
	$(TITAN_PIP) --editable ".[node,titan]" hypothesis pytest
	touch $@

# `atoll eval` with the real lm-evaluation-harness, offline, in an environment of its own: it brings some thirty packages.
harness: .harness-venv/installed
	HF_HUB_OFFLINE=1 .harness-venv/bin/pytest -m "long or not long" tests/harness

HARNESS_PIP := .harness-venv/bin/pip install --quiet --constraint constraints.txt
.harness-venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .harness-venv
	$(HARNESS_PIP) "$(TORCH)"
	$(HARNESS_PIP) --editable ".[eval,node,text]" pytest
	touch $@

# Gateways with the real libp2p, in an environment of its own. The networks behind NATs take root, ip and nft.
# Then the tests of the data plane, of reduces and of recoveries, with each connection through two gateways.
p2p: .p2p-venv/installed
	.p2p-venv/bin/pytest --durations 5 -m "long or not long" tests/p2p
	PYTHONPATH=tests .p2p-venv/bin/pytest -p p2p.over_gateways --timeout 120 $(OVER_GATEWAYS)

OVER_GATEWAYS := tests/node/recovery $(addprefix tests/comm/transport/test_,data_plane.py peer_links.py pieces.py \
    leaf_relay.py broken_links.py identity.py tls.py chunk_slots.py) $(addprefix tests/comm/allreduce/test_reduction, \
    .py _deaths.py _plans.py _levels.py)

P2P_PIP := .p2p-venv/bin/pip install --quiet --constraint constraints.txt
.p2p-venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .p2p-venv
	$(P2P_PIP) "$(TORCH)"
	$(P2P_PIP) --editable ".[node,p2p,text]" hypothesis pytest pytest-timeout
	touch $@

# The documentation as a site in build/site; a link that leads nowhere is an error.
docs: .docs-venv/installed
	NO_MKDOCS_2_WARNING=1 .docs-venv/bin/mkdocs --quiet build --strict
	@echo built build/site/index.html

.docs-venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .docs-venv
	.docs-venv/bin/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# The wheel in environments of its own, used from another folder: it has what it needs, and says what is missing.
wheel:
	PYTHON=$(PYTHON) TORCH="$(TORCH)" .ci/wheel

# Each rule of the protocol taken out, one after the other, and noticed: half an hour.
mutations: .venv/installed-dev
	ATOLL_MUTATIONS=all $(PYTEST) --timeout 1200 $(CORES) -m "long or not long" tests/sim/test_mutations.py

# Real processes, killed and stopped many times; the power fails 50 times. It takes hours.
chaos: .venv/installed-dev
	ATOLL_CHAOS_TIMES=5 ATOLL_POWER_CUTS=50 ATOLL_PAUSES=100 $(PYTEST) -s -m e2e tests/e2e tests/tools/attacks tests/tools/bench/test_wan.py
	ATOLL_SIM_SEEDS=2000 $(PYTEST) $(CORES) -m "long or not long" tests/sim
	ATOLL_FUZZ_SEEDS=2000 ATOLL_EXCHANGE_SEEDS=20000 ATOLL_AUDIT_RUNS=20000 $(PYTEST) $(CORES) -m "long or not long" \
	    $(addprefix tests/,coordinator/state_machine/test_audit_runs.py coordinator/state_machine/test_rounds.py \
	    comm/allreduce/test_random_orders.py)
	$(PYTEST) $(CORES) -m "chaos and not e2e"
	ATOLL_CHURN_ROUNDS=2000 $(PYTEST) tests/comm/allreduce/test_reduction_memory.py -k leave_nothing_behind
	$(PYTEST) $(CORES) -m hypothesis --hypothesis-profile search

# docs/performance.md and docs/overlap.md: about 15 minutes. Emulated links need root; without it their rows say so.
bench: .venv/installed-dev
	PYTHONPATH=tests/tools $(BIN)/python -m bench
	PYTHONPATH=tests/tools $(BIN)/python -m bench.overlap --out docs

# What watching a run costs: the tables of docs/watching.md and docs/monitoring.md, and the history's in docs/operator.md.
# Half an hour, on a machine that does nothing else.
watching: .venv/installed-dev chromium
	PYTHONPATH=tests:tests/tools $(BIN)/python -m bench.page
	PYTHONPATH=tests:tests/tools $(BIN)/python -m bench.page --rounds 60 --members 500
	PYTHONPATH=tests:tests/tools $(BIN)/python -m bench.observation
	PYTHONPATH=tests:tests/tools $(BIN)/python -m bench.history

# The table of docs/blame.md: half an hour, on a machine that does nothing else. Needs root.
blame: .venv/installed-dev
	PYTHONPATH=tests:tests/tools $(BIN)/python -m blame --times 5

# The tables of docs/attacks.md: 45 minutes, on a machine that does nothing else.
attacks: .venv/installed-dev
	PYTHONPATH=tests:tests/tools $(BIN)/python -m attacks

# docs/quality.md: hours. Killed and started again it goes on where it was.
quality: .venv/installed-dev
	PYTHONPATH=tests/tools $(BIN)/python -m quality
	for steps in 300 1000 3000; do PYTHONPATH=tests/tools $(BIN)/python -m quality --size eighth --steps $$steps || exit; done

# docs/strangers.md: a quarter of an hour. Killed and started again it goes on where it was.
strangers: .venv/installed-dev
	PYTHONPATH=tests:tests/tools $(BIN)/python -m quality.strangers

REFERENCE := PYTHONPATH=tests:tests/tools $(BIN)/python -m reference

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin # what macOS lacks
	$(BIN)/mypy --explicit-package-bases tests
	comm/proto/generate.sh --check
	$(REFERENCE) --check

format: .venv/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: .venv/installed-dev
	$(REFERENCE)

proto: .venv/installed-dev
	comm/proto/generate.sh

clean:
	rm -rf .venv .docs-venv .harness-venv .p2p-venv .titan-venv build *.egg-info demo-out
