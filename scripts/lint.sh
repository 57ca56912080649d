#!/usr/bin/env bash
# Checks what a compiler or a test does not: format, lints, documentation, types of the Python code,
# shell scripts, licenses and sources of dependencies, and that the fuzz targets build.
set -euo pipefail
cd "$(dirname "$0")/.."

# Tables of benchmarks are those of the data.
scripts/benchmarks.py --check
scripts/venv.sh
.venv/bin/ruff check python
.venv/bin/ruff format --check python scripts
.venv/bin/mypy
# Templates are no shell until they are rendered; tests run what they render.
git ls-files -z ':!*.jinja' | xargs -0 grep -lZE '^#!.*(bash|sh)$' |
    xargs -0 .venv/bin/shellcheck --external-sources --source-path SCRIPTDIR --severity warning

cargo fmt --all --check
cargo clippy --workspace --all-targets --locked -- -D warnings
RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --locked
# In the same folder: its dependencies are those of the workspace.
cargo check --quiet --manifest-path fuzz/Cargo.toml --locked --target-dir "${CARGO_TARGET_DIR:-target}"
scripts/msrv.sh
if cargo deny --version >/dev/null 2>&1; then
    for manifest in Cargo.toml crates/host/scx/loader/Cargo.toml fuzz/Cargo.toml; do
        cargo deny --log-level error --manifest-path "$manifest" check bans licenses sources
    done
    # The database of advisories is fetched; without a network the rest is still checked.
    if cargo deny --log-level error fetch db; then
        for manifest in Cargo.toml crates/host/scx/loader/Cargo.toml fuzz/Cargo.toml; do
            cargo deny --log-level error --manifest-path "$manifest" check --disable-fetch advisories
        done
    else
        echo "note: dependencies are not checked against advisories: the database cannot be fetched" >&2
    fi
else
    echo "note: licenses and sources of dependencies are not checked: cargo install cargo-deny" >&2
fi
