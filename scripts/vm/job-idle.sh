#!/bin/sh
# Runs inside the VM (scripts/vm/idle.sh): resident memory of `slipstream serve` per idle connection.
# Arguments: CONNECTIONS. Cases are files: /files/NAME.sent, /files/NAME.expected.
# shellcheck disable=SC3045  # the shell of the VM has it
count=$1
ulimit -n 200000
# The kernel reserves memory for sockets by the machine's; a test of memory should not end at it.
echo 1000000 1000000 1000000 > /proc/sys/net/ipv4/tcp_mem
resident() { awk '/^VmRSS/ { print $2 }' "/proc/$1/status"; }
: > /tmp/none
measure() { # NAME each|together
  slipstream serve --listen=127.0.0.1:8000 --speedup=0 --set=model.name=m --set=live.shards=2 \
    --set=live.client_connections_max="$count" --set=live.connections_max=$((2 * count)) \
    --set=live.read_timeout_s=36000 --set=live.idle_timeout_s=36000 > /tmp/out 2>&1 &
  server=$!
  i=0
  until grep -q 'listening on' /tmp/out; do
    i=$((i + 1)); [ $i -lt 300 ] || { cat /tmp/out; exit 1; }
    usleep 100000
  done
  # What every server allocates at its first requests is not a connection's.
  hold 8000 64 each /files/request.sent /files/request.expected < /dev/null > /dev/null || exit 1
  before=$(resident $server)
  rm -f /tmp/end /tmp/held; mkfifo /tmp/end
  hold 8000 "$count" "$2" "/files/$1.sent" "/files/$1.expected" < /tmp/end > /tmp/held &
  holder=$!
  exec 9> /tmp/end
  until [ -s /tmp/held ]; do
    kill -0 $holder 2> /dev/null || { tail -3 /tmp/out; exit 1; }
    usleep 200000
  done
  sleep 3 # idle connections give back their buffers
  open=$(find "/proc/$server/fd" -type l | wc -l)
  [ "$open" -ge "$count" ] || { echo "only $open files are open: the server closed connections"; exit 1; }
  echo "$1 $2 $count $(( ($(resident $server) - before) * 1024 / count )) bytes"
  exec 9>&-
  wait $holder
  kill $server; wait $server 2> /dev/null
}
measure silent each
measure request each
measure request together
measure silent2 each
measure request2 each
