"""Opens the connector's stores and peer indexes, according to its options."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream._native import Peers as NativePeers
from slipstream._native import Store as NativeStore
from slipstream.nixl import find_library, is_wanted
from slipstream.options import LOWER_TIERS, SHARING, of_rank
from slipstream.vllm.content import is_private
from slipstream.vllm.identity import is_random

if TYPE_CHECKING:
    from slipstream.options import Options
    from slipstream.store import Store

logger = logging.getLogger("slipstream.vllm")


def open_store(
    options: Options,
    identity: dict[str, str],
    block_bytes: int | list[int],
    rank: int,
    publish_tiers: bool = False,
    engine: str = "",
) -> Store | None:
    """Open the store of one rank; `None` if the options need none.

    `block_bytes` is the size of a block, or of a block of each group.
    `engine` is the same for all ranks of this engine, and different for every other engine.
    """
    if options.host_bytes == 0:
        return None
    options = shareable(options, identity)
    return NativeStore(
        block_bytes=block_bytes,
        host_bytes=options.host_bytes,
        close_s=options.close_s,
        ttl_s=options.ttl_s,
        keys_max=options.keys_max,
        identity=identity,
        name=own_name(rank),
        listen=of_rank(options.listen, rank),
        peers=of_rank(options.peers, rank),
        # The scheduler half identifies its peers by their first rank.
        peer_names=of_rank(options.peers, 0),
        publish_tiers=publish_tiers,
        nixl=find_library() if is_wanted(options.listen + options.peers) else None,
        peers_dir=meeting_place(options),
        engine=engine,
        **lower_settings(options, identity, rank),
    )


def lower_settings(
    options: Options, identity: dict[str, str], rank: int
) -> dict[str, int | str | list[str] | None]:
    """Return the store's settings of the tiers below memory, for one rank.

    A tier's options are its settings, except that each identity has a folder in `TIER_dir`.
    """
    settings: dict[str, int | str | list[str] | None] = {}
    for tier in LOWER_TIERS:
        of_tier = (option.name for option in fields(options) if option.name.startswith(f"{tier}_"))
        settings |= {name: getattr(options, name) for name in of_tier}
        folder = tier_folder(tier, getattr(options, f"{tier}_dir"), identity)
        settings[f"{tier}_dir"] = folder
        settings[f"{tier}_others"] = (
            other_folders(folder, rank, ranks_of(identity)) if folder else []
        )
    return settings


def shareable(options: Options, identity: dict[str, str]) -> Options:
    """Return the options without lower tiers and peers if the model is not identified."""
    if not is_private(identity):
        return options
    defaults = type(options)()
    return replace(options, **{name: getattr(defaults, name) for name in SHARING})


def ranks_of(identity: dict[str, str]) -> int:
    """Return the number of ranks of an engine."""
    return int(identity["tensor_parallel"]) * int(identity["pipeline_parallel"])


def meeting_place(options: Options) -> str | None:
    """Return the folder for peer discovery, if there is one."""
    return str(Path(options.peers_dir).expanduser()) if options.peers_dir else None


def own_name(rank: int) -> str:
    """Return the name of this rank in the logs of peers."""
    return f"{socket.gethostname()}, process {os.getpid()}, rank {rank}"


def tier_folder(tier: str, given: str, identity: dict[str, str]) -> str | None:
    """Return a tier's folder for blocks of one identity, which blocks of another model never share.

    The inputs of the folder's name are written to a file next to it. `None` if no folder is `given`
    or it is of no use.
    """
    if not given:
        return None
    if is_random(identity["hash_seed"]):
        logger.warning(
            "slipstream: `%s_dir` is not used: with the hash algorithm %s each start hashes "
            "otherwise, so nothing on %s would ever be found again; set PYTHONHASHSEED",
            tier,
            identity["hash_algorithm"],
            tier,
        )
        return None
    text = json.dumps(identity, indent=2, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    # The rank is in the name for the cleanup by other engines.
    folder = Path(given).expanduser() / f"{name}-{identity['rank']}"
    folder.mkdir(parents=True, exist_ok=True)
    folder.with_suffix(".json").write_text(text + "\n")
    return str(folder)


FOLDER = re.compile(r"[0-9a-f]{16}(?:-(\d+))?")
"""Names of block folders, with their rank; earlier releases omitted the rank."""


def other_folders(own: str, rank: int, ranks: int) -> list[str]:
    """Return the folders of other identities that this rank cleans up, the most recently used last.

    Folders of ranks that this engine does not have are divided among its ranks.
    """
    found = []
    for path in Path(own).parent.iterdir():
        match = FOLDER.fullmatch(path.name)
        if not match or not path.is_dir() or path == Path(own):
            continue
        if int(match[1] or 0) % ranks == rank:
            try:
                found.append(((path / "lock").stat().st_mtime_ns, str(path)))
            except OSError:
                found.append((0, str(path)))
    return [path for _, path in sorted(found)]


def open_peers(
    options: Options, identities: list[dict[str, str]], engine: str = ""
) -> NativePeers | None:
    """Start to follow the peers that the options name or discover; `None` if there are none.

    `identities` are those of all ranks of this engine. Each rank of a peer is followed, because a
    block can be loaded from it only if all its ranks have it.
    """
    if identities:
        options = shareable(options, identities[0])
    if not (options.peers or options.peers_dir):
        return None
    ranks = range(len(identities))
    return NativePeers(
        identities=identities,
        names=[f"scheduler of {own_name(rank)}" for rank in ranks],
        peers=[of_rank(options.peers, rank) for rank in ranks],
        keys_max=options.peer_keys_max,
        peers_dir=meeting_place(options),
        engine=engine,
        nixl=is_wanted(options.listen + options.peers),
    )
