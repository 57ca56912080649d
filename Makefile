# On a fresh machine with Rust, Python >= 3.11 and a C compiler:
#   make demo   a live eight-worker cluster under load, KV-aware routing against round robin
#   make test   the Rust tests, and the Python tests against the real binary
# Rarer chores (other benchmarks, sanitizers, soak tests): scripts/run.sh lists them.
.PHONY: accuracy bench bench-instructions build deb demo docs fuzz lint release test test-engines test-host test-kv test-net \
  test-vllm vopr wheel

build:
	cargo build --release --locked

# The Python tests run the binary of the Rust tests.
test:
	./scripts/run.sh test-rust
	SLIPSTREAM_BIN=$${CARGO_TARGET_DIR:-target}/debug/slipstream ./scripts/pytest.sh

# One product at a time: the packet network, KV blocks, the CPU scheduler.
test-net:
	cargo test --locked --package slipstream-des --package slipstream-netsim

test-kv:
	cargo test --locked --package slipstream-kvindex --package slipstream-kvstore --package slipstream-kvbench

test-host:
	cargo test --locked --package slipstream-cpusched --package slipstream-scx

# Format, lints, documentation, types, shell scripts, licenses.
lint:
	./scripts/lint.sh

# SHORT=1: a fifth of the requests. TRACE=FILE: replay a trace in Mooncake's format. REQUESTS=N. SPEEDUP=N: time
# compression, however busy the host is.
# The profile builds in two thirds of a release's time.
demo:
	$(if $(SLIPSTREAM_BIN),,cargo build --profile demo --no-default-features --locked)
	$${SLIPSTREAM_BIN:-$${CARGO_TARGET_DIR:-target}/demo/slipstream} demo $(if $(SHORT),--short) $(if $(TRACE),--trace "$(TRACE)") \
	  $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SPEEDUP),--speedup $(SPEEDUP))

# The live path under a seeded simulator, with fresh seeds (docs/reliability.md). VOPR_S=N: seconds; SEED=N: one
# schedule, and its smallest form if it fails.
vopr:
	cargo run --profile vopr --locked --package slipstream-vopr --features sim -- $(if $(SEED),--seed $(SEED),--seconds $(or $(VOPR_S),60) --threads $(or $(THREADS),1))

# Decoders of external input under libFuzzer, a minute each; needs a C++ compiler.
fuzz:
	./scripts/fuzz.sh

# Predictions against measured deployments on held-out folds (docs/accuracy.md). WRITE=1: new profile and tables.
accuracy: build
	./scripts/accuracy.sh

# Instructions per operation of each hot path, against benches/instructions.json. WRITE=1: new record.
bench-instructions:
	./scripts/instructions.sh

# Microbenches of the hot paths.
bench:
	cargo bench --locked --workspace --exclude slipstream-vopr --benches

# The vLLM connector on vLLM's real scheduler, on a CPU; the first run makes an environment of 2 GB.
# VLLM_VERSION=0.32.0: another release than the newest supported one.
test-vllm:
	./scripts/test-vllm.sh

# `serve` in front of two real `vllm serve` that compute on a CPU (docs/engines.md). Environment as above.
test-engines:
	./scripts/test-engines.sh

# Packages, in target/package (docs/install.md). wheel: the Python module and the command; takes maturin. deb: takes
# cargo-deb. release: both, an archive with a static binary, the chart, a list of components and checksums, from a clean
# checkout.
wheel: build
	./scripts/package.sh wheel

deb: build
	./scripts/package.sh deb

release:
	./scripts/package.sh release

# The pages of docs/ as a site with search, in target/site; takes mdbook (cargo install mdbook).
docs:
	./scripts/docs.sh

# Every code block of the documents, and their outputs (scripts/docs_outputs.py): some minutes. WRITE=1: new outputs.
.PHONY: docs-test
docs-test: build
	./scripts/venv.sh
	VIRTUAL_ENV=$(CURDIR)/.venv .venv/bin/maturin develop --quiet
	SLIPSTREAM_BIN=$${CARGO_TARGET_DIR:-target}/release/slipstream .venv/bin/python scripts/docs_outputs.py $(if $(WRITE),--write)
