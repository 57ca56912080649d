"""Every page of metrics, read by others: prometheus_client's parsers, promtool and Prometheus."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

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


@pytest.mark.parametrize("which", ["server", "router"])
def test_strict_parsers_read_the_page_in_both_formats(pages, which):
    kind, text = page(pages[which])
    assert kind == TEXT
    kind, strict = page(pages[which], "application/openmetrics-text; version=1.0.0")
    assert kind == OPEN
    families = {family.name: family for family in read_open(strict)}
    also = {family.name: family for family in read_text(text)}
    assert families.keys() == also.keys()
    assert len(families) > 20
    for family in families.values():
        assert family.documentation, family.name
        if family.type != "histogram":
            continue
        ends = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
        assert ends and ends[-1] == "+Inf", family.name
    if which == "server":
        names = {
            sample.labels.get("model_name")
            for family in families.values()
            for sample in family.samples
        }
        assert ODD in names


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
