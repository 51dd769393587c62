# GRPO Studio. Two commands matter: make run and make test. Everything is in .venv/.

VENV   := .venv
PY     := $(VENV)/bin/python
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
            $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)

# --no-compile: modules are byte-compiled when they are first imported; most of them never are, and compiling all takes half of the install.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile

# One more than the cores, since tests wait for processes that they start.
WORKERS := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))

# Byte code is kept even where the environment says not to: the suite alone starts hundreds of processes that import the same modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-as-gpu proofs architectures demo lint format bench bench-against app app-test app-linux wheel mac-app release-mac help system clean
.DEFAULT_GOAL := help

help: ## say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.run-ready ## start the app on the bundled demo (in the terminal where there is no display)
	$(PY) -m app

test: $(VENV)/.test-ready ## run the whole suite
	QT_QPA_PLATFORM=offscreen $(PY) -m pytest -n $(WORKERS) --dist loadfile

test-as-gpu: $(VENV)/.test-ready ## run the suite on a CPU that makes a GPU's choices
	GRPO_STUDIO_TREAT_CPU_AS=gpu QT_QPA_PLATFORM=offscreen $(PY) -m pytest -n $(WORKERS) --dist loadfile

proofs: $(VENV)/.test-ready ## run the long proofs too: the demo for three seeds, every loss learning
	QT_QPA_PLATFORM=offscreen $(PY) -m pytest -m proof -s

architectures: $(VENV)/.test-ready ## try every model type of mlx-lm and mlx-vlm; writes docs/architectures.json and vision_families.json
	$(PY) -m tests.support.architectures
	$(PY) -m tests.support.vision_families

demo: $(VENV)/.run-ready ## train the bundled demo in the terminal
	$(PY) -m backend demo

lint: $(VENV)/.lint-ready ## check style and types
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m pyright

format: $(VENV)/.test-ready ## put the code in order
	$(PY) -m ruff check --fix . && $(PY) -m ruff format .

bench: $(VENV)/.run-ready ## measure speed and memory of our own steps
	$(PY) -m benchmarks ours

bench-against: $(VENV)/.run-ready ## install the peers and measure ours beside them
	$(PY) -m benchmarks peers --install && $(PY) -m benchmarks against

app: $(VENV)/.app-ready ## freeze the app into dist/: a folder on Linux, GRPO Studio.app on a Mac
	$(PY) -m PyInstaller --noconfirm --log-level WARN packaging/grpo-studio.spec
	$(PY) packaging/size_table.py dist/GRPO\ Studio

app-test: app ## freeze the app, and try every verb and page of it with an empty environment
	QT_QPA_PLATFORM=offscreen $(PY) -m pytest -m proof tests/packaging/test_frozen.py

app-linux: app ## freeze the app, and pack it with an install script into a tarball in dist/
	$(PY) packaging/linux_package.py

wheel: $(VENV)/.test-ready ## build the wheel and the source archive into dist/
	$(PY) -m hatchling build -d dist

mac-app: $(VENV)/.test-ready ## make the light app bundle, which needs no certificate, in dist/light/
	$(PY) packaging/macos/light_app.py
	$(PY) packaging/check_bundle.py "dist/light/GRPO Studio.app"

release-mac: $(VENV)/.release-ready ## on a Mac: freeze, sign, notarise and pack the app into a disk image (CONTRIBUTING.md)
	$(PY) packaging/macos/oldest_wheels.py
	$(MAKE) app
	$(PY) packaging/macos/release.py "dist/GRPO Studio.app"

clean: ## remove .venv and caches (runs are kept)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

system:
	@if [ -z "$(PYTHON)" ]; then echo "GRPO Studio needs Python 3.11 or newer; install it, or name it: make run PYTHON=/path/to/python3" >&2; exit 1; fi
	@$(PYTHON) packaging/system_libraries.py

$(PY): | system
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable .
	@$(PY) packaging/kernel_header.py
	@touch $@

$(VENV)/.test-ready: pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	@$(PY) packaging/kernel_header.py
	@touch $@ $(VENV)/.run-ready

$(VENV)/.lint-ready: pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev,lint]'
	@$(PY) packaging/kernel_header.py
	@touch $@ $(VENV)/.test-ready $(VENV)/.run-ready

$(VENV)/.app-ready: pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[app,dev]'
	@touch $@

$(VENV)/.release-ready: pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[app,dev,release]'
	@touch $@
