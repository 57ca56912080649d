"""The published keys of a store's tiers, for KV events."""

import random

import pytest
from slipstream import KeySet
from slipstream.published import TIERS, PublishedKeys, TierEvents


def key(n: int) -> bytes:
    return n.to_bytes(4, "little") * 9


def keys(*numbers: int) -> list[bytes]:
    return [key(n) for n in numbers]


class Tier:
    """One tier's keys."""

    def __init__(self) -> None:
        self.set = KeySet()
        self.set.set_consumed(True)
        self.take()

    def take(self, keys_max: int = 1000) -> list[bytes]:
        messages = []
        while message := self.set.take_message(keys_max):
            messages.append(message)
        return messages

    def add(self, *numbers: int) -> None:
        for n in numbers:
            self.set.apply([key(n), 0])

    def remove(self, *numbers: int) -> None:
        for n in numbers:
            self.set.apply([key(n), ~0])


def test_a_snapshot_in_parts_publishes_removals_at_its_end() -> None:
    tier, published = Tier(), PublishedKeys()
    tier.add(*range(10))
    tier.set.request_snapshot()
    for message in tier.take():
        published.take(message)
    tier.remove(3)
    tier.take()  # lost in transit
    tier.add(10)
    (late,) = tier.take()
    with pytest.raises(ValueError, match="key message 4 of a tier came after 2"):
        published.take(late)
    with pytest.raises(ValueError, match="checksum"):
        published.take(late[:-1] + b"x")
    tier.set.request_snapshot()
    messages = tier.take(4)
    assert len(messages) > 2
    taken = [published.take(message) for message in messages]
    assert [key for added, _ in taken for key in added] == keys(10)
    assert [removed for _, removed in taken] == [[]] * (len(taken) - 1) + [keys(3)]


def test_additions_are_published_before_removals() -> None:
    host, disk, events = Tier(), Tier(), TierEvents()

    def news() -> list[tuple[str, list[bytes], bool]]:
        messages = [("host", m) for m in host.take()] + [("disk", m) for m in disk.take()]
        published = events.take(messages)
        assert not events.error
        return published

    for tier in (host, disk):
        tier.set.request_snapshot()
    host.add(1, 2)
    assert news() == [("host", keys(1, 2), False)]
    # One moves to the disk, and one comes back from it.
    host.remove(1)
    disk.add(1)
    assert news() == [("disk", keys(1), False), ("host", keys(1), True)]
    host.add(1)
    disk.remove(1)
    assert news() == [("host", keys(1), False), ("disk", keys(1), True)]
    # A key that was added and removed in between is not published.
    messages = []
    for change in (host.add, host.remove):
        change(7)
        messages += host.take()
    assert events.take([("host", m) for m in messages]) == []


def test_a_message_out_of_order_is_skipped_and_reported() -> None:
    host, events = Tier(), TierEvents()
    host.set.request_snapshot()
    host.add(1)
    assert events.take([("host", m) for m in host.take()])
    host.add(2)
    host.take()
    host.add(3)
    assert events.take([("host", m) for m in host.take()]) == []
    assert "of a tier came after" in events.error
    host.set.request_snapshot()
    assert events.take([("host", m) for m in host.take()]) == [("host", keys(2, 3), False)]
    assert not events.error


@pytest.mark.parametrize("seed", range(5))
def test_followers_of_the_events_know_each_tier(seed: int) -> None:
    rng = random.Random(seed)
    tiers = {name: Tier() for name in TIERS}
    events = TierEvents()
    believed: dict[str, set[bytes]] = {name: set() for name in TIERS}
    for tier in tiers.values():
        tier.set.request_snapshot()
    for _ in range(300):
        name = rng.choice(TIERS)
        n = rng.randrange(40)
        if key(n) in tiers[name].set:
            tiers[name].remove(n)
        else:
            tiers[name].add(n)
        messages = [(name, m) for m in tiers[name].take(rng.choice([3, 1000]))]
        if rng.randrange(10) == 0:
            messages = messages[1:]
        for tier, changed, gone in events.take(messages):
            for one in changed:
                assert (one in believed[tier]) == gone, "nothing is published twice"
            (believed[tier].difference_update if gone else believed[tier].update)(changed)
        if events.error:
            for tier in tiers.values():
                tier.set.request_snapshot()
    for name, tier in tiers.items():
        tier.set.request_snapshot()
        for place, changed, gone in events.take([(name, m) for m in tier.take()]):
            (believed[place].difference_update if gone else believed[place].update)(changed)
        assert believed[name] == set(tier.set.keys())
