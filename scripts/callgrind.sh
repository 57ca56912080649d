# Sourced by counts of instructions: builds slipstream-hotpaths with the given flags of cargo, and counts by callgrind.
#
#   bin, out   the binary, a scratch folder

hotpaths() { # hotpaths [FLAGS...]
  if ! command -v valgrind >/dev/null; then
    echo "skipped: valgrind is not installed (apt install valgrind)" >&2
    exit 0
  fi
  cargo build --release --locked --quiet --package slipstream-hotpaths "$@"
  bin=${CARGO_TARGET_DIR:-target}/release/slipstream-hotpaths
  out=$(mktemp -d)
  trap 'rm -r "$out"' EXIT
}

count() { # count PATH ROUNDS: "INSTRUCTIONS OPERATIONS"
  valgrind --tool=callgrind --callgrind-out-file=/dev/null "$bin" "$1" "$2" >"$out/operations" 2>"$out/log" ||
    { cat "$out/log" >&2; return 1; }
  printf '%s %s\n' "$(sed -n 's/.*Collected : //p' "$out/log")" "$(cat "$out/operations")"
}
