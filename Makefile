# `make mnist` and `make test` set up .venv by themselves. Another Python: make venv PYTHON=/path/to/python3.12

VENV := .venv
BIN := $(VENV)/bin
# Minutes of work: a terminal shows pip's own progress, and a log nothing but our line.
PIP_INSTALL := quiet=--quiet; if [ -t 1 ]; then quiet=; fi; \
    $(BIN)/python -m pip install $$quiet --disable-pip-version-check --no-input
STAMP := $(VENV)/.installed
# A text as one word of the shell: folders may have spaces and apostrophes in their names.
quoted = '$(subst ','\'',$(1))'
PYTHONS := $(if $(PYTHON),$(call quoted,$(PYTHON)),python3.13 python3.12 python3.11 python3.14 python3)

# Chosen to pass 97% after three epochs of MNIST, in both modes, within two minutes on two cores.
MNIST_FLAGS ?= --batch-size 64 --gradient-accumulation-count 2 --learning-rate 0.2
PYTEST_FLAGS ?= -n 2 --dist worksteal
# Files and folders of tests: all, if it is empty.
TESTS ?=
# Of random programs: how long, and more flags for tests/random_programs/run.py, such as --kind ops or --seed 7.
MINUTES ?= 60
RANDOM_FLAGS ?=
# For benchmarks/run_all.py, such as --only pipeline mnist, or --limit 600.
BENCH_FLAGS ?=
# Pictures to draw, such as zero-bubble-wave.svg: all, if it is empty.
PICTURES ?=

# What a finished .venv says of itself: a venv names its own folder in its scripts, so that one that was moved is broken.
FINGERPRINT := $(CURDIR)

LIBTPU := 'from importlib.metadata import requires; \
    print(next(line.split(";")[0].strip() for line in requires("jax") if line.startswith("libtpu")))'
JAXLIB := 'from importlib.metadata import version; print(version("jaxlib"))'

# The shell's `times` has a second line, such as 11m3.25s 0m20.1s, for its children.
MINUTES_OF_CPU := 'NR == 2 { gsub("s", ""); split($$1, a, "m"); split($$2, b, "m"); \
    printf "CPU time with the type checker: %.1f minutes\n", a[1] + b[1] + (a[2] + b[2]) / 60 }'

.DEFAULT_GOAL := help
.PHONY: help venv aot test test-all test-budget coverage random api mnist bench faults pictures strangers docs docs-serve format clean

# A .venv that was left half-made, was moved, lost its Python, or has another one than PYTHON asks for is made anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(FINGERPRINT))
  REMAKE := yes
else ifneq ($(shell $(BIN)/python -c 'print("works")' 2>/dev/null),works)
  REMAKE := yes
else ifdef PYTHON
  SAY_VERSION := -c 'import sys; print(sys.version)'
  ifneq ($(shell $(BIN)/python $(SAY_VERSION)),$(shell $(call quoted,$(PYTHON)) $(SAY_VERSION) 2>/dev/null))
    REMAKE := yes
  endif
endif

ifdef REMAKE
.PHONY: $(STAMP)
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## set up .venv with everything installed

$(STAMP): pyproject.toml
ifdef REMAKE
	@# A name on the PATH proves nothing: a version manager's stub may fail, and Debian splits venv off.
	@for python in $(PYTHONS); do \
	    if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	        echo "Setting up $(VENV) with $$("$$python" --version): a minute or two."; \
	        exec "$$python" -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo 'No working Python >= 3.11 with venv among:' $(PYTHONS)'. Name one: make venv PYTHON=/path/to/python' >&2; exit 1
endif
	@rm -f $@
	@echo 'Installing ipu_jax and the packages that it needs: 1.3 GB'
	@$(PIP_INSTALL) --editable '.[dev]'
	@printf '%s\n' $(call quoted,$(FINGERPRINT)) > $@

aot: $(STAMP) ## install XLA's compilers for TPU and NVIDIA GPUs beside .venv's packages (1.3 GB)
	@# The ones that this jax asks for. Among the packages, they would make jax look for a TPU and a GPU in every process.
	@# One that cannot be installed does not keep the other away, and is a failure.
	@install() { \
	    folder=$(VENV)/$$1; shift; \
	    if [ "$$(cat $$folder/.installed 2>/dev/null)" = "$$*" ]; then return 0; fi; \
	    echo "Installing $$*"; rm -rf $$folder && \
	    { $(PIP_INSTALL) --no-deps --target $$folder "$$@"; } && \
	    printf '%s\n' "$$*" > $$folder/.installed; \
	}; \
	short=''; \
	{ tpu="$$($(BIN)/python -c $(LIBTPU))" && install aot-tpu "$$tpu"; } || short="$$short TPU"; \
	{ jaxlib="$$($(BIN)/python -c $(JAXLIB))" && install aot-cuda "jax-cuda12-plugin==$$jaxlib" \
	    "jax-cuda12-pjrt==$$jaxlib" 'nvidia-cuda-nvcc-cu12==12.9.*'; } || short="$$short GPU"; \
	if [ -n "$$short" ]; then echo "Not installed, XLA's compilers for:$$short" >&2; exit 1; fi

test: $(STAMP) ## run ruff, basedpyright, and pytest with the fast tests and doctests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Tests wait now and then, and leave a core to the type checker. Both are told, its errors last, and either fails.
	@echo $(call quoted,$(BIN)/basedpyright beside $(BIN)/python -m pytest $(PYTEST_FLAGS) $(TESTS)); \
	said="$$(mktemp)"; $(BIN)/basedpyright --pythonpath $(BIN)/python >"$$said" 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null; rm -f "$$said"' EXIT; \
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(TESTS); tests=$$?; \
	wait $$types || { echo 'basedpyright:'; cat "$$said"; tests=1; }; \
	times >"$$said"; awk $(MINUTES_OF_CPU) "$$said"; \
	exit $$tests

test-budget: PYTEST_FLAGS += --budget
test-budget: test ## the same as `make test`, and fail if a test or all of them take more CPU time than they may

test-all: PYTEST_FLAGS += --slow=all
test-all: test ## the same with every slow test, an hour or two

coverage: $(STAMP) ## run the tests, and check that they run 90% of the lines of each package
	$(BIN)/python -m coverage erase
	@# Tests that fail do not hide the lines that ran: both are told, and either is a failure.
	@short=''; $(BIN)/python -m coverage run -m pytest $(PYTEST_FLAGS) $(TESTS) || short=' tests-failed'; \
	$(BIN)/python -m coverage combine --quiet; \
	for package in ipu_jax sharded_ops mnist_example; do \
	    echo "== $$package"; \
	    $(BIN)/python -m coverage report --include="$$package/*" --fail-under=90 || short="$$short $$package"; \
	done; \
	if [ -n "$$short" ]; then echo "Fell short:$$short" >&2; exit 1; fi

random: $(STAMP) ## try random programs against dense ones for MINUTES (60)
	$(BIN)/python tests/random_programs/run.py --minutes $(MINUTES) $(RANDOM_FLAGS)

api: $(STAMP) ## list the public names and signatures anew, in tests/project/public_api.txt
	$(BIN)/python tests/support/public_api.py

mnist: $(STAMP) ## train the concurrent pipeline on handwritten digits
	$(BIN)/run-sharded-mnist $(MNIST_FLAGS)

bench: $(STAMP) ## run every benchmark, rewrite benchmarks/RESULTS.md, and check the bounds
	$(BIN)/python benchmarks/run_all.py $(BENCH_FLAGS)

faults: $(STAMP) ## break a training in fifteen ways, 20 times each
	$(BIN)/python benchmarks/faults.py --check

pictures: $(STAMP) ## draw the pictures of the documentation, and run its notebook
	PYTHONPATH=benchmarks:tests $(BIN)/python -m docs.website.pictures $(PICTURES)

strangers: $(STAMP) ## cut model files of other projects, which it fetches, and write their table into docs/gallery.md
	@$(PIP_INSTALL) --no-deps --target .strangers/packages 'typeguard<3' einops
	PYTHONPATH=.:tests $(BIN)/python tests/strangers/table.py $(STRANGERS)

docs: $(STAMP) ## build the documentation into site/, and fail if a link leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'Open site/index.html in a browser. It needs no server, and the search works, too.'

docs-serve: $(STAMP) ## show the documentation at http://127.0.0.1:8000 while you write it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

format: $(STAMP) ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove build outputs and caches; .venv stays
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
