"""Opens what the connector runs on, as its options say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.options import Options
    from slipstream.store import Store
    from slipstream.vllm.scheduler import Peers


def open_store(
    options: Options, identity: dict[str, str], block_bytes: int, rank: int
) -> Store | None:
    """Open the store of one rank; `None` if the options ask for none."""
    return None


def open_peers(options: Options) -> Peers | None:
    """Begin to follow the peers that the options name; `None` if they name none."""
    return None
