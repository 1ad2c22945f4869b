# `make demo` and `make test` are all a fresh machine needs: each makes .venv and installs what it uses.

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.installed
PYTEST  = $(BIN)/python -m pytest

# On some virtual machines oneDNN picks AMX instructions that do not run (`rla doctor` tells); this cap is harmless elsewhere.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test slow check format native sanitize emulate triton triton-full gpu-check gpu-table gpu-cost docs a11y clean

help:
	@echo "make demo     a first look: small models, recall, kernels and the paper's claims on one page (five minutes)"
	@echo "make test     the fast tests"
	@echo "make slow     the slow tests"
	@echo "make check    formatting, lint, types, direction of imports"
	@echo "make format   rewrite the sources to the house format"
	@echo "make native   rebuild the C++ kernels if their sources changed"
	@echo "make sanitize the native kernels' tests on a build with address and undefined-behaviour checks"
	@echo "make emulate  the AVX-512 kernels on an emulated CPU, for machines without AVX-512"
	@echo "make triton   the Triton kernels in Triton's interpreter (TRITON=3.9.0: another version); triton-full: all agreement tests"
	@echo "make gpu-check  the Triton kernels compiled for GPUs that needn't be here: registers, spills, shared memory"
	@echo "make gpu-table  the same for more methods, as results/gpu-check.md"
	@echo "make gpu-cost   their bytes and operations, counted, and a roofline"
	@echo "make docs     the documentation site, in build/site"
	@echo "make a11y     the report page in Chromium, with axe's accessibility checks (needs node and chromium)"
	@echo "make clean    remove .venv and everything built"

$(READY): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

native: $(READY)
	@$(BIN)/python setup.py --quiet build_native

demo: native
	$(BIN)/rla reproduce all --scale demo

test: native
	$(PYTEST) -n 2 -m "not slow and not gpu"

slow: native
	$(PYTEST) -m slow

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --disable-error-code arg-type --disable-error-code index --disable-error-code misc --disable-error-code operator --disable-error-code union-attr tests
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

sanitize: $(READY)
	$(BIN)/python setup.py --quiet build_native --sanitize
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	RLA_NATIVE_LIBRARY=build/_native_sanitize.so $(PYTEST) -k "(native or halves) and not instruction_sets" tests/test_agreement.py tests/test_native.py tests/test_halves.py

emulate: $(READY)
	$(BIN)/python -m pip install --quiet bochscpu-python
	$(BIN)/python tests/emulate_avx512.py

docs: $(READY)
	$(BIN)/mkdocs build --strict

a11y: $(READY)
	npm install --silent --no-fund --no-audit --prefix build/a11y playwright-core axe-core
	RLA_NODE_MODULES=build/a11y/node_modules $(PYTEST) -m slow tests/test_report_page.py

# Beside .venv, not in it: torch.compile takes other ways where it finds a triton.
TRITON ?= 3.7.1
TRITONS = 3.7.1 3.9.0
GPU_CHECK ?=
INTERPRET = TRITON_INTERPRET=1 PYTHONPATH=build/triton-$(TRITON)

build/triton-%: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ triton==$*
	@touch $@

triton: native build/triton-$(TRITON)
	$(INTERPRET) $(PYTEST) -n 2 -m "not slow" tests/test_triton_interpreter.py

triton-full: native $(TRITONS:%=build/triton-%)
	for version in $(TRITONS); do \
	  TRITON_INTERPRET=1 PYTHONPATH=build/triton-$$version $(PYTEST) -n 2 -k triton tests/test_triton_interpreter.py tests/test_agreement.py || exit 1; \
	done

gpu-check: $(READY) build/triton-$(TRITON)
	PYTHONPATH=build/triton-$(TRITON) $(BIN)/python tools/gpu_check.py $(GPU_CHECK) --out build/gpu-check.md

gpu-table: $(READY) build/triton-$(TRITON)
	PYTHONPATH=build/triton-$(TRITON) $(BIN)/python tools/gpu_check.py --methods rdn rla gdn sgla --out results/gpu-check.md

gpu-cost: $(READY) build/triton-$(TRITON)
	$(INTERPRET) $(BIN)/python tools/gpu_cost.py --out results/gpu-cost.md

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/rla/ops/_native*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
