#!/usr/bin/env bash
# `scripts/run.sh soak-sched`: the CPU scheduler under workers, pipes, hogs, changing masks and weights, forks and
# real-time bursts, on 4 CPUs and on 8 in two LLCs.
#
#   SEEDS="1 2 3"   one virtual machine each (default 1 to 10)
#   SECONDS_EACH=60 virtual seconds
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/vm/common.sh
scripts/vm/setup.sh
scripts/run.sh scx
scripts/vm/build-load.sh
rc=0
for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
  for smp in 4 8,sockets=2,cores=4,threads=1; do
    echo "== seed $seed, SMP=$smp"
    JOB_ARGS="${SECONDS_EACH:-60} $seed" SMP=$smp TIMEOUT=${TIMEOUT:-1800} \
      scripts/vm/run.sh scripts/vm/job-soak.sh target/release/slipstream-scx "$VM/load" ||
      { rc=1; echo "FAIL seed $seed, SMP=$smp"; }
  done
done
[ $rc = 0 ] && echo "soak-sched: passed"
exit $rc
