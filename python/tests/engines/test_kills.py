"""Engines of a disaggregated fleet are killed in turn under load: no answer is lost or wrong.

`SLIPSTREAM_KILLS=requests:prefill:decode`, such as `1000:2:2`; by default few requests over three
engines.
"""

import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fleet import Engine, make_model, metric, post, router
from test_disaggregated import GREEDY, Fleet, await_peers, prompt, stream_tokens, tokens

pytest.importorskip("slipstream._native", reason="the connector is not installed")

REQUESTS, PREFILL, DECODE = map(int, os.environ.get("SLIPSTREAM_KILLS", "48:1:2").split(":"))
CLIENTS = 8
PATH = "/v1/completions"


def await_up(front: str, url: str) -> None:
    """Wait until the router sends requests to an engine."""
    end = time.monotonic() + 300
    while metric(front, "slipstream_engine_up", engine=url) != 1:
        assert time.monotonic() < end, f"{url} stays down"
        time.sleep(0.5)


class Killer:
    """Kills each engine once under load, and starts it again."""

    def __init__(self, fleet: Fleet, front: str) -> None:
        self.fleet = fleet
        self.front = front
        self.done = 0
        self.kills: list[str] = []
        roles = ((fleet.decode, "kv_consumer", "d"), (fleet.prefill, "kv_producer", "p"))
        most = max(PREFILL, DECODE)
        self.turns = [(role, at) for at in range(most) for role in roles if at < len(role[0])]
        kills = len(self.turns)
        self.marks = [REQUESTS * (number + 1) // (kills + 2) for number in range(kills)]
        """Requests that are done before each kill."""
        self.back = 0
        """Killed engines that answer again."""
        self.over = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        try:
            self.kill_in_turn()
        except BaseException as error:
            self.error = error
        finally:
            self.over.set()

    def kill_in_turn(self) -> None:
        for ((engines, role, letter), at), mark in zip(self.turns, self.marks, strict=True):
            while self.done < mark:
                if self.over.wait(0.02):
                    return
            name = f"{letter}{at}"
            engines[at].kill()
            self.kills.append(name)
            killed = time.monotonic()
            print(f"{name} killed after {self.done} of {REQUESTS} requests", flush=True)
            engines[at] = self.fleet.engine(name, role, port=engines[at].port)
            engines[at].await_ready()
            await_up(self.front, engines[at].url)
            self.back += 1
            took = time.monotonic() - killed
            print(f"{name} is back after {took:.0f} s, {self.done} requests", flush=True)

    def wait_turn(self, at: int) -> None:
        """Hold request `at` back until the kill before its part of the load is over."""
        before = sum(mark <= at for mark in self.marks) - 1
        while self.back < before and not self.over.wait(0.05):
            pass

    def stop(self) -> None:
        self.over.set()
        self.thread.join()
        if self.error is not None:
            raise self.error


@pytest.mark.skipif(DECODE < 2, reason="nobody is left to answer while a decode engine starts")
def test_engines_are_killed_in_turn(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    bodies = [
        GREEDY | {"prompt": prompt(blocks=4 + at % 6, rest=at % 32), "return_token_ids": True}
        for at in range(REQUESTS)
    ]
    # The answers of one engine without a connector, which ends before the others start.
    alone = Engine(model, tmp_path / "alone.log")
    try:
        alone.await_ready()
        with ThreadPoolExecutor(CLIENTS) as pool:
            wanted = list(pool.map(lambda body: tokens(post(alone.url, PATH, body)), bodies))
    finally:
        alone.kill()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))  # sockets' paths are short
    (folder / "peers").mkdir()
    fleet = Fleet(model, folder, [], [], alone)
    try:
        fleet.prefill += [fleet.engine(f"p{at}", "kv_producer") for at in range(PREFILL)]
        fleet.decode += [fleet.engine(f"d{at}", "kv_consumer") for at in range(DECODE)]
        for engine in (*fleet.prefill, *fleet.decode):
            engine.await_ready()
        await_peers(fleet)
        urls = [engine.url for engine in fleet.decode]
        with router(urls, prefill=[engine.url for engine in fleet.prefill]) as front:
            killer = Killer(fleet, front)

            def ask(at: int) -> list[int] | str:
                # Every other answer is a stream, which may break off in the middle.
                killer.wait_turn(at)
                kind = stream_tokens if at % 2 else lambda *args: tokens(post(*args))
                try:
                    return kind(front, PATH, bodies[at])
                except Exception as error:
                    return repr(error)
                finally:
                    killer.done += 1

            try:
                with ThreadPoolExecutor(CLIENTS) as pool:
                    found = list(pool.map(ask, range(REQUESTS)))
                killer.thread.join()  # the last one starts again
            finally:
                killer.stop()
            transferred = metric(front, "slipstream_engine_prefills_total", outcome="transferred")
        lost = [text for text in found if isinstance(text, str)]
        wrong = [
            at
            for at in range(REQUESTS)
            if not isinstance(found[at], str) and found[at] != wanted[at]
        ]
        print(
            f"{REQUESTS} requests, kills {killer.kills}, {transferred:.0f} prompts transferred, "
            f"{len(lost)} lost, {len(wrong)} wrong"
        )
        assert len(killer.kills) == PREFILL + DECODE, killer.kills
        assert transferred > 0
        assert not lost and not wrong, (len(lost), lost[:3], len(wrong), wrong[:3])
    finally:
        for engine in (*fleet.prefill, *fleet.decode):
            engine.kill()
        shutil.rmtree(folder, ignore_errors=True)
