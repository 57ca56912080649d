#!/usr/bin/env bash
# `scripts/run.sh test-sched`: build the BPF scheduler and try it on a real kernel in QEMU, 4 CPUs first, then
# 8 with two sockets, then the loader as something that is left running. Skips (exit 0), with the reason, where the tools to build it or the parts of
# the virtual machine cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/vm/common.sh
skipped() { echo "test-sched: SKIPPED: $*" >&2; exit 0; }
[ "$(uname -sm)" = "Linux x86_64" ] || skipped "the test kernel is for x86-64 Linux"
missing=()
command -v clang-19 >/dev/null || command -v clang >/dev/null || missing+=(clang-19 llvm-19)
[ -f /usr/include/libelf.h ] || missing+=(libelf-dev)
[ -f /usr/include/zlib.h ] || missing+=(zlib1g-dev)
command -v pkg-config >/dev/null || missing+=(pkg-config)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || ! { apt-get -qq update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null; }; then
    skipped "to build the BPF program, install ${missing[*]}"
  fi
fi
rc=0; scripts/vm/setup.sh || rc=$?
[ $rc != 3 ] || skipped "no virtual machine, see above"
[ $rc = 0 ] || exit $rc
cargo fetch --locked --quiet --manifest-path crates/host/scx/loader/Cargo.toml ||
  skipped "the crates of crates/host/scx/loader cannot be downloaded"
scripts/run.sh scx
cargo build --release --locked
# Among them: the decision as BPF, run by this kernel, against the native build.
cargo test --quiet --release --locked --manifest-path crates/host/scx/loader/Cargo.toml --target-dir target
scripts/vm/build-load.sh
programs=(target/release/slipstream-scx target/release/slipstream "$VM/load")
start=$SECONDS
# Two at once; the clocks inside count instructions and do not feel each other.
second=$(mktemp); third=$(mktemp); trap 'rm -f "$second" "$third"' EXIT
{
  rc=0
  SMP=8,sockets=2,cores=2,threads=2 NUMA=1 \
    scripts/vm/run.sh scripts/vm/job-topology.sh "${programs[@]}" > "$second" 2>&1 || rc=$?
  SMP=2 FILES=crates/host/cpusched/bpf/intf.h \
    scripts/vm/run.sh scripts/vm/job-ops.sh "${programs[@]}" > "$third" 2>&1 || rc=$?
  exit $rc
} & others=$!
echo "== 4 CPUs"
rc=0
SMP=4 scripts/vm/run.sh scripts/vm/job-sched.sh "${programs[@]}" || rc=$?
wait $others || rc=$?
echo "== 8 CPUs, 2 sockets (LLCs and NUMA nodes) of 2 cores with 2 threads"
cat "$second"
echo "== the loader as a service"
cat "$third"
[ $rc = 0 ] || { echo "test-sched: FAILED ($rc), see above" >&2; exit $rc; }
echo "test-sched: passed, $((SECONDS - start)) s in the virtual machines"
