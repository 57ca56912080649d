#!/usr/bin/env bash
# Builds what a release consists of, in target/package, from a binary that `make build` has made:
#   scripts/package.sh files    manual pages and completion scripts
#   scripts/package.sh wheel    Python wheel: the vLLM connector, and the command (needs maturin)
#   scripts/package.sh deb      Debian package (needs cargo-deb)
#   scripts/package.sh release  all of them with the binary, a list of components and checksums
# MATURIN, CARGO_DEB and CARGO_SBOM name the tools if they are not on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
bin=${SLIPSTREAM_BIN:-$target/release/slipstream}
out=target/package

require() {
  if ! command -v "$1" >/dev/null; then
    echo "error: $1 is not installed; $2" >&2
    exit 2
  fi
}

files() {
  require "$bin" "run make build"
  mkdir -p "$out"
  rm -rf "$out/man1"
  "$bin" man "$out/man1"
  "$bin" completions bash >"$out/slipstream.bash"
  "$bin" completions zsh >"$out/_slipstream"
  "$bin" completions fish >"$out/slipstream.fish"
}

# Least version of glibc that a file's symbols need, such as 2.34.
glibc() {
  objdump -T "$@" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1 | cut -d_ -f2
}

# maturin puts slipstream._native.data/scripts into the wheel, from where pip installs the command.
wheel() {
  local maturin=${MATURIN:-maturin} version
  require "$maturin" "pip install maturin, or name it by MATURIN"
  require "$bin" "run make build"
  require objdump "apt install binutils"
  trap 'rm -rf slipstream._native.data' EXIT
  mkdir -p slipstream._native.data/scripts
  install -m 755 "$bin" slipstream._native.data/scripts/slipstream
  version=$(glibc "$bin")
  # maturin checks the extension against the tag; the command's needs are those of `version`.
  "$maturin" build --release --locked --out "$out" --compatibility "manylinux_${version/./_}"
  rm -rf slipstream._native.data
}

deb() {
  local deb=${CARGO_DEB:-cargo-deb}
  require "$deb" "cargo install cargo-deb, or name it by CARGO_DEB"
  files
  "$deb" deb --no-build --no-strip --package slipstream-cli --output "$out/"
}

# Names, versions and licenses of what the binary is linked from, as CycloneDX.
sbom() {
  python3 scripts/sbom.py >"$out/slipstream.cdx.json"
}

release() {
  # A file of an earlier version must not get into the list of checksums.
  rm -rf "$out"
  files
  wheel
  deb
  sbom
  install -m 755 "$bin" "$out/slipstream"
  (cd "$out" && find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%P\0' |
    LC_ALL=C sort -z | xargs -0 sha256sum >SHA256SUMS)
  cat "$out/SHA256SUMS"
}

case ${1:-} in
files | wheel | deb | sbom | release) "$1" ;;
*)
  sed -n '2,8s/^# \?//p' "$0" >&2
  exit 2
  ;;
esac
