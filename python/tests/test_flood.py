"""Warnings that come by the thousand."""

import logging
import re

import pytest
from slipstream import flood
from slipstream.flood import FloodGate


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(flood.time, "monotonic", lambda: now[0])
    return now


def test_the_first_of_a_kind_is_logged_and_the_others_are_counted(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    gate = FloodGate(logging.getLogger("flood"), interval_s=10)
    for n in range(1000):
        gate.warning("load", "load %d failed", n)
        gate.warning("save", "save %d failed", n)
    assert caplog.messages == ["load 0 failed", "save 0 failed"]
    clock[0] += 9.9
    gate.tell_counts()
    assert len(caplog.messages) == 2
    clock[0] += 0.2
    gate.warning("load", "load %d failed", 1000)
    assert caplog.messages[2:] == ["load 1000 failed; 999 more like it since the last"]
    gate.tell_counts()
    assert caplog.messages[3:] == ["save 999 failed; 999 like it since the last"]


def test_every_warning_is_in_the_log_or_in_a_count(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    gate = FloodGate(logging.getLogger("flood"), interval_s=5)
    for n in range(500):
        clock[0] += (n % 7) / 10
        gate.warning(f"kind {n % 3}", "failed")
        if n % 50 == 0:
            gate.tell_counts()
    clock[0] += 10
    gate.tell_counts()
    counted = 0
    for message in caplog.messages:
        match = re.fullmatch(r"failed(?:; (\d+) (more )?like it since the last)?", message)
        assert match, message
        counted += int(match[1] or 0) + (match[1] is None or match[2] is not None)
    assert counted == 500 and len(caplog.messages) < 250
    clock[0] += 10
    gate.tell_counts()
    assert not gate._kinds, "what is over takes no memory"


def test_what_is_counted_is_told_at_the_end(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    gate = FloodGate(logging.getLogger("flood"))
    for _ in range(3):
        gate.warning("load", "100 %% of %s", "r1")
    gate.tell_counts(at_once=True)
    assert caplog.messages == ["100 % of r1", "100 % of r1; 2 like it since the last"]
