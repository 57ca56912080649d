#!/usr/bin/env bash
# Compares completion times with ns-3 (PyPI wheel `ns3`, installed into .cache/ns3 at the first run;
# needs Python 3.9 to 3.13 and g++). Usage: test.sh [SLIPSTREAM]
#
# Only the wheel's headers and libraries are used. What it depends on is for Python programs, and
# cppyy among that is built from source in many minutes, so it is left out.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=${1:-./target/release/slipstream}
venv=${NS3_VENV:-.cache/ns3}
find='import importlib.util as u; raise SystemExit(u.find_spec("ns3") is None)'
if ! "$venv/bin/python" -c "$find" 2>/dev/null; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --no-deps 'ns3==3.44.*'
fi
ns3=$("$venv/bin/python" -c 'import importlib.util, os
print(os.path.dirname(importlib.util.find_spec("ns3").origin or next(iter(importlib.util.find_spec("ns3").submodule_search_locations)) + "/x"))')
reference=$venv/reference
if [ ! "$reference" -nt scripts/ns3/reference.cc ]; then
  libraries=()
  for name in applications internet network core point-to-point traffic-control stats bridge mobility antenna spectrum propagation; do
    for file in "$ns3"/lib64/libns3*-"$name".so; do libraries+=("$file"); done
  done
  g++ -std=c++20 -O1 -I"$ns3/include" scripts/ns3/reference.cc -o "$reference" \
    "${libraries[@]}" -Wl,-rpath,"$ns3/lib64"
fi
"$venv/bin/python" scripts/ns3/compare.py "$bin" "$reference"
