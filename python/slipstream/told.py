"""What followers of KV events were told of a store's tiers. This module does not import vLLM."""

from collections import defaultdict
from collections.abc import Iterable

from slipstream._native import KeyMirror

TIERS = ("host", "disk")
"""The tiers of a store, by the names that `Store.take_tier_message` has for them."""


class Told:
    """Keys of one tier, as they were told of."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        # While a snapshot comes: keys that it has not named; gone, if it does not.
        self._unnamed: set[bytes] | None = None
        self._last = (0, 0)

    def take(self, message: bytes) -> tuple[list[bytes], list[bytes]]:
        """Return which keys came and went by this message of the store.

        Raises
        ------
        ValueError
            If the message is damaged, or one before it is missing: ask for a snapshot.
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
    """Turns messages of a store's tiers into what came and went in each."""

    def __init__(self) -> None:
        self._told = {tier: Told() for tier in TIERS}
        self.error = ""

    def take(self, messages: Iterable[tuple[str, bytes]]) -> list[tuple[str, list[bytes], bool]]:
        """Return the tier, the keys, and whether they are gone from it.

        What came is first, in all tiers: a block that moves from one to the other is told to be
        there before it is told to be gone here, so nobody takes it for lost in between.

        A message that cannot be used is left out, and `error` says why: ask for a snapshot.
        """
        # By tier and key: whether it is gone. What came and went again is not told.
        news: defaultdict[str, dict[bytes, bool]] = defaultdict(dict)
        self.error = ""
        for tier, message in messages:
            try:
                changes = self._told[tier].take(message)
            except ValueError as error:
                self.error = str(error)
                continue
            for gone, keys in enumerate(changes):
                for key in keys:
                    if news[tier].pop(key, None) is None:
                        news[tier][key] = bool(gone)
        return [
            (tier, keys, wanted)
            for wanted in (False, True)
            for tier, told in news.items()
            if (keys := [key for key, gone in told.items() if gone == wanted])
        ]
