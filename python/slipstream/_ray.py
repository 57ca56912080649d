"""Parts of a question as tasks of a Ray cluster.

A task is a slice of a sweep's configurations, or of a batch of a plan's trials. Its result depends
on the slice alone, and slices are put together in their order, so the place of a run has no effect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from slipstream.errors import Error, QuestionError, RemoteError

RETRIES = 3
"""Times that a task is run again because its process or node was lost."""

SLICES_PER_CPU = 4
"""Slices, so that the last one to end is short."""

IN_FLIGHT_PER_CPU = 2
"""Tasks that are submitted at a time."""


def rows_task(call: str, question: str, start: int, stop: int) -> str:
    """Run the configurations of a slice."""
    from slipstream import _native, api

    job = _native.start_sweep_rows(call, question, start, stop, 1)
    rows: str = api.finish(job, False)["rows"]
    return rows


def trials_task(call: str, question: str, batch: str) -> str:
    """Run the trials of a slice."""
    from slipstream import _native, api

    results: str = api.finish(_native.start_plan_trials(call, question, batch, 1), False)["results"]
    return results


class Tasks:
    """A connection to a Ray cluster. `on`: `ray`, or `ray://HOST:PORT`."""

    def __init__(self, on: str, show: Callable[[str], None] | None) -> None:
        if on != "ray" and not on.startswith("ray://"):
            raise QuestionError(f"on is `{on}`, but must be `ray` or `ray://HOST:PORT`")
        try:
            import ray
        except ImportError as error:
            raise RemoteError(
                f"`{on}` takes Ray in this Python's environment ({error}); pip install ray"
            ) from error
        self.ray: Any = ray
        self.on = on
        self.show = show
        self.started = False
        self.retries = 0

    def __enter__(self) -> Tasks:
        ray = self.ray
        if not ray.is_initialized():
            # Ray reads RAY_ADDRESS itself, for `ray`.
            address = self.on if self.on != "ray" else None
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except Exception as error:
                raise RemoteError(f"connecting to {self.on}: {error}") from error
            self.started = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.started:
            self.ray.shutdown()

    def cpus(self) -> int:
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def sweep_rows(self, call: str, question: str, count: int) -> list[str]:
        """Return the rows of all `count` configurations, by slice."""
        size = -(-count // min(count, self.cpus() * SLICES_PER_CPU))
        slices = [(start, min(start + size, count)) for start in range(0, count, size)]
        return self.run(rows_task, call, question, slices, "configurations")

    def trials(self, call: str, question: str) -> Callable[[str], str]:
        """Return a function that runs a batch of trials."""

        def run(text: str) -> str:
            batch = json.loads(text)
            trials = batch["trials"]
            size = max(1, -(-len(trials) // (self.cpus() * SLICES_PER_CPU)))
            slices = [
                (json.dumps({**batch, "trials": trials[at : at + size]}),)
                for at in range(0, len(trials), size)
            ]
            results = self.run(trials_task, call, question, slices, None)
            return json.dumps([each for text in results for each in json.loads(text)])

        return run

    def run(
        self,
        function: Callable[..., str],
        call: str,
        question: str,
        slices: list[Any],
        what: str | None,
    ) -> list[str]:
        """Run `function` on each slice; results in the order of `slices`."""
        ray = self.ray
        # Ray retries a task if its process or node is lost. Those that it gives up run anew.
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(function)
        lost = (
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.NodeDiedError,
            ray.exceptions.ObjectLostError,
            ray.exceptions.RaySystemError,
            ray.exceptions.OutOfMemoryError,
        )
        shared = ray.put(question)
        results: list[str | None] = [None] * len(slices)
        tried = [0] * len(slices)
        waiting = list(reversed(range(len(slices))))
        under_way: dict[Any, int] = {}
        ended = 0
        try:
            while waiting or under_way:
                while waiting and len(under_way) < self.cpus() * IN_FLIGHT_PER_CPU:
                    at = waiting.pop()
                    under_way[task.remote(call, shared, *slices[at])] = at
                done, _ = ray.wait(list(under_way), num_returns=1, timeout=0.1)
                for ref in done:
                    at = under_way.pop(ref)
                    try:
                        results[at] = ray.get(ref)
                    except lost as error:
                        tried[at] += 1
                        self.retries += 1
                        if tried[at] > RETRIES:
                            raise RemoteError(
                                f"slice {at} was lost {tried[at]} times on {self.on}: {error}"
                            ) from error
                        waiting.append(at)
                        continue
                    except ray.exceptions.RayTaskError as error:
                        if isinstance(error.cause, Error):
                            raise error.cause from None
                        raise RemoteError(f"a task on {self.on} failed: {error}") from error
                    ended += 1
                    if self.show and what:
                        again = f", {self.retries} again" if self.retries else ""
                        self.show(f"{ended} of {len(slices)} slices of {what} ended{again}")
        except BaseException:
            for ref in under_way:
                ray.cancel(ref)
            raise
        return [result for result in results if result is not None]


def serve(lines: Any, write: Callable[[str], None]) -> None:
    """Answer the command (`--on`): a question per line, then a plan's batches.

    Each answer is a line of JSON; an error is one, too.
    """
    import sys

    from slipstream import _display

    def answer(**fields: Any) -> None:
        write(json.dumps(fields) + "\n")

    try:
        asked = json.loads(next(lines))
        show = _display.Line() if asked["shows"] and sys.stderr.isatty() else None
        with Tasks(asked["on"], show) as tasks:
            call = f"{os.getpid()}-{id(asked)}"
            if "count" in asked:
                rows = tasks.sweep_rows(call, asked["question"], asked["count"])
                answer(rows=rows)
            else:
                run = tasks.trials(call, asked["question"])
                for line in lines:
                    answer(results=json.loads(run(line)))
            if show:
                show.clear()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        answer(error=str(error))


if __name__ == "__main__":
    import sys

    def write(line: str) -> None:
        """Write a line for the command."""
        sys.stdout.write(line)
        sys.stdout.flush()

    serve(iter(sys.stdin), write)
