# Two commands do everything on a fresh Debian or Ubuntu with Python 3.11 and g++: `make demo` and `make test`.
# `make help` lists the rest; docs/environment.md lists the variables.
#
# How set-up stays right: every finished step leaves a stamp whose NAME holds a hash of what the step depends on, so make's own
# "does the file exist" is the whole test. The stamp is the last thing a step writes, so a step that was interrupted has none and
# is done again: wheels first (cached outside the checkout), then .venv from them, then the package built into .venv.

PYTHON ?= python3.11
VENV   ?= .venv
LOCK   ?= requirements.lock
CXX    ?= g++
ARGS   ?=
export CXX

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SUFFIXES:
.DEFAULT_GOAL := help

hash     = $(shell { $(1); } 2>/dev/null | sha256sum | cut -c1-16)
BIN      = $(VENV)/bin
STAMPS  := $(VENV)/.tio
WHEELS  := $(or $(TIO_WHEEL_CACHE),$(HOME)/.cache/tio_megatron/wheels)
GB_FREE := 8
BUILT_FROM := setup.py pyproject.toml tio_megatron/kernels/build.py $(sort $(wildcard tio_megatron/kernels/csrc/*))

WHEELS_DONE  := $(WHEELS)/.complete-$(call hash,cat $(LOCK); uname -m)
ENV_DONE     := $(STAMPS)/env-$(call hash,cat $(LOCK); echo $(abspath $(VENV)))
PACKAGE_DONE := $(STAMPS)/package-$(call hash,cat $(BUILT_FROM); echo $(BUILT_FROM) $(CURDIR))

DOCS        := $(VENV)-docs
DOCS_DONE   := $(DOCS)/.tio-$(call hash,cat docs/site/requirements.txt)
ASCEND      := $(VENV)-ascend
ASCEND_DONE := $(ASCEND)/.tio-$(call hash,cat tests/npu/requirements.txt tests/npu/stub.py; echo $(CURDIR))
VERL        := $(VENV)-verl
VERL_DONE   := $(VERL)/.tio-$(call hash,cat $(LOCK) tests/verl/requirements.txt tests/verl/vllm_name.py; echo $(BUILT_FROM) $(CURDIR))
DEEPSPEED      := $(VENV)-deepspeed
DEEPSPEED_NEED := tests/integrations/deepspeed/requirements.txt
DEEPSPEED_DONE := $(DEEPSPEED)/.tio-$(call hash,cat $(LOCK) $(DEEPSPEED_NEED); echo $(CURDIR))
IN_DEEPSPEED    = env PATH="$(abspath $(DEEPSPEED))/bin:$$PATH" DS_ACCELERATOR=cpu MEGATRON_CORE="$(abspath $(DEEPSPEED))/megatron" OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)"
# torch_npu's own start-up is off: it would run, and fail, in every import of torch
IN_ASCEND    = env PATH="$(abspath $(ASCEND))/bin:$$PATH" LD_LIBRARY_PATH="$(abspath $(ASCEND))/cann" TORCH_DEVICE_BACKEND_AUTOLOAD=0 ASCEND_WHEEL=1 PYTHONPATH="$(CURDIR)"

# two files of tests beside each other, each in its order: most of a file's tests are one process or wait, and a world of ranks is a file's own
TWO_AT_ONCE = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10

define HELPERS
say() { printf 'make: %s\n' "$$*" >&2; }
die() { say "$$@"; exit 1; }
need() {  # said before anything is downloaded
    command -v $(firstword $(PYTHON)) >/dev/null || die "no '$(PYTHON)': install Python 3.11 (apt-get install python3.11 python3.11-venv) or say where it is: make PYTHON=/path/to/python3.11"
    $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || die "'$(PYTHON)' is not a working Python 3.11, the version that $(LOCK) is made for: make PYTHON=/path/to/python3.11"
    $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || die "'$(PYTHON)' cannot make environments: apt-get install python3.11-venv"
    command -v $(firstword $(CXX)) >/dev/null || die "no C++ compiler '$(CXX)': apt-get install g++, or name another with make CXX=..."
}
need_disk() {  # folder
    free=$$(df -Pk "$$1" | awk 'NR == 2 { print int($$4 / 1048576) }')
    [ "$$free" -ge $(GB_FREE) ] || die "$$free GB free at $$1 and $(GB_FREE) GB needed: make room, or choose other places with make VENV=DIR and TIO_WHEEL_CACHE=DIR"
}
take() {  # descriptor that is open, and what it stands for; a lock held by somebody else is said before it is waited for
    flock -n "$$1" && return
    say "waiting for another make, which is installing from or into $$2"
    flock "$$1"
}
empty() {  # the folder of stamps goes last: by it the next run knows that the environment is ours
    rm -f $(STAMPS)/*
    find $(VENV) -mindepth 1 -maxdepth 1 ! -name .tio -exec rm -rf {} +
}
fetch() {  # arguments of pip download; new wheels appear in the cache whole or not at all
    new=$$(mktemp -d "$(WHEELS)/.new.XXXXXX"); trap 'rm -rf "$$new"' EXIT
    $(BIN)/python -m pip download $(if $(CI),-qq) --disable-pip-version-check --no-cache-dir --only-binary :all: --find-links "$(WHEELS)" --dest "$$new" "$$@"
    mv -f "$$new"/*.whl "$(WHEELS)/"
    rmdir "$$new"
}
install() {  # arguments of pip install; from the cache alone
    $(BIN)/python -m pip install -q --disable-pip-version-check --no-index --find-links "$(WHEELS)" "$$@"
}
endef

.PHONY: help house setup demo rl matrix-train faults test test-full test-multinode test-triton test-ascend test-deepspeed bench-deepspeed verl test-verl test-mindspeed test-megatron-lm test-vllm-ascend remake-ascend lower-ascend bench clean distclean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12
	echo 'Variables: ARGS (passed on), PYTHON, CXX, VENV, TIO_WHEEL_CACHE. Example: make test ARGS="-k tree"'

setup: $(PACKAGE_DONE)  ## make .venv with the locked dependencies and the package, built (the others call it)

demo: setup  ## the main job: Megatron and vLLM in many layouts, logdiff 0 in each (ARGS=--quick: within 2 minutes)
	@PYTHON='$(abspath $(BIN))/python' bash launch/qwen3_moe.sh $(ARGS)

rl: setup  ## reinforcement learning: 40 steps exactly on policy, then the stock packages, and a picture of both (out/rl)
	@PYTHON='$(abspath $(BIN))/python' bash launch/qwen3_moe.sh rl $(ARGS)
	PYTHON='$(abspath $(BIN))/python' bash launch/qwen3_moe.sh rl --stock $(ARGS)

matrix-train: setup  ## training in 36 layouts, 8 with an auxiliary loss, and changing them half-way: one SHA-256 of weights and optimizer (ARGS=--quick: a few of them)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m examples.qwen3_moe.matrix_train $(ARGS)

faults: setup  ## plants the kinds of mismatch that people report, lets tio diagnose name them, and writes the table in docs/divergence.md
	@OMP_NUM_THREADS=1 $(BIN)/python tests/support/faults.py $(ARGS)

test: setup  ## what CI runs, at most 10 minutes on two cores: ruff, mypy, and the tests of the promise
	@$(BIN)/ruff check .
	$(BIN)/mypy
	$(TWO_AT_ONCE) -m 'not full' $(ARGS)

test-full: setup  ## all tests, at most an hour: also those of the care around the promise
	@$(TWO_AT_ONCE) $(ARGS)

test-multinode: setup  ## every test over several hosts, the slow ones too: network namespaces on this machine (root, iproute2)
	@$(BIN)/python -m pytest tests/multinode $(ARGS)

test-triton: setup  ## the Triton kernels alone: interpreted, and compiled for sm_90 beside tests/golden/triton_sm90.txt (no GPU)
	@$(BIN)/python -m pytest tests/kernels/test_triton.py $(ARGS)

test-ascend: $(ASCEND_DONE)  ## NPU calls against torch_npu's wheel, and our kernels through triton-ascend, without an NPU, in an environment of their own (.venv-ascend)
	@$(IN_ASCEND) python -c "import tio_megatron.kernels.library" 2>/dev/null || $(IN_ASCEND) python -m tio_megatron.kernels.build
	$(IN_ASCEND) python -m pytest -o addopts=--import-mode=importlib -W ignore::pytest.PytestConfigWarning tests/npu $(ARGS)

test-deepspeed: $(DEEPSPEED_DONE)  ## DeepSpeed 0.19.8 on its CPU accelerator under the contract, in an environment of its own (.venv-deepspeed); about 8 minutes with ARGS="-m 'not full'", more without
	@$(IN_DEEPSPEED) python -c "import tio_megatron.kernels.library" 2>/dev/null || $(IN_DEEPSPEED) python -m tio_megatron.kernels.build
	$(IN_DEEPSPEED) python -m pytest tests/integrations/deepspeed $(ARGS)

bench-deepspeed: $(DEEPSPEED_DONE)  ## what the contract costs under DeepSpeed, beside stock, in the same environment
	@$(IN_DEEPSPEED) python -c "import tio_megatron.kernels.library" 2>/dev/null || $(IN_DEEPSPEED) python -m tio_megatron.kernels.build
	$(IN_DEEPSPEED) python -W ignore benchmarks/deepspeed_engine.py $(ARGS)

verl: $(VERL_DONE)  ## GRPO in stock verl on this CPU, its metrics at 0, in an environment of its own (.venv-verl; into out/verl)
	@PYTHON='$(abspath $(VERL)/bin)/python' bash launch/qwen3_moe_verl.sh out/verl $(ARGS)

test-verl: $(VERL_DONE)  ## that job with and without the contract, and verl's own offloading, in the same environment; about 20 minutes
	@$(VERL)/bin/python -m tio_megatron.kernels.build >/dev/null
	PATH="$(abspath $(VERL)/bin):$$PATH" $(VERL)/bin/python -m pytest tests/verl $(ARGS)

remake-ascend: $(ASCEND_DONE)
	@$(IN_ASCEND) python -m tests.npu.snapshot

lower-ascend: $(ASCEND_DONE)
	@$(IN_ASCEND) python -m tests.npu.lower --write

test-mindspeed: setup  ## the tests under MindSpeed against its real sources: MINDSPEED=DIR, a checkout of branch core_r0.16.0
	@$(HELPERS)
	[ -f '$(MINDSPEED)/mindspeed/patch_utils.py' ] || die "no mindspeed/patch_utils.py in MINDSPEED='$(MINDSPEED)': make test-mindspeed MINDSPEED=DIR, with a checkout of MindSpeed's branch core_r0.16.0"
	MINDSPEED='$(abspath $(MINDSPEED))' $(BIN)/python -m pytest tests/integrations/mindspeed $(ARGS)

test-megatron-lm: setup  ## pretrain_gpt.py of Megatron-LM's own sources under the contract: MEGATRON_LM=DIR, a checkout of tag core_v0.16.1
	@$(HELPERS)
	[ -f '$(MEGATRON_LM)/megatron/training/arguments.py' ] || die "no megatron/training/arguments.py in MEGATRON_LM='$(MEGATRON_LM)': make test-megatron-lm MEGATRON_LM=DIR, with a checkout of Megatron-LM's tag core_v0.16.1"
	[ -d '$(VENV)/megatron-lm-needs' ] || $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target '$(VENV)/megatron-lm-needs' -r tests/integrations/megatron_lm/requirements.txt
	MEGATRON_LM='$(abspath $(MEGATRON_LM))' MEGATRON_LM_NEEDS='$(abspath $(VENV))/megatron-lm-needs' $(BIN)/python -m pytest tests/integrations/megatron_lm $(ARGS)

test-vllm-ascend: setup  ## what we name of vllm-ascend against its sources: VLLM_ASCEND=DIR (release 0.23.0), and VLLM=DIR (vLLM 0.23.0) if there
	@$(HELPERS)
	[ -f '$(VLLM_ASCEND)/vllm_ascend/platform.py' ] || die "no vllm_ascend/platform.py in VLLM_ASCEND='$(VLLM_ASCEND)': make test-vllm-ascend VLLM_ASCEND=DIR, with the unpacked sources of vllm-ascend 0.23.0"
	VLLM_ASCEND='$(abspath $(VLLM_ASCEND))' VLLM='$(if $(VLLM),$(abspath $(VLLM)))' $(BIN)/python -m pytest tests/integrations/vllm_ascend $(ARGS)

house: setup  ## lines by room, import circles, and files that name a model's tensors
	@$(BIN)/python -m tests.house

bench: setup  ## the benchmarks, against the stock packages
	@$(BIN)/python benchmarks/run.py $(ARGS)

.PHONY: docs dist dist-check dist-check-arm
docs: $(DOCS_DONE)  ## the documentation as a site with an API reference: out/site (in an environment of its own, .venv-docs)
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build -q --strict $(ARGS)
	echo "out/site/index.html"

dist: setup  ## a release from the last commit: sdist and wheels for x86-64 and aarch64, in dist/
	@PATH="$(abspath $(BIN)):$$PATH" bash .ci/dist

dist-check: setup  ## installs the wheel of dist/ into a new, empty Debian and tries it (root, debootstrap)
	@bash .ci/clean-root dist "$(WHEELS)"

dist-check-arm: setup  ## the same with the wheel for aarch64 in a Debian for Arm, emulated (root, debootstrap, qemu-user-static; some minutes)
	@PATH="$(abspath $(BIN)):$$PATH" bash .ci/arm-root dist "$(WHEELS)"

$(DOCS_DONE):
	@$(HELPERS)
	need
	if [ -d $(DOCS) ] && ! ls $(DOCS)/.tio-* >/dev/null 2>&1; then die "'$(DOCS)' was not made by this Makefile: move it away"; fi
	mkdir -p $(DOCS)
	touch $(DOCS)/.tio-unfinished
	find $(DOCS) -mindepth 1 -maxdepth 1 ! -name '.tio-unfinished' -exec rm -rf {} +
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r docs/site/requirements.txt
	touch '$@'
	rm -f $(DOCS)/.tio-unfinished

$(ASCEND_DONE):
	@$(HELPERS)
	need
	if [ -d $(ASCEND) ] && ! ls $(ASCEND)/.tio-* >/dev/null 2>&1; then die "'$(ASCEND)' was not made by this Makefile: move it away"; fi
	mkdir -p $(ASCEND)
	touch $(ASCEND)/.tio-unfinished
	need_disk $(ASCEND)
	find $(ASCEND) -mindepth 1 -maxdepth 1 ! -name '.tio-unfinished' -exec rm -rf {} +
	mkdir -p "$(WHEELS)"
	$(PYTHON) -m venv $(ASCEND)
	say "installing torch and torch_npu into $(ASCEND), a minute or three"
	$(ASCEND)/bin/python -m pip install -q --disable-pip-version-check --find-links "$(WHEELS)" -r tests/npu/requirements.txt
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(ASCEND)/bin/python tests/npu/stub.py $(ASCEND)/cann >/dev/null
	touch '$@'
	rm -f $(ASCEND)/.tio-unfinished

$(DEEPSPEED_DONE):
	@$(HELPERS)
	need
	if [ -d $(DEEPSPEED) ] && ! ls $(DEEPSPEED)/.tio-* >/dev/null 2>&1; then die "'$(DEEPSPEED)' was not made by this Makefile: move it away"; fi
	mkdir -p $(DEEPSPEED)
	touch $(DEEPSPEED)/.tio-unfinished
	need_disk $(DEEPSPEED)
	find $(DEEPSPEED) -mindepth 1 -maxdepth 1 ! -name '.tio-unfinished' -exec rm -rf {} +
	mkdir -p "$(WHEELS)"
	$(PYTHON) -m venv $(DEEPSPEED)
	say "installing torch and DeepSpeed into $(DEEPSPEED), a minute or three"
	into() { $(DEEPSPEED)/bin/python -m pip install -q --disable-pip-version-check --find-links "$(WHEELS)" "$$@"; }
	into --constraint $(LOCK) "$$(grep -E '^torch==' $(LOCK))"
	grep -v '^deepspeed==' $(DEEPSPEED_NEED) > $(DEEPSPEED)/needs.txt
	into --no-deps -r $(DEEPSPEED)/needs.txt
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu into --no-deps --no-build-isolation "$$(grep -E '^deepspeed==' $(DEEPSPEED_NEED))"
	into --no-deps --target $(DEEPSPEED)/megatron "$$(grep -E '^megatron-core==' $(LOCK))"
	touch '$@'
	rm -f $(DEEPSPEED)/.tio-unfinished

$(VERL_DONE):
	@$(HELPERS)
	need
	if [ -d $(VERL) ] && ! ls $(VERL)/.tio-* >/dev/null 2>&1; then die "'$(VERL)' was not made by this Makefile: move it away"; fi
	mkdir -p $(VERL)
	touch $(VERL)/.tio-unfinished
	need_disk $(VERL)
	find $(VERL) -mindepth 1 -maxdepth 1 ! -name '.tio-unfinished' -exec rm -rf {} +
	mkdir -p "$(WHEELS)"
	$(PYTHON) -m venv $(VERL)
	say "installing $(LOCK) and verl into $(VERL), some minutes"
	$(VERL)/bin/python -m pip install -q --disable-pip-version-check --find-links "$(WHEELS)" --constraint $(LOCK) "$$(grep -E '^torch==' $(LOCK))"
	grep -v '^torch==' $(LOCK) > $(VERL)/lock.txt
	$(VERL)/bin/python -m pip install -q --disable-pip-version-check --no-deps --find-links "$(WHEELS)" -r $(VERL)/lock.txt -r tests/verl/requirements.txt
	$(VERL)/bin/python tests/verl/vllm_name.py
	$(VERL)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch '$@'
	rm -f $(VERL)/.tio-unfinished

clean:  ## remove what was built and measured; .venv and the wheels stay
	@rm -rf build dist out ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(STAMPS)/package-*
	find tio_megatron collectives examples tests benchmarks \( -name __pycache__ -o -name "*.so" -o -name "*.built" \) -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too; the wheels stay
	@$(HELPERS)
	if [ -d $(STAMPS) ]; then empty; rm -rf $(VENV); fi
	for made in $(ASCEND) $(DEEPSPEED) $(DOCS) $(VERL); do if ls $$made/.tio-* >/dev/null 2>&1; then rm -rf $$made; fi; done

$(ENV_DONE):
	@$(HELPERS)
	exec 9< $(firstword $(MAKEFILE_LIST)); take 9 "this checkout"  # two makes in it: the second waits, then finds the work done
	[ -e '$@' ] && exit 0
	need
	if [ -e $(VENV) ]; then
	    [ -d $(STAMPS) ] || die "'$(VENV)' was not made by this Makefile: move it away, or choose another place with make VENV=DIR"
	    say "making $(VENV) anew: it is unfinished, was moved, or belongs to another $(LOCK)"
	    empty
	fi
	mkdir -p "$$(dirname $(VENV))"
	need_disk "$$(dirname $(VENV))"
	mkdir -p $(STAMPS)
	$(PYTHON) -m venv $(VENV)
	mkdir -p "$(WHEELS)"
	exec 8< "$(WHEELS)"; take 8 "$(WHEELS)"  # the cache is shared by all checkouts
	rm -rf "$(WHEELS)"/.new.*
	if [ ! -e "$(WHEELS_DONE)" ]; then
	    need_disk "$(WHEELS)"
	    say "downloading the wheels named in $(LOCK), once, to $(WHEELS)"
	    torch=$$(grep -E '^torch==' $(LOCK) || true)
	    [ -z "$$torch" ] || fetch --constraint $(LOCK) "$$torch"
	    fetch --no-deps --requirement $(LOCK)
	    touch "$(WHEELS_DONE)"
	fi
	say "installing them into $(VENV), a minute or three"
	torch=$$(grep -E '^torch==' $(LOCK) || true)
	[ -z "$$torch" ] || install --constraint $(LOCK) "$$torch"
	install --no-deps --requirement $(LOCK)
	touch '$@'

$(PACKAGE_DONE): $(ENV_DONE)
	@$(HELPERS)
	exec 9< $(firstword $(MAKEFILE_LIST)); take 9 "this checkout"
	[ -e '$@' ] && exit 0
	need
	say "building tio_megatron into $(VENV)"
	install --no-deps --no-build-isolation --editable .
	rm -f $(STAMPS)/package-*
	touch '$@'
