"""What the connector counts, for vLLM's log and for Prometheus.

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
    "saved_blocks": ("Blocks taken into the store.", None),
    "saved_bytes": ("Bytes taken into the store.", None),
    "save_dropped_blocks": ("Blocks not saved because the store was slower than the engine.", None),
    "save_skipped_blocks": ("Blocks not saved because their request was preempted.", None),
    "save_failed_blocks": ("Blocks that the store could not take.", None),
    "loaded_blocks": ("Blocks loaded into the KV cache.", None),
    "loaded_bytes": ("Bytes loaded into the KV cache.", None),
    "hit_blocks": ("Blocks found by tier.", "tier"),
    "evicted_blocks": ("Blocks that a tier gave up for others.", "tier"),
    "expired_blocks": ("Blocks that a tier gave up because of their age.", "tier"),
    "corrupt_blocks": ("Blocks whose checksum or size was wrong, by tier; never served.", "tier"),
    "store_failed_blocks": ("Blocks that a tier could not take.", "tier"),
    "disk_dropped_blocks": ("Blocks not written to disk because it was too slow.", None),
    "load_failed_blocks": ("Blocks that were to be loaded and are recomputed.", "reason"),
    "load_canceled_blocks": ("Blocks not loaded because their request was aborted.", None),
    "load_unexpected_ends": ("Loads that a store ended twice, or too late.", None),
    "fetched_bytes": ("Bytes fetched from peers.", None),
    "served_blocks": ("Blocks given to peers.", None),
    "served_bytes": ("Bytes given to peers.", None),
    "peer_malformed": ("Connections ended because what came was no frame.", None),
    "peer_message_errors": ("Messages of peers about keys that could not be used.", None),
    "peer_refused": ("Peers refused because they do not match.", None),
    "peers_found": ("Engines that came to the folder of peers.", None),
    "peers_left": ("Engines of the folder of peers that were let go.", None),
    "message_errors": ("Messages about keys that could not be used.", None),
    "lookup_deferred": ("Look-ups answered later, as a peer's state was unknown.", None),
    "log_errors": ("Times that the block pool had to be looked at as a whole.", None),
}
"""Name, without `vllm:slipstream_` and `_total`; what it is; the name of its label."""


@dataclass
class SlipstreamStats(KVConnectorStats):
    """Increments since the last report."""

    data: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another rank or step has counted."""
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
