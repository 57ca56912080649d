#!/usr/bin/env bash
# Runs a chore that is rarer than the targets of the Makefile.
#
#   scripts/run.sh                 lists the chores
#   scripts/run.sh NAME [ARG...]   runs one; variables of a chore are those of the environment
#
# Each entry of the table: name, what it takes besides Rust, and what it does; the function of that name runs it.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
binary=$target/release/slipstream

list() {
    cat <<'TABLE'
Tests
  test-rust          the Rust tests of the workspace
  test-python        the `openai` package and curl against a real server; sets up .venv at the first run
  test-clients       the `openai` and `anthropic` packages, LangChain and LiteLLM; skips without a network
  test-pages         every page in a headless Chromium, by axe-core; skips without Chromium or npm
  test-chart         the Helm chart's output, by helm and kubeconform; skips without helm
  test-net-release   the network's tests with goldens, optimized: a miscompilation would show only there
  test-plan-release  `plan` beside every combination of drawn questions; SLIPSTREAM_BRUTE=200 larger ones,
                     SLIPSTREAM_BRUTE_SEED=COMMIT others
  test-ns3           TCP's congestion controls against ns-3 (docs/netsim.md); takes Python and g++
  test-router        PyPI's vllm-router in front of modelled engines: its kv_aware policy must find hits
  test-nixl          KV blocks by NIXL's library from PyPI (70 MB)
  test-ray           `sweep` and `plan` on a Ray of two nodes on this machine (200 MB from PyPI)
  test-vllm-real     the connector with real models (3 GB); SETUP=1 makes their environment
  test-sched         the CPU scheduler on a real kernel in QEMU; skips with the reason
  test-vopr          the seeds of `make vopr` that failed once, and the simulator's own tests
  msrv               the workspace by the oldest Rust that Cargo.toml states; part of `make lint`

Long tests
  torture            streams, cancels and slow readers while workers are killed; TORTURE_S=180
  survive            100 workers killed under 48 clients: no stream is lost
  rolling            every process replaced under official clients; ROLLS=20
  soak-sched         the CPU scheduler under all kinds of load, on a real kernel (hours)
  vopr-planted       the simulator must find each planted bug within 10,000 schedules
  loom               interleavings of the lock-free parts of the plane
  asan, tsan [NAME]  planes and KV store under a sanitizer; takes a nightly toolchain with rust-src
  miri               undefined behavior in crates without I/O; takes a nightly toolchain with miri

Benchmarks (docs/benchmarks.md)
  bench-live         cost and latency of the live path at speed-up 1e6
  bench-pace         CPU time per token at steps of 12 ms, beside an epoll loop; takes a C compiler
  bench-polls        CPU time for which one request holds up a frontend thread; fails above 10 ms
  bench-idle         memory of the server per idle connection
  bench-idle-vm      the same with 50,000 connections, in a virtual machine
  bench-events       cost of publishing events on a loaded server
  bench-resume       instructions per streamed token, with streams that may continue elsewhere and without
  bench-peer         NVIDIA Dynamo 1.6.1 and Slipstream, one after the other
  bench-router       CPU and memory of routers in front of the same modelled engines
  bench-net          the packet network: ns per event, CPU and wall seconds, memory
  bench-twin         the twin: requests per CPU second and memory; TRACE=FILE adds a real trace
  bench-calibrate    a real vLLM calibrated on one load and predicted at five others; ROUNDS=N OUT=FILE SETUP=1
  bench-vllm         cost of the vLLM connector per step, against others

Builds
  scx                the CPU scheduler's loader; takes clang 16 or later, libelf and zlib
  archive            a .tar.gz with the command for each of TARGETS
  chart              the Helm chart; takes helm
TABLE
}

build() { cargo build --release --locked; }

# The simulator's hooks would be in every crate else: features of one build are shared.
test-rust() {
    cargo test --workspace --exclude slipstream-vopr --locked
    cargo test --locked --lib -p slipstream-engine -p slipstream-report \
        --features slipstream-engine/parquet,slipstream-report/parquet
}
test-python() { ./scripts/pytest.sh "$@"; }
test-clients() { ./scripts/test-clients.sh; }
test-pages() { build && ./scripts/test-pages.sh; }
test-chart() { ./scripts/test-chart.sh; }
test-net-release() { cargo test --release --locked --package slipstream-des --package slipstream-netsim; }
test-plan-release() { cargo test --release --locked --package slipstream-study --test brute -- --nocapture; }
test-ns3() { build && ./scripts/ns3/test.sh "$binary"; }
test-router() { build && ./scripts/vllm-router.sh; }
test-nixl() { ./scripts/test-nixl.sh; }
test-ray() { ./scripts/test-ray.sh; }
test-vllm-real() { ./scripts/test-vllm-real.sh; }
test-sched() { ./scripts/vm/test-sched.sh; }
test-vopr() { cargo test --profile vopr --locked --package slipstream-vopr; }
msrv() { ./scripts/msrv.sh; }

torture() {
    SLIPSTREAM_TORTURE_S=${TORTURE_S:-180} cargo test --locked --package slipstream-cli --test it torture -- --nocapture
}
survive() { SLIPSTREAM_KILLS=100 cargo test --locked --package slipstream-cli --test it survive -- --nocapture; }
rolling() { SLIPSTREAM_ROLLS=${ROLLS:-20} ./scripts/pytest.sh -s -k test_every_process_is_replaced; }
soak-sched() { ./scripts/vm/soak.sh; }
vopr-planted() {
    cargo run --profile vopr --locked --package slipstream-vopr --features planted -- --planted
}
loom() {
    LOOM_MAX_PREEMPTIONS=3 RUSTFLAGS="--cfg loom" \
        cargo test --release --locked --package slipstream-planes --lib loom --target-dir target/loom
}
asan() { ./scripts/sanitize.sh address "$@"; }
tsan() { ./scripts/sanitize.sh thread "$@"; }
miri() {
    export MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=2
    cargo +nightly miri test --locked --target-dir target/miri \
        --package slipstream-des --package slipstream-kvindex --package slipstream-engine --lib
    cargo +nightly miri test --locked --target-dir target/miri --package slipstream-planes --lib frame
}

bench-live() { build && ./scripts/bench-live.sh; }
bench-pace() { build && ./scripts/bench-pace.py; }
bench-polls() { build && ./scripts/longest-polls.py "$binary"; }
bench-idle() { build && ./scripts/idle-connections.py "$binary"; }
bench-idle-vm() { build && ./scripts/vm/idle.sh "$binary"; }
bench-events() { build && ./scripts/bench-events.sh; }
bench-resume() { ./scripts/resume-cost.sh; }
bench-peer() { build && ./scripts/bench-peer.sh; }
bench-router() { build && ./scripts/bench-router.sh; }
bench-net() { build && ./scripts/bench-net.sh "$binary"; }
bench-twin() { build && ./scripts/bench-twin.sh; }
bench-calibrate() { build && ./scripts/bench-calibrate.sh; }
bench-vllm() { BENCH=1 ./scripts/test-vllm.sh --plot docs/connector-steps.png; }

scx() {
    cargo build --release --locked --manifest-path crates/host/scx/loader/Cargo.toml --target-dir target
}
archive() { ./scripts/package.sh archive; }
chart() { ./scripts/package.sh chart; }

if [ $# = 0 ]; then
    list
    exit
fi
# A name of the table, and no other function or command.
if ! list | grep -qE "^  ([a-z0-9-]+, )*$1(,| )"; then
    echo "error: no chore \`$1\`; scripts/run.sh lists them" >&2
    exit 2
fi
"$@"
