"""The published keys of a store's tiers, for KV events. This module does not import vLLM."""

from collections import defaultdict
from collections.abc import Iterable

from slipstream._native import MEDIUMS, KeyMirror

TIERS = tuple(MEDIUMS)
"""The tiers of a store, by the names that `Store.take_tier_message` has for them."""


class PublishedKeys:
    """The published keys of one tier."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        # During a snapshot: keys that it has not repeated; removed at its end.
        self._unnamed: set[bytes] | None = None
        self._last = (0, 0)

    def take(self, message: bytes) -> tuple[list[bytes], list[bytes]]:
        """Apply a message of the store; return the keys that it adds and removes.

        Raises
        ------
        ValueError
            If the message is damaged, or an earlier one is missing: request a snapshot.
        """
        added, removed, begins, ends = KeyMirror.read(message)
        # docs/kv-keys.md: the stream's number, and the message's.
        stream, number = (int.from_bytes(message[at : at + 8], "little") for at in (16, 24))
        if begins:
            self._unnamed = set(self._keys)
        elif (stream, number) != (self._last[0], self._last[1] + 1):
            last, self._last = self._last[1], (0, 0)
            raise ValueError(f"key message {number} of a tier came after {last}")
        self._last = (stream, number)
        if self._unnamed is not None:
            self._unnamed.difference_update(added, removed)
            if ends:
                removed += self._unnamed
                self._unnamed = None
        added = [key for key in added if key not in self._keys]
        removed = [key for key in removed if key in self._keys]
        self._keys.update(added)
        self._keys.difference_update(removed)
        return added, removed


class TierEvents:
    """Converts messages of a store's tiers into added and removed keys of each."""

    def __init__(self) -> None:
        self._published = {tier: PublishedKeys() for tier in TIERS}
        self.error = ""

    def take(self, messages: Iterable[tuple[str, bytes]]) -> list[tuple[str, list[bytes], bool]]:
        """Return the tier, the keys, and whether they were removed from it.

        Added keys are first, in all tiers: a block that moves between tiers is published in the
        new one before its removal from the old one, so it never appears to be lost.

        An invalid message is skipped, and `error` gives the reason: request a snapshot.
        """
        # By tier and key: whether it was removed. A key added and removed again is not published.
        changed: defaultdict[str, dict[bytes, bool]] = defaultdict(dict)
        self.error = ""
        for tier, message in messages:
            try:
                changes = self._published[tier].take(message)
            except ValueError as error:
                self.error = str(error)
                continue
            for gone, keys in enumerate(changes):
                for key in keys:
                    if changed[tier].pop(key, None) is None:
                        changed[tier][key] = bool(gone)
        return [
            (tier, keys, wanted)
            for wanted in (False, True)
            for tier, states in changed.items()
            if (keys := [key for key, gone in states.items() if gone == wanted])
        ]
