#!/usr/bin/env bash
# The Helm chart: lint, its output against packaging/helm/golden, Kubernetes' schemas by kubeconform, and the cluster files
# in it by the command. Skips without helm.
#   scripts/test-chart.sh [--write]      --write: new golden files
# HELM, KUBECONFORM and SLIPSTREAM_BIN name the tools if they are not on PATH. Kubeconform fetches the schemas; it is
# left out if it is missing or there is no network.
set -euo pipefail
cd "$(dirname "$0")/.."
helm=${HELM:-helm}
chart=packaging/helm/slipstream
golden=packaging/helm/golden
if ! command -v "$helm" >/dev/null; then
  echo "skipped: helm is not installed" >&2
  exit 0
fi
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
if [ "$(grep -cxE "(version: $version|appVersion: \"$version\")" "$chart/Chart.yaml")" != 2 ]; then
  echo "error: $chart/Chart.yaml does not have the version $version of Cargo.toml" >&2
  exit 1
fi
"$helm" lint --strict --quiet "$chart"

render() { # render NAME [flags of helm template]
  "$helm" template demo "$chart" --namespace llm --kube-version 1.30.0 "${@:2}" >"$out/$1.yaml"
}
render default
render own-engines --set engines.enabled=false --set router.selector=kubernetes.io/service-name=vllm \
  --set router.port=8080 --set router.apiKeysSecret=keys --set networkPolicy.enginePods.app=vllm --set-string router.config='[router]
policy = "kv"'
render sweep --set router.enabled=false --set engines.enabled=false --set sweep.enabled=true \
  --set-file sweep.workload=examples/chat.workload.toml
render monitoring --set monitoring.serviceMonitor.enabled=true --set monitoring.serviceMonitor.labels.release=prometheus \
  --set monitoring.rules.enabled=true --show-only templates/monitoring.yaml
# Dashboards are in it as they are in the chart.
render dashboards --set monitoring.dashboards.enabled=true --show-only templates/monitoring.yaml
for dashboard in "$chart"/files/dashboards/*.json; do
  awk -v name="$(basename "$dashboard")" '
    /^  [^ ]/ { inside = ($1 == "slipstream-" name ":" || $1 == name ":"); next }
    /^[^ ]/ { inside = 0 }
    inside { sub(/^    /, ""); print }' "$out/dashboards.yaml" | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}' | diff - "$dashboard"
done

# Values that contradict each other are refused with the remedy.
if render refused --set engines.enabled=false 2>"$out/error"; then
  echo "error: a router without engines was rendered" >&2
  exit 1
fi
grep -q 'set router.selector' "$out/error"

# So are names that the chart does not have, and values of another type.
for value in engines.replica=3 router.service.port=http engines.terminationGracePeriodSeconds=5; do
  if render refused --set "$value" 2>"$out/error"; then
    echo "error: --set $value was rendered" >&2
    exit 1
  fi
  name=${value%%=*}
  grep -q "${name##*.}" "$out/error"
done

for file in default own-engines sweep monitoring; do
  if [ "${1:-}" = --write ]; then
    mkdir -p "$golden"
    cp "$out/$file.yaml" "$golden/"
  fi
  diff -u "$golden/$file.yaml" "$out/$file.yaml"
done

if [ -n "${SLIPSTREAM_BIN:-}" ]; then
  # The text under `cluster.toml: |`, without its indentation.
  for file in default own-engines sweep; do
    awk -v out="$out/$file" '
      /^  cluster.toml: \|/ { name = out "-" ++count ".toml"; next }
      name && /^    |^$/ { print substr($0, 5) > name; next }
      { name = "" }' "$out/$file.yaml"
    for cluster in "$out/$file"-*.toml; do
      "$SLIPSTREAM_BIN" serve "$cluster" --print-config >"$out/printed"
    done
  done
fi

kubeconform=${KUBECONFORM:-kubeconform}
if command -v "$kubeconform" >/dev/null; then
  status=0
  "$kubeconform" -strict -skip ServiceMonitor,PrometheusRule -summary -kubernetes-version 1.30.0 "$out"/{default,own-engines,sweep,monitoring}.yaml \
    >"$out/schemas" 2>&1 || status=$?
  if grep -q 'failed downloading schema' "$out/schemas"; then
    echo "note: without Kubernetes' schemas, because they cannot be fetched" >&2
  else
    cat "$out/schemas"
    [ "$status" = 0 ] || exit "$status"
  fi
else
  echo "note: without Kubernetes' schemas, because kubeconform is not installed" >&2
fi
echo "the chart renders as in $golden"
