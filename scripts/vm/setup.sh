#!/usr/bin/env bash
# Fetch what the scheduler's virtual machine needs, without installing it on the system: a Debian
# kernel with sched_ext, QEMU 10 and a static busybox, all unpacked below .cache/vm.
#
#   scripts/vm/setup.sh          # idempotent; a few seconds once the packages are there
#
# Exit 0 ready, 3 cannot be had here (the reason is printed; the caller skips), 1 an error of ours.
#
# Why these: Debian's own 6.12 kernels lack CONFIG_SCHED_CLASS_EXT; the 7.2.12 cloud kernel's BTF
# shows hidden arguments of the scx kfuncs, so no scheduler loads on it; QEMU 7.2 now and then runs
# half-patched code of a multi-processor guest (`Oops: int3`), which 10 does not.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/vm/common.sh
mkdir -p "$VM"

command -v apt-get >/dev/null || skip "the packages come from Debian's archive and this machine has no apt-get"
command -v dpkg >/dev/null || skip "dpkg is missing"
[ "$(uname -m)" = x86_64 ] || skip "the test kernel is for x86-64"
for tool in cpio gzip tar; do
  command -v "$tool" >/dev/null || need_packages+=("$tool")
done
if [ ${#need_packages[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || skip "missing: ${need_packages[*]}; install them (as root: apt-get install ${need_packages[*]})"
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${need_packages[@]}" >/dev/null ||
    skip "apt-get could not install ${need_packages[*]}"
fi

key=/usr/share/keyrings/debian-archive-keyring.gpg
[ -f "$key" ] || skip "$key is missing (package debian-archive-keyring)"

# private_apt SUITE... -- ARGS: apt with lists, cache and sources of its own below $VM. The archive
# is the one that the system is already set up with.
private_apt() {
  local state=$VM/apt-$1
  local opts=(-oDir::Etc::SourceList="$state/sources.list" -oDir::Etc::SourceParts=/dev/null
    -oDir::State::Lists="$state/lists" -oDir::Cache="$state/cache" -oAPT::Default-Release=
    -oAPT::Sandbox::User=root -oDebug::NoLocking=1 -oAcquire::Retries=3)
  "${@:2:1}" "${opts[@]}" "${@:3}"
}
add_suite() { # NAME SUITE...
  local state=$VM/apt-$1 site suite
  mkdir -p "$state"/{lists/partial,cache/archives/partial}
  site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | grep -E '/debian/?$' | sort -u | head -1 || true)
  : > "$state/sources.list"
  for suite in "${@:2}"; do
    echo "deb [signed-by=$key] ${site:-http://deb.debian.org/debian} $suite main" >> "$state/sources.list"
  done
  private_apt "$1" apt-get -qq update || skip "the Debian archive cannot be reached"
}

if [ ! -f "$VM/kernel/release" ]; then
  add_suite kernel trixie-backports
  # The newest 6.18 that downloads; the archive lists some releases whose files are gone.
  mapfile -t images < <(private_apt kernel apt-cache search -n '^linux-image-6\.18.*-cloud-amd64$' | sed 's/ .*//' | sort -rV)
  [ ${#images[@]} -gt 0 ] || skip "no 6.18 cloud kernel in trixie-backports any more"
  for image in "${images[@]}"; do
    rm -rf "$VM/kernel.new" "$VM/deb"; mkdir -p "$VM/kernel.new" "$VM/deb"
    (cd "$VM/deb" && private_apt kernel apt-get -qq download "$image") || continue
    dpkg -x "$VM"/deb/*.deb "$VM/kernel.new"
    release=${image#linux-image-}
    config=$VM/kernel.new/boot/config-$release
    grep -q '^CONFIG_SCHED_CLASS_EXT=y' "$config" || { echo "$release has no sched_ext"; continue; }
    rm -rf "$VM/kernel"; mkdir "$VM/kernel"
    cp "$VM/kernel.new/boot/vmlinuz-$release" "$VM/kernel/vmlinuz"
    cp "$config" "$VM/kernel/config"
    echo "$release" > "$VM/kernel/release"
    break
  done
  rm -rf "$VM/kernel.new" "$VM/deb"
  [ -f "$VM/kernel/release" ] || skip "no 6.18 cloud kernel could be downloaded"
fi

qemu_version() { "$@" --version 2>/dev/null | sed -n 's/.*version \([0-9]*\).*/\1/p' | head -1; }
if [ ! -x "$VM/qemu/run" ]; then
  system=$(command -v qemu-system-x86_64 || true)
  if [ -n "$system" ] && [ "$(qemu_version "$system")" -ge 10 ]; then
    mkdir -p "$VM/qemu"
    printf '#!/bin/sh\nexec %s "$@"\n' "$system" > "$VM/qemu/run"
  else
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    case $codename in
      bookworm) add_suite qemu bookworm bookworm-backports; target=(-t bookworm-backports) ;;
      trixie) add_suite qemu trixie; target=() ;;
      *) skip "QEMU 10 or later is needed; install qemu-system-x86 (this is ${codename:-an unknown system}, not Debian 12 or 13)" ;;
    esac
    # Resolve and download against the system's installed packages, but unpack below .cache.
    private_apt qemu apt-get -qq --download-only -y --no-install-recommends "${target[@]}" install \
      qemu-system-x86 seabios || skip "QEMU 10 could not be downloaded"
    rm -rf "$VM/qemu"; mkdir -p "$VM/qemu/root"
    for deb in "$VM"/apt-qemu/cache/archives/*.deb; do dpkg -x "$deb" "$VM/qemu/root"; done
    cat > "$VM/qemu/run" <<'R'
#!/bin/sh
# QEMU as unpacked from its packages; it finds its libraries and firmware beside itself.
root=$(dirname "$(readlink -f "$0")")/root
export LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR=$root/usr/lib/x86_64-linux-gnu/qemu
exec "$root/usr/bin/qemu-system-x86_64" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" -L "$root/usr/lib/ipxe/qemu" "$@"
R
  fi
  chmod +x "$VM/qemu/run"
  version=$(qemu_version "$VM/qemu/run" || true)
  [ -n "$version" ] && [ "$version" -ge 10 ] || { rm -rf "$VM/qemu"; skip "the unpacked QEMU does not run (version '${version:-none}')"; }
fi

if [ ! -x "$VM/busybox" ]; then
  add_suite tools "$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")"
  mkdir -p "$VM/deb"
  (cd "$VM/deb" && private_apt tools apt-get -qq download busybox-static) || skip "busybox-static could not be downloaded"
  dpkg -x "$VM"/deb/busybox-static_*.deb "$VM/deb/root"
  find "$VM/deb/root" -type f -name busybox -exec install -m 755 {} "$VM/busybox" \;
  rm -rf "$VM/deb"
  [ -x "$VM/busybox" ] || skip "no busybox in the package busybox-static"
fi
echo "vm: kernel $(cat "$VM/kernel/release"), QEMU $(qemu_version "$VM/qemu/run"), below $VM"
