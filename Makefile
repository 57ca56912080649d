# Two commands do it all on a fresh machine with Rust, Python >= 3.11 and a C compiler:
#   make demo   a live eight-worker cluster under a real load, KV routing against round robin
#   make test   every test
.PHONY: bench-net demo test build

build:
	cargo build --release --locked

test:
	cargo test --workspace --locked
	./scripts/pytest.sh

demo: build
	./target/release/slipstream --help

# The network benchmarks with events, ns per event, CPU and wall seconds, RSS (docs/benchmarks-net.md).
bench-net:
	cargo build --release --locked -p slipstream-cli
	./scripts/bench-net.sh ./target/release/slipstream

# The CPU scheduler's loader, beside the main binary; needs clang 16 or later, libelf and zlib.
.PHONY: scx test-sched
scx:
	cargo build --release --locked --manifest-path crates/scx/loader/Cargo.toml --target-dir target

# The CPU scheduler on a real kernel in QEMU; skips with the reason where that cannot be had.
test-sched:
	scripts/vm/test-sched.sh
