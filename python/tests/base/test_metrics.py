"""Every page of metrics, read by others: prometheus_client's parsers, promtool and Prometheus."""

import contextlib
import json
import os
import queue
import random
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import FAST, running
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_text

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"
ODD = 'a\\b"c{d}=e,é'
"""A model's name with all that a label's value must escape."""


def page(url: str, accept: str | None = None) -> tuple[str, str]:
    headers = {} if accept is None else {"Accept": accept}
    request = urllib.request.Request(f"{url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def ask(url: str, count: int = 5) -> None:
    for at in range(count):
        body = {"prompt": f"prompt {at}", "max_tokens": 4 + at, "stream": at % 2 == 1}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Request-Id": "odd'id"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
    # A request that is refused counts as well.
    with pytest.raises(urllib.error.HTTPError):
        request = urllib.request.Request(f"{url}/v1/completions", b'{"prompt": 1e999}')
        urllib.request.urlopen(request, timeout=30)


@pytest.fixture(scope="module")
def pages(binary):
    """Addresses of a modelled server under load, and of a router in front of it."""
    with running(binary, *FAST, "--set", f"model.name={json.dumps(ODD)}") as engine:
        ask(engine.url)
        with running(binary, "--engine", engine.url) as router:
            deadline = time.monotonic() + 30
            while True:
                try:
                    ask(router.url)
                    break
                except urllib.error.HTTPError:
                    assert time.monotonic() < deadline
            yield {"server": engine.url, "router": router.url}


def check_page(url: str) -> dict[str, set[str]]:
    """Read the page in both formats by the parsers; return the values of each label."""
    kind, text = page(url)
    assert kind == TEXT
    kind, strict = page(url, "application/openmetrics-text; version=1.0.0")
    assert kind == OPEN
    families = {family.name: family for family in read_open(strict)}
    also = {family.name: family for family in read_text(text)}
    assert families.keys() == also.keys()
    values: dict[str, set[str]] = {}
    for family in families.values():
        assert family.documentation, family.name
        for sample in family.samples:
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
        if family.type == "histogram":
            ends = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
            assert ends and ends[-1] == "+Inf", family.name
    plain: dict[str, set[str]] = {}
    for family in also.values():
        for sample in family.samples:
            for label, value in sample.labels.items():
                plain.setdefault(label, set()).add(value)
    assert plain.keys() == values.keys()
    for label in plain.keys() - {"le"}:
        assert plain[label] == values[label], label
    return values


@pytest.mark.parametrize("which", ["server", "router"])
def test_strict_parsers_read_the_page_in_both_formats(pages, which):
    values = check_page(pages[which])
    if which == "server":
        assert ODD in values["model_name"]


SEED = int(os.environ.get("SLIPSTREAM_METRICS_SEED", "1"))
DRAWS = int(os.environ.get("SLIPSTREAM_METRICS_DRAWS", "2"))
"""Each draw starts four processes."""
PIECES = [
    '"', "\\", "\\n", "\n", "\r", "\t", "é", "🙂", "{", "}", ",", "=", "#", " ", "\x1b", "\x7f",
    "\x85", "\u2028", "\u202e", "\ufffd", "le", "+Inf", "# EOF", "name=\"x\"", "a", "B9",
]  # fmt: skip


def drawn(seed: str) -> str:
    """A name of a model."""
    draw = random.Random(seed)
    return "m" + "".join(draw.choices(PIECES, k=draw.randrange(1, 12)))


def quoted(text: str) -> str:
    """A TOML string."""
    return '"' + "".join(f"\\U{ord(each):08X}" for each in text) + '"'


@contextlib.contextmanager
def started(binary: Path, *args: str) -> Iterator[str]:
    """A frontend, or a worker with `--metrics`; its address."""
    process = subprocess.Popen(
        [binary, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(
            target=lambda: [lines.put(line) for line in process.stdout or ()], daemon=True
        ).start()
        url = ""
        while not url:
            line = lines.get(timeout=60)
            if "listening on http://" in line or "metrics at http://" in line:
                url = line[line.index("http://") :].strip().removesuffix("/metrics")
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("draw", range(DRAWS))
def test_pages_of_every_process_are_read_whatever_the_model_is_called(
    binary: Path, tmp_path: Path, draw: int
) -> None:
    model = drawn(f"{SEED}.{draw}.model")
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        f"model.name = {quoted(model)}\n[pool.main]\nworkers = 2\n"
        "[live]\nspeedup = 0\nlisten = '127.0.0.1:0'\n"
    )
    shared = (str(cluster), "--discovery", str(tmp_path / "discovery"))
    (tmp_path / "discovery").mkdir()
    with (
        started(binary, "frontend", *shared) as one,
        started(binary, "frontend", *shared) as two,
        started(binary, "worker", *shared, "--metrics", "127.0.0.1:0") as worker,
    ):
        for url in (one, two):
            deadline = time.monotonic() + 30
            while True:
                with contextlib.suppress(urllib.error.HTTPError):
                    ask(url)
                    break
                assert time.monotonic() < deadline
        for url in (one, two, worker):
            assert check_page(url)["model_name"] == {model}


def strange_engine(names: list[str]) -> type[BaseHTTPRequestHandler]:
    """An engine with models of these names, as JSON strings."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def say(self, body: str, kind: str = "application/json") -> None:
            raw = body.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                each = ",".join(f'{{"id": {name}, "owned_by": "vllm"}}' for name in names)
                self.say(f'{{"object": "list", "data": [{each}]}}')
            else:
                self.say(
                    'vllm:num_requests_running{model_name="\\"\\\\",engine="x\\ny"} 1\n',
                    "text/plain",
                )

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            usage = '"usage": {"prompt_tokens": 1, "completion_tokens": 1}'
            self.say(f'{{"model": {names[0]}, "choices": [{{"text": "x"}}], {usage}}}')

    return Handler


@pytest.mark.parametrize("draw", range(DRAWS))
def test_a_routers_page_is_read_whatever_its_engines_say(binary: Path, draw: int) -> None:
    names = [json.dumps(drawn(f"{SEED}.{draw}.{at}")) for at in range(4)]
    # Neither is a model's name of UTF-8 text.
    names += ['""', '"\\ud800"', '"\\u0000"', "null", "7"]
    engine = ThreadingHTTPServer(("127.0.0.1", 0), strange_engine(names))
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{engine.server_address[1]}"
    try:
        with running(binary, "--engine", url) as router:
            asked = 0
            for name in [*names, '"unknown \\" \\n"']:
                body = f'{{"model": {name}, "prompt": "x", "max_tokens": 1}}'.encode()
                headers = {"Content-Type": "application/json", "X-Slipstream-Worker": '"x\\'}
                request = urllib.request.Request(f"{router.url}/v1/completions", body, headers)
                with contextlib.suppress(urllib.error.HTTPError):
                    urllib.request.urlopen(request, timeout=30).read()
                    asked += 1
            values = check_page(router.url)
            assert any(url.endswith(each.removeprefix("http://")) for each in values["engine"])
            assert router.process.poll() is None
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, TEXT),
        ("*/*", TEXT),
        ("text/plain;version=0.0.4", TEXT),
        ("application/openmetrics-text;q=0.4,text/plain;q=0.6", TEXT),
        ("application/openmetrics-text;q=0.6,text/plain;q=0.4", OPEN),
    ],
)
def test_the_header_accept_chooses(pages, accept, kind):
    assert page(pages["server"], accept)[0] == kind


@pytest.mark.parametrize("which", ["server", "router"])
def test_promtool_has_nothing_to_say_about_our_own_names(pages, which):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    text = page(pages[which])[1]
    run = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    # vLLM's names, which clients of vLLM read, break the conventions of names.
    ours = [line for line in run.stderr.splitlines() if not line.startswith("vllm:")]
    assert not ours, ours
    assert run.returncode in (0, 3)


def test_prometheus_scrapes_every_page(pages, tmp_path):
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not installed (Debian: apt install prometheus)")
    targets = [url.removeprefix("http://") for url in pages.values()]
    config = tmp_path / "prometheus.yml"
    scrape = {
        "job_name": "slipstream",
        "scrape_interval": "1s",
        "static_configs": [{"targets": targets}],
    }
    config.write_text(json.dumps({"scrape_configs": [scrape]}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [
            prometheus,
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address={address}",
        ],
        stderr=subprocess.DEVNULL,
    )

    def query(text: str) -> list[dict]:
        url = f"http://{address}/api/v1/query?query={urllib.parse.quote(text)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]["result"]

    try:
        deadline = time.monotonic() + 60
        up = []
        while len(up) < len(targets) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # it is starting
                up = [of for of in query("up") if of["value"][1] == "1"]
            # Pauses, and ends the test if Prometheus has ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"prometheus ended: {process.wait(timeout=0.1)}")
        assert len(up) == len(targets)
        name = "vllm:iteration_tokens_total_bucket"
        (quantile,) = query(f'histogram_quantile(0.99, sum by (le) ({{__name__="{name}"}}))')
        assert float(quantile["value"][1]) > 0
    finally:
        process.terminate()
        process.wait(timeout=30)
