#!/usr/bin/env bash
# The minimum Rust version of Cargo.toml: no dependency asks for a later one, and that compiler builds the workspace
# if rustup has it, without its tests. Without it clippy's `incompatible_msrv` still refuses newer parts of the standard library.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
for manifest in Cargo.toml crates/host/scx/loader/Cargo.toml fuzz/Cargo.toml; do
    cargo metadata --format-version 1 --locked --manifest-path "$manifest" | python3 -c '
import json, sys

version, manifest = sys.argv[1:]


def number(text):
    return [int(part) for part in (text.split("-")[0] + ".0.0").split(".")[:3]]


late = [
    "{name} {version} takes Rust {rust_version}".format(**package)
    for package in json.load(sys.stdin)["packages"]
    if package["rust_version"] and number(package["rust_version"]) > number(version)
]
if late:
    sys.exit(f"{manifest}: rust-version is {version}, but " + ", ".join(late))
' "$version" "$manifest"
done
installed=$({ rustup toolchain list 2>/dev/null || true; } | sed -n "s/^\(${version}[.0-9]*\)-.*/\1/p" | tail -1)
if [ -z "$installed" ]; then
    echo "note: not built by Rust $version: rustup toolchain install $version --profile minimal" >&2
    exit 0
fi
# In a folder of its own: the two compilers would replace each other's files.
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/msrv cargo "+$installed" check --quiet --workspace --locked
