"""The options of `kv_connector_extra_config`. This module does not import vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any


class OptionError(ValueError):
    """Invalid options; the text names all of them."""


@dataclass(frozen=True)
class Options:
    """The connector's options, with their defaults."""

    host_bytes: int = 4 << 30
    """Host memory for blocks, per rank, bytes. 0: no block is saved on this host."""
    disk_dir: str = ""
    """Folder for blocks on disk, which outlive the engine. Empty: none."""
    disk_bytes: int = 64 << 30
    """Disk for blocks, per rank, bytes. Includes blocks of models served before whose folders no
    process uses; those are evicted first, the least recently used before others."""
    disk_dirty_bytes: int = 1 << 30
    """Maximum bytes written but not yet flushed to disk, per rank."""
    close_s: float = 30.0
    """Maximum time for which a shutdown writes pending blocks, seconds; the rest is counted."""
    ttl_s: float = 0.0
    """Maximum age of a served block, seconds. 0: any age."""
    save: bool = True
    """Saves blocks that the engine fills."""
    saving_bytes_max: int = 1 << 30
    """Maximum bytes waiting to be stored; further blocks are not saved, and counted."""
    loading_bytes_max: int = 1 << 30
    """Host memory for staging loads on their way to the device, per rank, bytes."""
    load_blocks_min: int = 1
    """Minimum blocks of a hit that is loaded."""
    layer_slices: int = 1
    """Parts into which each block is divided by layers. Each part is stored, published and sent
    once a forward pass has computed its layers. 1: whole blocks, after the pass."""
    layer_load_blocks_max: int = 0
    """Maximum blocks of a hit that is loaded within the step of its request. Before each layer, the
    forward pass waits for the layer's part of them. 0: loads run concurrently with the steps."""
    load_deadline_s: float = 10.0
    """A load that takes longer fails, and its blocks are recomputed. Seconds."""
    lookup_wait_s: float = 0.05
    """Maximum time after its arrival that a request waits for a peer whose keys are unknown."""
    remote_wait_s: float = 1.0
    """Maximum time that a request waits for the blocks that a prefill engine has computed for it;
    then the missing ones are computed. Seconds."""
    weights: str = "full"
    """How the model's weights are identified. `full`: every byte of their files, once for each
    version of a file; `sampled`: some of each tensor; `model_id`: by that option."""
    model_id: str = ""
    """A name that changes whenever weights, adapters or configuration do. It allows sharing and
    storing on disk if these cannot be identified. Peers must have the same."""
    listen: list[str] = field(default_factory=list)
    """Addresses at which this engine serves its blocks. `tcp://IP:PORT`; `unix:///PATH` for peers
    on the host, which read its memory in place; `nixl://IP:PORT` for peers that read it by NIXL.
    Rank `r` adds `r` to the port or `.r` to the path."""
    peers: list[str] = field(default_factory=list)
    """The `listen` addresses of engines whose blocks may be loaded; by rank in the same way."""
    peers_dir: str = ""
    """Folder for discovery, writable by all engines: engines that listen publish their addresses
    there, and all engines read them. Empty: none."""
    peer_keys_max: int = 1 << 20
    """Maximum keys of all peers together in the index for look-ups, per rank; 62 bytes each."""
    follow: bool = False
    """Publishes the keys cached on the device to the workers (`SlipstreamConnector.mirror`)."""
    hooks: bool = True
    """False: reads KV events, or compares all cached keys periodically."""
    keys_max: int = 2048
    """Maximum keys per message; bounds the cost of a snapshot per step."""
    stats_interval_s: float = 0.5
    """Interval at which counts are passed to vLLM's metrics, seconds."""


LOWER_TIERS = ("disk",)
"""Tiers below memory. Options of each begin with its name; `TIER_dir` is its folder, or empty."""

WEIGHTS = ("full", "sampled", "model_id")
"""Values of `Options.weights`."""

SHARING = (*(f"{tier}_dir" for tier in LOWER_TIERS), "listen", "peers", "peers_dir")
"""Options by which blocks outlive an engine, or leave it."""

POSITIVE = (
    "disk_dirty_bytes",
    "peer_keys_max",
    "load_blocks_min",
    "layer_slices",
    "load_deadline_s",
    "keys_max",
)
"""Options that must be above 0."""


def read_options(given: Mapping[str, Any]) -> Options:
    """Check the options and fill in the defaults.

    Raises
    ------
    OptionError
        If any is unknown, or has a wrong type or size.
    """
    defaults = Options()
    known: dict[str, Any] = {
        option.name: getattr(defaults, option.name) for option in fields(Options)
    }
    wrong: list[str] = []
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            wrong.append(f"`{name}` is unknown")
            continue
        kind = type(known[name])
        # In Python `True` is an int, but in a configuration it is a mistake.
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is list and not all(type(v) is str for v in value)):
            wrong.append(f"`{name}` is {value!r}, but takes {kind.__name__}")
        elif kind in (int, float) and (value < 0 or (value == 0 and name in POSITIVE)):
            wrong.append(f"`{name}` is {value}, which is too small")
        elif name == "weights" and value not in WEIGHTS:
            wrong.append(f"`weights` is {value!r}, but takes one of {', '.join(WEIGHTS)}")
        else:
            values[name] = value
    if values.get("weights") == "model_id" and not values.get("model_id"):
        wrong.append("`weights` is 'model_id', which needs a `model_id`")
    if values.get("host_bytes") == 0:
        useless = [name for name in SHARING if values.get(name)]
        wrong += [f"`{name}` needs `host_bytes` above 0" for name in useless]
    if wrong:
        raise OptionError(
            f"kv_connector_extra_config: {'; '.join(wrong)}; known are {', '.join(known)}"
        )
    return Options(**values)


def of_engine(options: Options, index: int, ranks: int) -> Options:
    """Return the options of one of several engines of `ranks` ranks with a common configuration.

    Engines of one data-parallel group may be on one host, where each needs its own addresses and
    folder. The first engine has the given ones.
    """
    if index == 0:
        return options
    given = {f"{tier}_dir": getattr(options, f"{tier}_dir") for tier in LOWER_TIERS}
    folders: dict[str, Any] = {
        name: str(Path(folder) / f"engine-{index}") if folder else ""
        for name, folder in given.items()
    }
    return replace(options, listen=of_rank(options.listen, index * ranks), **folders)


def of_rank(addresses: list[str], rank: int) -> list[str]:
    """Return the addresses of rank `rank` of an engine at these addresses.

    Raises
    ------
    OptionError
        If an address is not `tcp://IP:PORT`, `nixl://IP:PORT` or `unix:///PATH`.
    """
    found = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        if address.startswith("unix:///"):
            found.append(f"{address}.{rank}" if rank else address)
        elif address.startswith(("tcp://", "nixl://")) and port.isdecimal():
            # With port 0 the system chooses a free port.
            found.append(f"{host}:{int(port) + rank if int(port) else 0}")
        else:
            raise OptionError(
                f"`{address}` is not a valid address; "
                "write tcp://IP:PORT, nixl://IP:PORT or unix:///PATH"
            )
    return found
