"""What `kv_connector_extra_config` may say. This module does not import vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any


class OptionError(ValueError):
    """Options that cannot be used; the text names all of them."""


@dataclass(frozen=True)
class Options:
    """The connector's options, with their defaults."""

    host_bytes: int = 4 << 30
    """Host memory for blocks, per rank, bytes. 0: nothing is saved on this host."""
    disk_dir: str = ""
    """Folder where blocks are kept as well, and outlive the engine. Empty: none."""
    disk_bytes: int = 64 << 30
    """Disk for blocks, per rank, bytes: of this model, and of those that were served before and
    whose folders no process uses, which make room first, the least recently used before others."""
    disk_dirty_bytes: int = 1 << 30
    """Bytes that may be written and not on the disk yet, per rank."""
    close_s: float = 30.0
    """How long a shutdown writes what waits for the disk, seconds; what is left is counted."""
    ttl_s: float = 0.0
    """Blocks older than this are not served, seconds. 0: any age."""
    save: bool = True
    """Saves blocks that the engine fills."""
    saving_bytes_max: int = 1 << 30
    """Bytes that may wait to be stored; blocks beyond are not saved, and counted."""
    loading_bytes_max: int = 1 << 30
    """Host memory that loads come into on their way to the device, per rank, bytes."""
    load_blocks_min: int = 1
    """Hits of fewer blocks are not worth a load."""
    load_deadline_s: float = 10.0
    """A load that takes longer fails, and its blocks are recomputed. Seconds."""
    lookup_wait_s: float = 0.05
    """How long after its arrival a request may wait for a peer whose keys are not known yet."""
    weights: str = "full"
    """How the model's weights are identified. `full`: every byte of their files, once for each
    version of a file; `sampled`: some of each tensor; `model_id`: that says it."""
    model_id: str = ""
    """A name that changes whenever weights, adapters or configuration do: with it, what cannot be
    identified is shared and kept on disk all the same. Peers must have the same."""
    listen: list[str] = field(default_factory=list)
    """Where this engine serves its blocks: `tcp://IP:PORT`; `unix:///PATH` to peers on the host,
    which read its memory in place; `nixl://IP:PORT` to peers that read it by NIXL. Rank `r` adds
    `r` to the port or `.r` to the path."""
    peers: list[str] = field(default_factory=list)
    """The engines whose blocks may be taken, as they are told to listen; likewise by rank."""
    peers_dir: str = ""
    """Folder that all engines can read and write, where those that listen tell of themselves, and
    all find each other. Empty: none."""
    peer_keys_max: int = 1 << 20
    """Keys of all peers together that look-ups know, for each rank; 62 bytes each."""
    follow: bool = False
    """Tells the workers which keys the device caches (`SlipstreamConnector.mirror`)."""
    hooks: bool = True
    """False: reads KV events, or compares all cached keys now and then."""
    keys_max: int = 2048
    """Keys told in one message; bounds what a snapshot costs in one step."""
    stats_interval_s: float = 0.5
    """How often counts are given to vLLM's metrics, seconds."""


WEIGHTS = ("full", "sampled", "model_id")
"""Values of `Options.weights`."""

POSITIVE = (
    "disk_dirty_bytes",
    "peer_keys_max",
    "load_blocks_min",
    "load_deadline_s",
    "keys_max",
)
"""Options that make no sense at 0."""


def read_options(given: Mapping[str, Any]) -> Options:
    """Check the options and fill in the defaults.

    Raises
    ------
    OptionError
        If any is unknown, or of a wrong type or size.
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
        # `True` is an int to Python, but not to whoever wrote the configuration.
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
        useless = [
            name for name in ("disk_dir", "listen", "peers", "peers_dir") if values.get(name)
        ]
        wrong += [f"`{name}` needs `host_bytes` above 0" for name in useless]
    if wrong:
        raise OptionError(
            f"kv_connector_extra_config: {'; '.join(wrong)}; known are {', '.join(known)}"
        )
    return Options(**values)


def of_engine(options: Options, index: int, ranks: int) -> Options:
    """Return the options of one of several engines of `ranks` ranks that were given the same ones.

    Engines of one data-parallel group may be on one host, where each needs addresses and a folder
    of its own. The first has what was given.
    """
    if index == 0:
        return options
    folder = str(Path(options.disk_dir) / f"engine-{index}") if options.disk_dir else ""
    return replace(options, listen=of_rank(options.listen, index * ranks), disk_dir=folder)


def of_rank(addresses: list[str], rank: int) -> list[str]:
    """Return where rank `rank` of an engine at these addresses is.

    Raises
    ------
    OptionError
        If an address is neither `tcp://IP:PORT`, `nixl://IP:PORT` nor `unix:///PATH`.
    """
    found = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        if address.startswith("unix:///"):
            found.append(f"{address}.{rank}" if rank else address)
        elif address.startswith(("tcp://", "nixl://")) and port.isdecimal():
            # Port 0 is whichever is free.
            found.append(f"{host}:{int(port) + rank if int(port) else 0}")
        else:
            raise OptionError(
                f"`{address}` is no address; write tcp://IP:PORT, nixl://IP:PORT or unix:///PATH"
            )
    return found
