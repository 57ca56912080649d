"""Rate limits of frequent warnings."""

import logging
import math
import re

import pytest
from slipstream.limited import SAME_MAX, WINDOW_S, LimitedLog


def test_every_warning_is_in_the_log_or_in_a_count(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    limited = LimitedLog(logging.getLogger("limited"), clock=lambda: now[0])
    for n in range(5000):
        now[0] += (n % 7) / 10
        limited.warning(f"kind {n % 3}", "100 %% of %s failed", f"r{n}")
    limited.flush(now=math.inf)
    logged = counted = 0
    for message in caplog.messages:
        if match := re.match(r"(\d+) more warnings like this", message):
            counted += int(match[1])
        else:
            assert re.fullmatch(r"100 % of r\d+ failed", message)
            logged += 1
    assert logged + counted == 5000
    windows = now[0] / WINDOW_S + 1
    assert 3 * SAME_MAX <= logged <= 3 * SAME_MAX * windows < 500
    caplog.clear()
    limited.flush(now=math.inf)
    assert not caplog.messages, "each is counted once"
