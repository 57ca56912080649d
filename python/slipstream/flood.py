"""Warnings that may come by the thousand, of which the log gets a few with counts."""

import logging
import threading
import time

INTERVAL_S = 10.0
"""After a warning of a kind, others of it are counted for so long."""


class FloodGate:
    """Logs the first warning of each kind at once, and then one per interval, with how many more.

    Threads may share one.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = INTERVAL_S) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._lock = threading.Lock()
        # By kind: when the next one may be logged, and the last text that was not, with how many.
        self._kinds: dict[str, tuple[float, str, int]] = {}

    def warning(self, kind: str, text: str, *args: object) -> None:
        """Log the warning, or count it."""
        now = time.monotonic()
        with self._lock:
            due, _, held_back = self._kinds.get(kind, (now, "", 0))
            if now < due:
                self._kinds[kind] = due, text % args, held_back + 1
                return
            self._kinds[kind] = now + self._interval_s, "", 0
        if held_back:
            text, args = text + "; %d more like it since the last", (*args, held_back)
        self._logger.warning(text, *args)

    def tell_counts(self, *, at_once: bool = False) -> None:
        """Log how many of each kind were counted, where its interval has passed, or `at_once`."""
        if not self._kinds:
            return
        now, told = time.monotonic(), []
        with self._lock:
            for kind, (due, text, held_back) in list(self._kinds.items()):
                if now < due and not at_once:
                    continue
                if held_back:
                    self._kinds[kind] = now + self._interval_s, "", 0
                    told.append((text, held_back))
                else:
                    # So that kinds of long ago take no memory.
                    del self._kinds[kind]
        for text, held_back in told:
            self._logger.warning("%s; %d like it since the last", text, held_back)
