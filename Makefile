# On a fresh machine with Rust, Python >= 3.11 and a C compiler:
#   make demo   a live eight-worker cluster under load, KV-aware routing against round robin
#   make test   every test: Rust, and official clients against the real binary
.PHONY: bench bench-live bench-net build demo test test-python test-rust

build:
	cargo build --release --locked

# The Python tests run the binary of the Rust tests.
test: test-rust
	SLIPSTREAM_BIN=$${CARGO_TARGET_DIR:-target}/debug/slipstream ./scripts/pytest.sh

test-rust:
	# The simulator's hooks would be in every crate else: features of one build are shared.
	cargo test --workspace --exclude slipstream-vopr --locked
	cargo test --locked --lib -p slipstream-engine -p slipstream-report --features slipstream-engine/parquet,slipstream-report/parquet

# The official `openai` package and curl against a real server; sets up .venv at the first run.
test-python:
	./scripts/pytest.sh

# The `openai` and `anthropic` packages, LangChain and LiteLLM with tools and structured output; skips without a network.
.PHONY: test-clients
test-clients:
	./scripts/test-clients.sh

# Every page in a headless Chromium, by axe-core: no serious finding. Skips without Chromium or npm.
.PHONY: test-pages
test-pages: build
	./scripts/test-pages.sh

# Format, lints, documentation, types, shell scripts, licenses.
.PHONY: lint
lint:
	./scripts/lint.sh

# The workspace by the oldest Rust that Cargo.toml states, if rustup has it; says so if not. Part of `make lint`.
.PHONY: msrv
msrv:
	./scripts/msrv.sh

# SHORT=1: a fifth of the requests. TRACE=FILE: replay a trace in Mooncake's format. REQUESTS=N. SPEEDUP=N: time
# compression, however busy the host is.
demo: build
	$${SLIPSTREAM_BIN:-$${CARGO_TARGET_DIR:-target}/release/slipstream} demo $(if $(SHORT),--short) $(if $(TRACE),--trace "$(TRACE)") \
	  $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SPEEDUP),--speedup $(SPEEDUP))

# Streams, cancels, slow readers, and workers that are killed and stopped, for TORTURE_S seconds (in `make test`: 3; CI: 20).
.PHONY: torture
torture:
	SLIPSTREAM_TORTURE_S=$(or $(TORTURE_S),180) cargo test --locked --package slipstream-cli --test it torture -- --nocapture

# The live path under a seeded simulator, with fresh seeds (docs/reliability.md). VOPR_S=N: seconds; SEED=N: one
# schedule, and its smallest form if it fails.
.PHONY: vopr vopr-planted test-vopr
vopr:
	cargo run --profile vopr --locked --package slipstream-vopr --features sim -- $(if $(SEED),--seed $(SEED),--seconds $(or $(VOPR_S),60) --threads $(or $(THREADS),1))

# Its tests, and the seeds that failed once.
test-vopr:
	cargo test --profile vopr --locked --package slipstream-vopr

# The simulator has to find each of the bugs that are planted for it, within 10,000 schedules.
vopr-planted:
	cargo run --profile vopr --locked --package slipstream-vopr --features planted -- --planted

# 100 workers killed under 48 clients, one at least being left: no stream is lost (in `make test`: four).
.PHONY: survive
survive:
	SLIPSTREAM_KILLS=100 cargo test --locked --package slipstream-cli --test it survive -- --nocapture

# Frontends and workers replaced under official clients that do not retry, ROLLS times each (in `make test`: once).
.PHONY: rolling
rolling:
	SLIPSTREAM_ROLLS=$(or $(ROLLS),20) ./scripts/pytest.sh -s -k test_every_process_is_replaced

# Decoders of external input under libFuzzer, a minute each; needs a C++ compiler.
.PHONY: fuzz
fuzz:
	./scripts/fuzz.sh

# Predictions against measured deployments on held-out folds (docs/accuracy.md). WRITE=1: new profile and tables.
.PHONY: accuracy
accuracy: build
	./scripts/accuracy.sh

# A real vLLM on a CPU, calibrated on one load and predicted at five others (docs/calibrate.md): 15 minutes or so on a
# quiet machine. ROUNDS=N OUT=FILE; SETUP=1 makes the environment (3 GB).
.PHONY: bench-calibrate
bench-calibrate: build
	./scripts/bench-calibrate.sh

# Interleavings of the lock-free parts of the plane, under loom (its own target folder).
.PHONY: loom
loom:
	LOOM_MAX_PREEMPTIONS=3 RUSTFLAGS="--cfg loom" cargo test --release --locked --package slipstream-planes --lib loom --target-dir target/loom

# Tests of planes and the KV store under AddressSanitizer and ThreadSanitizer: a nightly toolchain with rust-src.
# TESTS=NAME: those whose names contain it.
.PHONY: asan tsan
asan:
	./scripts/sanitize.sh address $(TESTS)

tsan:
	./scripts/sanitize.sh thread $(TESTS)

# Undefined behavior in crates without I/O, under Miri: a nightly toolchain with the components miri and rust-src.
.PHONY: miri
miri:
	MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=2 cargo +nightly miri test --locked --target-dir target/miri \
	  --package slipstream-des --package slipstream-kvindex --package slipstream-engine --lib
	MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=2 cargo +nightly miri test --locked --target-dir target/miri \
	  --package slipstream-planes --lib frame

# Memory of the server per idle connection (docs/reliability.md).
.PHONY: bench-idle
bench-idle: build
	./scripts/idle-connections.py $${CARGO_TARGET_DIR:-target}/release/slipstream

# The same with 50,000 connections, in a virtual machine whose root may open as many files.
.PHONY: bench-idle-vm
bench-idle-vm: build
	./scripts/vm/idle.sh $${CARGO_TARGET_DIR:-target}/release/slipstream

# CPU time for which one request holds up a frontend thread (docs/reliability.md); fails above 10 ms.
.PHONY: bench-polls
bench-polls: build
	./scripts/longest-polls.py $${CARGO_TARGET_DIR:-target}/release/slipstream

# Cost and latency of the live path at speed-up 1e6 (docs/benchmarks.md).
bench-live: build
	./scripts/bench-live.sh

# CPU time per token at steps of 12 ms, beside an epoll loop that sends the same bytes (docs/benchmarks.md). Takes a C
# compiler.
.PHONY: bench-pace
bench-pace: build
	./scripts/bench-pace.py

# Cost of publishing events on a loaded server, each bus on and off (docs/events.md).
.PHONY: bench-events
bench-events: build
	./scripts/bench-events.sh

# Instructions per operation of each hot path, against benches/instructions.json. WRITE=1: new record.
.PHONY: bench-instructions
bench-instructions:
	./scripts/instructions.sh

# Instructions per streamed token, with streams that may continue elsewhere and without.
.PHONY: bench-resume
bench-resume:
	./scripts/resume-cost.sh

# Effect of the fast path, reused buffers and unshared tables, each on and off.
.PHONY: bench-stages
bench-stages:
	cargo build --release --locked --features bench
	./scripts/bench-stages.sh

# NVIDIA Dynamo 1.6.1 and Slipstream, one after the other; installs Dynamo from PyPI into a scratch folder.
.PHONY: bench-peer
bench-peer: build
	./scripts/bench-peer.sh

# PyPI's vllm-router in front of Slipstream's engines: its kv_aware policy must find hits by the KV events.
.PHONY: test-router
test-router: build
	./scripts/vllm-router.sh

# CPU and memory of routers in front of the same modelled engines: ours, vllm-router and smg from PyPI, in turns.
.PHONY: bench-router
bench-router: build
	./scripts/bench-router.sh

# Microbenches of the hot paths.
bench:
	cargo bench --locked

# The network benchmarks with events, ns per event, CPU and wall seconds, RSS (docs/benchmarks-net.md).
bench-net: build
	./scripts/bench-net.sh ./target/release/slipstream

# The network's tests, with goldens, in the release profile: a miscompilation would show only there.
# Takes minutes to build, seconds to run.
.PHONY: test-net-release
test-net-release:
	cargo test --release --locked --package slipstream-des --package slipstream-netsim

# `plan` beside every combination of drawn questions. SLIPSTREAM_BRUTE=200 asks 200 larger ones, and
# SLIPSTREAM_BRUTE_SEED=COMMIT others.
.PHONY: test-plan-release
test-plan-release:
	cargo test --release --locked --package slipstream-study --test brute -- --nocapture

# TCP's congestion controls against ns-3 in fixed and random networks (docs/netsim.md): a minute or two.
# Takes a Python, g++ and the `ns3` wheel from PyPI.
.PHONY: test-ns3
test-ns3: build
	./scripts/ns3/test.sh ./target/release/slipstream

# The twin: requests per CPU second and memory (docs/benchmarks-twin.md). TRACE=FILE adds a real trace.
.PHONY: bench-twin
bench-twin: build
	./scripts/bench-twin.sh

# The CPU scheduler's loader, next to the main binary; needs clang 16 or later, libelf and zlib.
.PHONY: scx test-sched
scx:
	cargo build --release --locked --manifest-path crates/host/scx/loader/Cargo.toml --target-dir target

# The CPU scheduler on a real kernel in QEMU; skips with the reason if QEMU or a kernel is missing.
test-sched:
	scripts/vm/test-sched.sh

# The same under all kinds of load at once, 10 seeds of 60 virtual seconds on 4 and 8 CPUs (hours).
.PHONY: soak-sched
soak-sched:
	scripts/vm/soak.sh

# Blocks by NIXL, on the library of its PyPI package (70 MB); skips with the reason if it is missing.
.PHONY: test-nixl
test-nixl:
	./scripts/test-nixl.sh

# `sweep` and `plan` on a Ray of two nodes on this machine; the first run installs Ray from PyPI (200 MB).
.PHONY: test-ray
test-ray:
	./scripts/test-ray.sh

# The vLLM connector on vLLM's real scheduler, on a CPU; the first run makes an environment of 2 GB.
# VLLM_VERSION=0.32.0: another release than the newest supported one.
# bench-vllm: its cost per step, against others (docs/connector.md).
.PHONY: test-vllm bench-vllm
test-vllm:
	./scripts/test-vllm.sh

bench-vllm:
	BENCH=1 ./scripts/test-vllm.sh --plot docs/connector-steps.png

# The same with real models (3 GB more): SETUP=1 creates their environment; without it the test skips.
.PHONY: test-vllm-real
test-vllm-real:
	./scripts/test-vllm-real.sh

# `serve` in front of two real `vllm serve` that compute on a CPU (docs/engines.md). Environment as above.
.PHONY: test-engines
test-engines:
	./scripts/test-engines.sh

# Packages, in target/package (docs/install.md). wheel: the Python module and the command; takes maturin. deb: takes
# cargo-deb. release: both, an archive with a static binary, the chart, a list of components and checksums, from a clean
# checkout.
wheel: build
	./scripts/package.sh wheel

.PHONY: wheel deb release
deb: build
	./scripts/package.sh deb

release:
	./scripts/package.sh release

# A .tar.gz with the command for each of TARGETS: a static binary for this machine's architecture, or such as
# TARGETS=aarch64-unknown-linux-gnu, by Debian's cross compilers. chart: the Helm chart; takes helm.
.PHONY: archive chart
archive:
	./scripts/package.sh archive

chart:
	./scripts/package.sh chart

# The Helm chart's output against packaging/helm/golden, by helm and kubeconform. Skips without helm.
.PHONY: test-chart
test-chart:
	./scripts/test-chart.sh

# The pages of docs/ as a site with search, in target/site; takes mdbook (cargo install mdbook).
.PHONY: docs
docs:
	./scripts/docs.sh

# Every code block of the documents, and their outputs (scripts/docs_outputs.py): some minutes. WRITE=1: new outputs.
.PHONY: docs-test
docs-test: build
	./scripts/venv.sh
	VIRTUAL_ENV=$(CURDIR)/.venv .venv/bin/maturin develop --quiet
	SLIPSTREAM_BIN=$${CARGO_TARGET_DIR:-target}/release/slipstream .venv/bin/python scripts/docs_outputs.py $(if $(WRITE),--write)
