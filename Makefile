PYTHON ?= python3
# The CPU build.  With a GPU, name the build that fits it: make demo TORCH="torch==2.13.0 --index-url ..."
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SOURCES := chunkflow_compile passes tests examples docs

# Tests start many processes, which would each compile the package's source again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-all test-gpu test-stand-in test-servers test-sglang test-vllm-omni test-ray lint types unit durations soak docs site bench bench-gpu card contention cycle first-step step-cache adapters sizes opaque paper published several-gpus models readme-table sizing dist clean

# Two to three minutes on two cores: a picture of digits, drawn twice, then two ranks on an emulated link.
demo: $(VENV)/ready
	$(BIN)/python examples/digits/draw.py
	@echo
	$(BIN)/chunkflow demo

# Four to seven minutes on two cores; the minutes below are of an AMD EPYC at 2.6 GHz.  mypy uses one core: the tests start beside it.
test: $(VENV)/ready
	$(MAKE) --no-print-directory -j 2 lint types unit

lint: $(VENV)/ready
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/ready
	$(BIN)/mypy -p chunkflow_compile

unit: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long"

# CPU seconds by file and by test, in tests/durations.txt.
durations: $(VENV)/ready
	PYTHONPATH=tests $(BIN)/python -m pytest -n 2 --dist worksteal -m "not long" -p cpu_seconds

# With the tests marked long.
test-all: lint types $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

# A source tree, wherever it is run.
FROM_SOURCE := PYTHONPATH=$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# The CUDA path without a GPU, on a stand-in for CUDA's runtime, in an environment of its own (5 GB); needs gcc and g++.
# TESTS=tests/stand_in_cuda/test_events.py runs a part.  As on a card that has only its image, the package is not installed.
CUDA_TORCH ?= torch==2.11.0
CUDA_VENV ?= .venv-cuda
CUDA_PYTHON = $(abspath $(CUDA_VENV))/bin/python
ON_STAND_IN = $(CUDA_PYTHON) tests/stand_in_cuda/build.py --out $(CUDA_VENV)/stand-in $(CUDA_PYTHON)
TESTS ?= tests/test_gpu.py tests/test_private_torch.py tests/stand_in_cuda
test-stand-in: $(CUDA_VENV)/ready
	$(FROM_SOURCE) $(ON_STAND_IN) -m pytest -n 2 $(TESTS)

# transformers and accelerate are those of a card's image.
$(CUDA_VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/pip install --quiet $(CUDA_TORCH)
	$(CUDA_VENV)/bin/pip install --quiet '.[diffusers,dev]' diffusers==0.42.1 transformers==5.17.0 accelerate==1.15.0
	$(CUDA_VENV)/bin/pip uninstall --quiet --yes chunkflow-compile
	touch $@

# The plug-ins of servers, each on the transformers of its server's published wheel, on CPUs.
test-servers: test-sglang test-vllm-omni test-ray

# Nine minutes beside other work, in an environment of its own (3 GB).
SGLANG_VENV := .venv-sglang
test-sglang: $(SGLANG_VENV)/ready
	$(SGLANG_VENV)/bin/python -m pytest -n 1 -rs tests/servers/test_sglang.py

$(SGLANG_VENV)/ready: pyproject.toml tests/servers/requirements-sglang.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install --quiet $(TORCH)
	$(SGLANG_VENV)/bin/pip install --quiet --editable '.[diffusers,dev]'
	$(SGLANG_VENV)/bin/pip install --quiet --no-deps --requirement tests/servers/requirements-sglang.txt
	touch $@

# vLLM-Omni on a CPU, in an environment of its own (2 GB), for x86-64; a worker's plug-ins are found by their entry points.
VLLM_OMNI_VENV ?= .venv-vllm-omni
test-vllm-omni: $(VLLM_OMNI_VENV)/ready
	$(VLLM_OMNI_VENV)/bin/python -m pytest tests/servers/test_vllm_omni.py

$(VLLM_OMNI_VENV)/ready: pyproject.toml tests/servers/requirements-vllm-omni.txt
	$(PYTHON) -m venv $(VLLM_OMNI_VENV)
	$(VLLM_OMNI_VENV)/bin/pip install --quiet torch==2.13.0
	$(VLLM_OMNI_VENV)/bin/pip install --quiet --editable '.[diffusers,dev]' diffusers==0.42.1 transformers==5.24.0 accelerate==1.15.0
	$(VLLM_OMNI_VENV)/bin/pip install --quiet --no-deps --requirement tests/servers/requirements-vllm-omni.txt
	touch $@

# The server on Ray Serve, in an environment of its own: ten minutes on two cores.
test-ray: .venv-ray/ready
	$(FROM_SOURCE) .venv-ray/bin/python -m pytest -rs tests/servers/test_serving.py tests/servers/test_serve_ray.py

.venv-ray/ready: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/pip install --quiet $(TORCH)
	.venv-ray/bin/pip install --quiet '.[diffusers,dev,ray]'
	.venv-ray/bin/pip uninstall --quiet --yes chunkflow-compile
	touch $@

# The next three need a GPU.  PY=python3 uses an environment that exists, in which only diffusers need be installed; without
# it, they make one with a build of torch for the GPU: make test-gpu TORCH="torch==2.13.0".
PY ?= $(BIN)/python
EXISTS := $(if $(filter $(BIN)/python,$(PY)),$(VENV)/ready)

# Without a GPU, every test is skipped.
test-gpu: $(EXISTS)
	$(FROM_SOURCE) $(PY) -m pytest -m gpu -rs tests/test_gpu.py

# At most nine minutes, or SECONDS=...; all cases or CASES=1,3.  Writes the page and its files beside it.
# MORE="--profile FILE --append" measures no profile, and keeps the cases that the page has.
SECONDS ?= 520
bench-gpu: OUT ?= docs/benchmarks/gpu.md
bench-gpu: $(EXISTS)
	$(FROM_SOURCE) $(PY) docs/benchmarks/gpu.py --out $(OUT) --seconds $(SECONDS) --cases "$(CASES)" $(MORE)

# The first half hour on a card, in parts of at most nine minutes: the tests, what users call, whether a step can be one graph,
# its profile, its facts, Wan, loopback, FLUX.
# Called again, it goes on with the parts that have not passed.  PARTS=facts,tests runs some; MORE="--seconds 580" ends in
# time; DRY=1 rehearses every part on the stand-in.
ifdef DRY
card: OUT ?= card-rehearsal
card: $(CUDA_VENV)/ready
	$(FROM_SOURCE) $(ON_STAND_IN) docs/benchmarks/gpu_parts.py --dry-run --out $(OUT) --parts "$(PARTS)" $(MORE)
else
card: OUT ?= card
card: $(EXISTS)
	$(FROM_SOURCE) $(PY) docs/benchmarks/gpu_parts.py --out $(OUT) --parts "$(PARTS)" $(MORE)
endif

# The race tests on other random programs for ten minutes, or MINUTES=...
MINUTES ?= 10
soak: $(VENV)/ready
	$(BIN)/python tests/soak.py --minutes $(MINUTES)

# The pictures of the README and the guide.
docs: $(VENV)/ready
	$(BIN)/python examples/digits/draw.py --out docs/digits.png
	$(BIN)/chunkflow timeline wan2.2-ti2v-5b --ulysses 2 --hardware h100-pcie-x2 --out docs/timeline.png

# The documentation as a site in build/site; a warning is an error.  The variable silences an advertisement of the theme.
site: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/ready
	$(BIN)/python docs/benchmarks/compile_and_step.py --out docs/benchmarks/compile_and_step.md
	$(BIN)/python docs/benchmarks/verify.py --out docs/benchmarks/verify.md
	$(BIN)/python docs/benchmarks/host_cost.py --out docs/benchmarks/host_cost.md
	$(BIN)/python docs/benchmarks/host_by_part.py --out docs/benchmarks/host_cost.md

# Where the first step goes, beside diffusers' repeated blocks: an hour on two cores that nothing else uses.
first-step: $(VENV)/ready
	$(BIN)/python docs/benchmarks/first_step.py --out docs/benchmarks/first_step.md

# Blocks compiled one by one against the whole model: twelve minutes on two cores.
cycle: $(VENV)/ready
	$(BIN)/python docs/benchmarks/cycle.py --out docs/benchmarks/cycle.md --rounds 7

# What a hit of a step cache costs: two minutes on two cores.
step-cache: $(VENV)/ready
	$(BIN)/python docs/benchmarks/step_cache.py --out docs/benchmarks/step_cache.md

# Another LoRA adapter, beside diffusers' hotswap: ten minutes on two cores.
adapters: $(VENV)/ready
	$(BIN)/python docs/benchmarks/adapters.py --out docs/benchmarks/adapters.md

# What other image sizes of a whole pipeline compile: ten minutes on two cores.
sizes: $(VENV)/ready
	$(BIN)/python docs/benchmarks/sizes.py --out docs/benchmarks/sizes.md

# Policies side by side on an emulated link: eight minutes on two cores.
contention: $(VENV)/ready
	$(BIN)/python docs/benchmarks/contention.py --out docs/benchmarks/contention.md

# An all-to-all in a custom op, declared and not: three minutes on two cores.
opaque: $(VENV)/ready
	$(BIN)/python docs/benchmarks/opaque.py --out docs/benchmarks/opaque.md

# Traces twelve full-size configurations: ten minutes on two cores.
paper: $(VENV)/ready
	$(BIN)/python docs/benchmarks/paper.py --out docs/benchmarks/paper.md

# Step times that others have published beside predictions: traces twenty configurations in ten minutes on two cores.
published: $(VENV)/ready
	$(BIN)/python docs/benchmarks/published.py --out docs/benchmarks/published.md

# What each way to run a model on several GPUs reaches: traces five models for three numbers of ranks, in twenty minutes.
several-gpus: $(VENV)/ready
	$(BIN)/python docs/benchmarks/several_gpus.py --out docs/benchmarks/several_gpus.md

# The sizing table of the page on deployment; PLAN=--plan plans again, in ten minutes.
sizing: $(VENV)/ready
	$(BIN)/python docs/benchmarks/sizing.py $(PLAN)

# The table by GPU and the charts of the README, and methods.md, from JSON files; PLAN=--plan plans again, in an hour of one core.
readme-table: $(VENV)/ready
	$(BIN)/python docs/benchmarks/readme_table.py $(PLAN)

# Every transformer class of diffusers against eager, each way: 480 trials of 10 to 60 seconds, with the configurations of
# diffusers' tests.  A run that was cut off goes on; without docs/models.jsonl it begins anew.  A trial that is bad is on the
# page too.  bitsandbytes is for nf4.
DIFFUSERS ?= build/diffusers
models: $(VENV)/ready $(DIFFUSERS)
	$(BIN)/pip install --quiet parameterized bitsandbytes
	-$(FROM_SOURCE) $(BIN)/python tests/diffusers_classes.py $(DIFFUSERS) --out docs/models.jsonl
	$(BIN)/python docs/benchmarks/models.py

build/diffusers:
	git clone --quiet --depth 1 --branch v0.42.1 https://github.com/huggingface/diffusers $@

# torch first: otherwise pip chooses a build of torch as a dependency.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[diffusers,dev]'
	touch $@

# The sdist, and the wheel that is made from it.  The long tests check both, and the site.  On a package index, a link of the README needs the
# address of the repository: REPOSITORY=https://github.com/owner/name takes the last commit, with links into its tag.
RELEASE := build/release
dist: $(VENV)/ready
	rm -rf dist $(RELEASE)
	$(BIN)/python -m pytest -n 2 tests/test_package.py tests/test_site.py
ifdef REPOSITORY
	mkdir -p $(RELEASE)
	git archive HEAD | tar -x -C $(RELEASE)
	$(BIN)/python docs/publish.py $(REPOSITORY) > $(RELEASE)/README.md
endif
	$(BIN)/python -m build --no-isolation --outdir dist $(if $(REPOSITORY),$(RELEASE))
	$(BIN)/python -m twine check dist/*

clean:
	rm -rf $(VENV) build dist *.egg-info
