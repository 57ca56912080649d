#!/usr/bin/env bash
# Builds what a release consists of, in target/package; the first three from a binary that `make build` has made:
#   scripts/package.sh files    manual pages and completion scripts
#   scripts/package.sh wheel    Python wheel: the vLLM connector, and the command (needs maturin)
#   scripts/package.sh deb      Debian package (needs cargo-deb)
#   scripts/package.sh archive  a .tar.gz per target of TARGETS (default: musl of this machine, a static binary)
#   scripts/package.sh chart    Helm chart (needs helm)
#   scripts/package.sh release  all of them with the binary, a list of components and checksums
# MATURIN, CARGO_DEB and HELM name the tools if they are not on PATH. Times in packages are those of the commit, and no path
# of this machine is in a binary that `archive` and `release` build.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
bin=${SLIPSTREAM_BIN:-$target/release/slipstream}
out=target/package
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || stat --format=%Y Cargo.toml)
fi
export SOURCE_DATE_EPOCH

# Paths of this machine, which panics and C's __FILE__ would show otherwise.
remap="--remap-path-prefix=$PWD=/slipstream --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
remap_c="-ffile-prefix-map=$PWD=/slipstream -ffile-prefix-map=${CARGO_HOME:-$HOME/.cargo}=/cargo"

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

# A binary for one target, by the profile `dist`, into an archive with manual pages, completions and examples.
archive_of() {
  local triple=$1 variable root name
  if ! rustc --target "$triple" --print target-libdir | xargs test -d; then
    echo "error: Rust's standard library for $triple is not installed; rustup target add $triple" >&2
    exit 2
  fi
  variable=${triple//-/_}
  local -a compilers=()
  case $triple in
  "$(uname -m)"-*-musl)
    require musl-gcc "apt install musl-tools"
    compilers=("CC_$variable=musl-gcc")
    ;;
  "$(uname -m)"-*) ;;
  *-gnu)
    # Debian's cross compilers, such as gcc-aarch64-linux-gnu.
    local prefix=${triple/-unknown/}
    require "$prefix-gcc" "apt install gcc-$prefix libc6-dev-${prefix%%-*}-cross"
    compilers=("CC_$variable=$prefix-gcc" "CARGO_TARGET_${variable^^}_LINKER=$prefix-gcc")
    ;;
  *)
    echo "error: there is no rule for the C compiler of $triple" >&2
    exit 2
    ;;
  esac
  env "${compilers[@]}" RUSTFLAGS="$remap ${RUSTFLAGS:-}" CFLAGS="$remap_c ${CFLAGS:-}" \
    cargo build --profile dist --locked --package slipstream-cli --target "$triple"
  name=slipstream-$version-${triple/-unknown/}
  root=$out/archive/$name
  rm -rf "$out/archive"
  mkdir -p "$root"
  install -m 755 "$target/$triple/dist/slipstream" "$root/"
  cp LICENSE README.md "$root/"
  cp -R examples "$root/"
  if [ -d "$out/man1" ]; then
    cp -R "$out/man1" "$out"/slipstream.{bash,fish} "$out/_slipstream" "$root/"
  fi
  tar --create --directory "$out/archive" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 \
    --numeric-owner --mode=go=rX,u+rw,a-s "$name" | gzip -9n >"$out/$name.tar.gz"
  rm -rf "$out/archive"
}

archive() {
  local triple
  mkdir -p "$out"
  for triple in ${TARGETS:-$(uname -m)-unknown-linux-musl}; do
    archive_of "$triple"
  done
}

chart() {
  local helm=${HELM:-helm}
  require "$helm" "see https://helm.sh, or name it by HELM"
  mkdir -p "$out"
  "$helm" lint --strict packaging/helm/slipstream
  # As `helm package`, which writes the present time into it.
  tar --create --directory packaging/helm --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 \
    --numeric-owner --mode=go=rX,u+rw,a-s slipstream | gzip -9n >"$out/slipstream-$version.tgz"
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
  export RUSTFLAGS="$remap ${RUSTFLAGS:-}" CFLAGS="$remap_c ${CFLAGS:-}"
  cargo build --release --locked --package slipstream-cli
  files
  wheel
  deb
  sbom
  archive
  if command -v "${HELM:-helm}" >/dev/null; then
    chart
  else
    echo "note: without the Helm chart, because helm is not installed" >&2
  fi
  (cd "$out" && find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%P\0' |
    LC_ALL=C sort -z | xargs -0 sha256sum >SHA256SUMS)
  cat "$out/SHA256SUMS"
}

case ${1:-} in
files | wheel | deb | archive | chart | sbom | release) "$1" ;;
*)
  sed -n '2,11s/^# \?//p' "$0" >&2
  exit 2
  ;;
esac
