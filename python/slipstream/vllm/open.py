"""Opens what the connector runs on, as its options say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream._native import Store as NativeStore

if TYPE_CHECKING:
    from slipstream.options import Options
    from slipstream.store import Store
    from slipstream.vllm.scheduler import Peers


def open_store(options: Options, identity: dict[str, str], block_bytes: int) -> Store | None:
    """Open the store of one rank; `None` if the options ask for none."""
    if options.host_bytes == 0:
        return None
    return NativeStore(
        block_bytes=block_bytes,
        host_bytes=options.host_bytes,
        disk_dir=str(disk_folder(options.disk_dir, identity)) if options.disk_dir else None,
        disk_bytes=options.disk_bytes,
        ttl_s=options.ttl_s,
        keys_max=options.keys_max,
    )


def disk_folder(disk_dir: str, identity: dict[str, str]) -> Path:
    """Return the folder for blocks that mean the same: another model's are not found by its keys.

    What made the folder's name is written beside it, for people.
    """
    text = json.dumps(identity, indent=2, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = Path(disk_dir).expanduser() / name
    folder.mkdir(parents=True, exist_ok=True)
    folder.with_suffix(".json").write_text(text + "\n")
    return folder


def open_peers(options: Options) -> Peers | None:
    """Begin to follow the peers that the options name; `None` if they name none."""
    return None
