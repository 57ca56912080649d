#!/usr/bin/env bash
# Scores predictions against measured deployments: fits on folds, predicts what was left out, and
# prints one table. With WRITE=1 also replaces the profile of the tree and the tables of docs/accuracy.md.
set -euo pipefail
cd "$(dirname "$0")/.."
data="${SLIPSTREAM_DATA:-../shared/data}/accuracy"
if [ ! -r "$data/silicon_points.csv" ] || [ ! -r "$data/silicon_judgeable.csv" ]; then
    echo "skipped: no silicon_points.csv and silicon_judgeable.csv in $data (set SLIPSTREAM_DATA)"
    exit 0
fi
slipstream="${SLIPSTREAM:-target/release/slipstream}"
out="${OUT:-target/accuracy}"
mkdir -p "$out"
"$slipstream" calibrate --from-points "$data/silicon_points.csv" --only "$data/silicon_judgeable.csv" \
    --out "$out/profile.csv" --report "$out/report.md"
"$slipstream" predict "$data/silicon_points.csv" --out "$out/predicted.csv"
cat "$out/report.md"
awk -F, 'NR > 1 { rows++; if ($2 != "") answered++ }
    END { printf "\nAnswered: %d of %d rows.\n", answered, rows }' "$out/predicted.csv"
if [ "${WRITE:-}" = 1 ]; then
    cp "$out/profile.csv" crates/model/perf/data/profile.csv
    awk -v report="$out/report.md" '
        /<!-- end of errors -->/ { skip = 0 }
        !skip { print }
        /<!-- errors: / { skip = 1; print ""; while ((getline line < report) > 0) print line; print "" }
    ' docs/accuracy.md > "$out/accuracy.md"
    cp "$out/accuracy.md" docs/accuracy.md
fi
