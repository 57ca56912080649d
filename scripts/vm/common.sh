# Settings of the VM scripts. Sourced from the repository root, not run.
VM=${SLIPSTREAM_VM_DIR:-$PWD/.cache/vm} # kernel, QEMU, busybox and images; safe to delete
need_packages=()
skip() { echo "vm: SKIPPED: $*" >&2; exit 3; }
die() { echo "vm: error: $*" >&2; exit 1; }
