#!/usr/bin/env bash
# Boot the test kernel and run one shell script inside as root; its output is this script's output.
#
#   scripts/vm/run.sh JOB.sh [PROGRAM...]     # programs land in the guest's /bin, with their libraries
#
#   SMP=4         any value of QEMU's -smp; two LLCs: SMP=8,sockets=2,cores=4,threads=1
#   MEM=1024      MiB
#   NUMA=1        two nodes, halves of 8 CPUs
#   TIMEOUT=600   seconds for the whole VM
#   FILES="a b"   files for the guest's /files
#   JOB_ARGS=     arguments of the job
#
# Exit status: that of the job; 97 when it was never seen to end, 124 on time-out.
#
# The guest's clock counts instructions (-icount shift=0: 1 instruction = 1 ns) and its CPUs take
# turns on one thread, so the latencies it measures are path lengths and do not depend on what
# else the host is doing.
set -euo pipefail
job=$(readlink -f "${1:?usage: run.sh JOB.sh [PROGRAM...]}"); shift
programs=(); for p in "$@"; do programs+=("$(readlink -f "$p")"); done
files=(); for f in ${FILES:-}; do files+=("$(readlink -f "$f")"); done
cd "$(dirname "$0")/../.."
. scripts/vm/common.sh
[ -f "$VM/kernel/release" ] && [ -x "$VM/qemu/run" ] && [ -x "$VM/busybox" ] || die "run scripts/vm/setup.sh first"

tmp=$(mktemp -d "${TMPDIR:-/tmp}/slipstream-vm.XXXXXX"); trap 'rm -rf "$tmp"' EXIT
root=$tmp/root
mkdir -p "$root"/{bin,sbin,proc,sys,dev,tmp,run,root,etc,boot,files,lib,lib64,usr/lib}
cp "$VM/busybox" "$root/bin/busybox"
for applet in $("$VM/busybox" --list); do
  [ "$applet" = busybox ] || ln -sf busybox "$root/bin/$applet"
done
for p in "${programs[@]}"; do
  cp -L "$p" "$root/bin/"; strip "$root/bin/$(basename "$p")" 2>/dev/null || true
  { ldd "$p" 2>/dev/null || true; } | { grep -oE '/[^ ]+' || true; } | while read -r library; do
    [ -e "$root$library" ] || { mkdir -p "$root$(dirname "$library")"; cp -L "$library" "$root$library"; }
  done
done
for f in "${files[@]}"; do cp -L "$f" "$root/files/"; done
cp "$job" "$root/job.sh"; chmod +x "$root/job.sh"
echo "${JOB_ARGS:-}" > "$root/job.args"
# libbpf reads the kernel's configuration there for __kconfig variables.
cp "$VM/kernel/config" "$root/boot/config-$(cat "$VM/kernel/release")"
echo 'root:x:0:0:root:/root:/bin/sh' > "$root/etc/passwd"
cat > "$root/init" <<'I'
#!/bin/sh
export PATH=/bin:/sbin HOME=/root
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev
mkdir -p /dev/shm; mount -t tmpfs none /dev/shm; mount -t tmpfs none /tmp; mount -t tmpfs none /run
mount -t bpf none /sys/fs/bpf; mount -t cgroup2 none /sys/fs/cgroup
ip link set lo up
/job.sh $(cat /job.args)
echo "@@EXIT $?"
sync; poweroff -f
I
chmod +x "$root/init"
(cd "$root" && find . -print0 | cpio --null -o -H newc --quiet -R 0:0 | gzip -1) > "$tmp/initrd"

numa=()
if [ -n "${NUMA:-}" ]; then
  half=$((${MEM:-1024} / 2))
  for node in 0 1; do
    numa+=(-object "memory-backend-ram,id=m$node,size=${half}M"
      -numa "node,memdev=m$node,cpus=$((node * 4))-$((node * 4 + 3))")
  done
fi

set +e
timeout --foreground "${TIMEOUT:-600}" "$VM/qemu/run" \
  -accel tcg,thread=single,tb-size=256 -icount shift=0,sleep=off -cpu max \
  -smp "${SMP:-4}" -m "${MEM:-1024}" "${numa[@]}" -nodefaults -display none -serial stdio -no-reboot \
  -kernel "$VM/kernel/vmlinuz" -initrd "$tmp/initrd" \
  -append "console=ttyS0 panic=-1 quiet loglevel=4 mitigations=off nokaslr tsc=reliable ${APPEND:-}" \
  < /dev/null | stdbuf -o0 tr -d '\r' | tee "$tmp/log"
rc=${PIPESTATUS[0]}
set -e
[ "$rc" != 124 ] || exit 124
code=$(sed -n 's/^@@EXIT \([0-9]*\).*/\1/p' "$tmp/log" | tail -1)
exit "${code:-97}"
