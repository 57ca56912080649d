"""Rate-limited warnings: logs the first few, then the number of the rest. Without vLLM."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SAME_MAX = 3
"""Maximum warnings of one kind logged in each window."""

WINDOW_S = 60.0
"""Length of a window, seconds."""


@dataclass(slots=True)
class Kind:
    """Warnings of one kind since the start of their window."""

    began: float
    count: int = 0
    last: str = ""


class LimitedLog:
    """Logs the first few warnings of each kind per minute, and the number of the rest afterwards.

    Any thread may call it.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, Kind] = {}

    def warning(self, kind: str, text: str, *args: object) -> None:
        """Log a warning, as `logging.Logger.warning` does, within the limit of its kind."""
        self.flush()
        with self._lock:
            noted = self._kinds.setdefault(kind, Kind(self._clock()))
            noted.count += 1
            is_logged = noted.count <= SAME_MAX
            if not is_logged:
                noted.last = text % args
        if is_logged:
            self._logger.warning(text, *args)

    def flush(self, now: float | None = None) -> None:
        """Log the number of omitted warnings of each expired window."""
        if not self._kinds:
            return
        now = self._clock() if now is None else now
        with self._lock:
            over = [kind for kind, noted in self._kinds.items() if now - noted.began >= WINDOW_S]
            ended = [self._kinds.pop(kind) for kind in over]
        for noted in ended:
            if noted.count > SAME_MAX:
                self._logger.warning(
                    "%d more warnings like this in %d s, the last one: %s",
                    noted.count - SAME_MAX,
                    WINDOW_S,
                    noted.last,
                )
