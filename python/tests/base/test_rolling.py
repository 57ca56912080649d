"""Processes are replaced one after the other under official clients that do not retry."""

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import openai

ROLLS = int(os.environ.get("SLIPSTREAM_ROLLS", "1"))
"""How often each process is replaced."""

CLUSTER = (
    "--set=model.name=test-model",
    "--set=pool.main.workers=2",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=2000000",
    "--set=engine.num_gpu_blocks=8192",
    "--set=engine.max_model_len=4096",
)
START_S = 60.0


class Process:
    """A frontend or a worker."""

    def __init__(self, binary: Path, *args: str):
        self.process = subprocess.Popen([binary, *args], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        self.line = self.process.stdout.readline().strip() if ready else ""
        assert self.line, f"not ready after {START_S} s"

    def stop(self) -> None:
        """End it as a service manager does."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        """End it if it runs."""
        self.process.kill()
        self.process.wait()


class Load:
    """Clients in closed loops, each with a thread."""

    def __init__(self, url: str):
        self.url, self.over = url, threading.Event()
        self.faults: list[str] = []
        kinds = (self.ask, self.ask_anew, self.stream, self.stream_anew) * 2
        self.answers = [0] * len(kinds)
        self.threads = [
            threading.Thread(target=self.run, args=(n, kind)) for n, kind in enumerate(kinds)
        ]
        for thread in self.threads:
            thread.start()

    def client(self) -> openai.OpenAI:
        """A client with connections of its own, that does not retry."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def run(self, n: int, kind: Callable[[openai.OpenAI], None]) -> None:
        """Repeat a request until the end."""
        client = self.client()
        while not self.over.is_set():
            try:
                kind(client)
            except Exception as error:
                self.faults.append(f"{kind.__name__}: {error!r}")
            self.answers[n] += 1

    def ask(self, client: openai.OpenAI) -> None:
        """A request on a connection that is kept."""
        answer = client.completions.create(
            model="test-model", prompt="a b c", max_tokens=4, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == 4

    def ask_anew(self, _: openai.OpenAI) -> None:
        """A request on a new connection."""
        with self.client() as client:
            self.ask(client)

    def stream(self, client: openai.OpenAI) -> None:
        """A stream on a connection that is kept."""
        stream = client.completions.create(
            model="test-model",
            prompt="a b c",
            max_tokens=150,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        usage = [event.usage for event in stream if event.usage]
        assert usage[-1].completion_tokens == 150

    def stream_anew(self, _: openai.OpenAI) -> None:
        """A stream on a new connection."""
        with self.client() as client:
            self.stream(client)

    def more(self) -> None:
        """Wait until each client has had two further answers."""
        before, deadline = list(self.answers), time.monotonic() + START_S
        while min(now - then for now, then in zip(self.answers, before, strict=True)) < 2:
            assert time.monotonic() < deadline, f"clients wait: {before}, {self.answers}"
            self.over.wait(0.01)

    def await_ranks(self, ranks: int) -> None:
        """Wait until so many are ready."""
        deadline = time.monotonic() + START_S
        with self.client() as client:
            ready = 0
            while ready < ranks:
                assert time.monotonic() < deadline, f"{ready} of {ranks} ranks are ready"
                health = client.get("/../health", cast_to=object)
                ready = sum(rank["ready"] for rank in health["ranks"])

    def end(self) -> None:
        """Stop the clients."""
        self.over.set()
        for thread in self.threads:
            thread.join()


def test_every_process_is_replaced_and_no_request_of_an_official_client_fails(binary, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = (*CLUSTER, "--discovery", str(tmp_path))
    frontend = ("frontend", *common, "--set=live.reuse_port=true", "--listen", address)
    workers = [("worker", *common, f"--index={n}") for n in range(2)]
    running = {args: Process(binary, *args) for args in (*workers, frontend)}
    load = Load(f"http://{address}")
    try:
        for _ in range(ROLLS):
            load.more()
            # The new one first: clients are divided among both until the old one ends.
            running[frontend], old = Process(binary, *frontend), running[frontend]
            load.more()
            old.stop()
            for args in workers:
                load.more()
                running[args].stop()
                running[args] = Process(binary, *args)
                load.await_ranks(2)
        load.more()
    finally:
        load.end()
        for process in running.values():
            process.kill()
    print(f"{sum(load.answers)} requests, {len(load.faults)} failed")
    assert not load.faults, load.faults[:5]
