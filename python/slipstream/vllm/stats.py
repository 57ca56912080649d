"""The connector's counters, for vLLM's log and for Prometheus.

Counts travel as increments, `name` or `name.label`, from the ranks to the process that logs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

METRICS = {
    "saved_blocks": ("Blocks saved to the store.", None),
    "saved_bytes": ("Bytes saved to the store.", None),
    "save_dropped_blocks": ("Blocks not saved because the store was slower than the engine.", None),
    "save_skipped_blocks": ("Blocks not saved because their request was preempted.", None),
    "save_failed_blocks": ("Blocks that the store could not store.", None),
    "loaded_blocks": ("Blocks loaded into the KV cache.", None),
    "loaded_bytes": ("Bytes loaded into the KV cache.", None),
    "hit_blocks": ("Blocks found by tier.", "tier"),
    "evicted_blocks": ("Blocks evicted from a tier.", "tier"),
    "expired_blocks": ("Blocks removed from a tier because of their age.", "tier"),
    "corrupt_blocks": ("Blocks whose checksum or size was wrong, by tier; never served.", "tier"),
    "store_failed_blocks": ("Blocks that a tier could not store.", "tier"),
    "disk_dropped_blocks": ("Blocks not written to disk because it was too slow.", None),
    "load_failed_blocks": ("Blocks that were to be loaded and are recomputed.", "reason"),
    "load_canceled_blocks": ("Blocks not loaded because their request was aborted.", None),
    "load_unexpected_ends": ("Loads that a store ended twice, or too late.", None),
    "fetched_bytes": ("Bytes fetched from peers.", None),
    "served_blocks": ("Blocks sent to peers.", None),
    "served_bytes": ("Bytes sent to peers.", None),
    "peer_malformed": ("Connections ended because of a malformed frame.", None),
    "peer_message_errors": ("Invalid key messages of peers.", None),
    "peer_refused": ("Peers refused because they do not match.", None),
    "peers_found": ("Engines discovered in the folder of peers.", None),
    "peers_left": ("Engines of the folder of peers that were dropped.", None),
    "message_errors": ("Invalid key messages.", None),
    "remote_decodes": (
        "Prompts computed for other engines, by whether their blocks were offered.",
        "outcome",
    ),
    "remote_prefills": ("Prompts computed by other engines, by what was found of them.", "outcome"),
    "lookup_deferred": ("Look-ups deferred because a peer's keys were unknown.", None),
    "log_errors": ("Reads of the whole block pool.", None),
}
"""Name, without `vllm:slipstream_` and `_total`; help text; name of its label."""


@dataclass
class SlipstreamStats(KVConnectorStats):
    """Increments since the last report."""

    data: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Remove all counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of another rank or step."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts, for one line of the log."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class SlipstreamPromMetrics(KVConnectorPromMetrics):
    """The same counts as counters `vllm:slipstream_..._total`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[PrometheusCounter]
        self._counters = {
            name: counter(
                name=f"vllm:slipstream_{name}",
                documentation=text,
                labelnames=[*labelnames, *([label] if label else [])],
            )
            for name, (text, label) in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the increments of one engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            name, _, value = name.partition(".")
            if name in self._counters:
                label = [value] if METRICS[name][1] else []
                self._counters[name].labels(*engine, *label).inc(count)
