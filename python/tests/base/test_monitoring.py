"""Grafana's dashboards and Prometheus's rules: each query returns data from a server under load."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

FILES = Path(__file__).parents[3] / "packaging/helm/slipstream/files"
DASHBOARDS = sorted(FILES.glob("dashboards/*.json"))
RULES = FILES / "rules.yaml"
UNTIL_S = 60.0
"""Maximum time until a query has data."""


def tool(name: str) -> str:
    path = os.environ.get(name.upper()) or shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} (Debian: apt-get install prometheus), or name it by {name.upper()}")
    return path


def panels() -> list[tuple[str, str]]:
    """Title and query of every panel."""
    found = []
    for path in DASHBOARDS:
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            title = f"{path.stem}: {panel['title']}"
            found += [(title, target["expr"]) for target in panel["targets"]]
    return found


def rules() -> list[tuple[str, str, str]]:
    """Kind, name and query of every rule."""
    text = re.sub(r"expr: \|\n((?: {10,}.*\n)+)", joined, RULES.read_text(encoding="utf-8"))
    found = re.findall(r"- (record|alert): (\S+)\n +expr: (.+)", text)
    assert len(found) == text.count("expr: ")
    return found


def joined(match: re.Match[str]) -> str:
    return f"expr: {' '.join(match[1].split())}\n"


def left_side(query: str) -> str:
    """An alert's query without the comparison that makes it one, and the engines that it is for."""
    query = query.removesuffix(" and on (job, instance, engine) slipstream_engine_expected == 1")
    sides = re.split(r" (?:>|==) (?![^(]*\) >)", query)
    assert len(sides) == 2, query
    return sides[0]


@pytest.fixture(scope="module")
def fleet(start: Callable) -> Iterator[list[str]]:
    """A router in front of two modelled engines, under load; the addresses of all three."""
    engine = ("--speedup", "20")
    with (
        start(*engine) as one,
        start(*engine) as two,
        start("--engine", one.url, "--engine", two.url) as router,
    ):
        done = threading.Event()
        users = [threading.Thread(target=load, args=(router.url, done)) for _ in range(4)]
        for user in users:
            user.start()
        try:
            yield [one.url, two.url, router.url]
        finally:
            done.set()
            for user in users:
                user.join()


def load(url: str, done: threading.Event) -> None:
    """Chat until the end."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=30)
    model = client.models.list().data[0].id
    while not done.is_set():
        said = [{"role": "user", "content": "the same beginning " * 40}]
        stream = client.chat.completions.create(
            model=model, messages=said, max_tokens=8, stream=True
        )
        assert list(stream)


def page(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return answer.read().decode()


def names(query: str) -> set[str]:
    """The metrics of a query."""
    query = re.sub(r"\{.*?\}|\[.*?\]|\b(?:by|without) \(.*?\)", "", query)
    words = set(re.findall(r"[a-z][a-z0-9_]*(?::[a-z0-9_]+)*", query))
    return {word for word in words if "_" in word and word != "histogram_quantile"}


def test_each_metric_is_published(fleet: list[str]) -> None:
    published = {
        sample.name
        for url in fleet
        for family in text_string_to_metric_families(page(url))
        for sample in family.samples
    }
    recorded = {name for kind, name, _ in rules() if kind == "record"}
    queries = [*panels(), *((name, query) for _, name, query in rules())]
    assert len(queries) > 50
    wrong = [
        f"{title}: {name}"
        for title, query in queries
        for name in names(query) - recorded
        if name not in published
    ]
    assert not wrong, "\n".join(wrong)


def test_rules_are_valid() -> None:
    ran = subprocess.run(
        [tool("promtool"), "check", "rules", RULES], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(rules())} rules found" in ran.stdout


@pytest.fixture(scope="module")
def ask(fleet: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """A Prometheus that scrapes the fleet each second: values of a query."""
    command, folder = tool("prometheus"), tmp_path_factory.mktemp("prometheus")
    # Five minutes of data would take five minutes.
    text = RULES.read_text(encoding="utf-8").replace("[5m]", "[10s]").replace("[10m]", "[10s]")
    (folder / "rules.yaml").write_text(text, encoding="utf-8")
    targets = [url.removeprefix("http://") for url in fleet]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "slipstream", "static_configs": [{"targets": targets}]}],
    }
    # JSON is YAML.
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            command,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ],
        stdout=log,
        stderr=log,
    )

    def values(query: str) -> list[float]:
        text = urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/query?{text}", timeout=30) as got:
                data = json.load(got)["data"]["result"]
        except urllib.error.HTTPError as error:
            # It may not be ready; a wrong query is never right.
            if error.code != 503:
                raise AssertionError(f"{query}: {error.read().decode()}") from None
            return []
        except urllib.error.URLError:
            assert process.poll() is None, (folder / "log").read_text()
            return []
        return [float(row["value"][1]) for row in data]

    try:
        yield values
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def without_data(queries: list[tuple[str, str]], ask: Callable) -> list[str]:
    """The queries without a value that is a number, once all others have one."""
    until, left = time.monotonic() + UNTIL_S, queries
    while left and time.monotonic() < until:
        left = [(title, query) for title, query in left if not any(v == v for v in ask(query))]
        # Prometheus scrapes each second.
        threading.Event().wait(0.5)
    return [f"{title}: {query}" for title, query in left]


def test_each_panel_has_data(ask: Callable) -> None:
    queries = [
        (
            title,
            query.replace("$__rate_interval", "10s")
            .replace("$job", ".*")
            .replace("$instance", ".*"),
        )
        for title, query in panels()
    ]
    assert not without_data(queries, ask)


def test_each_rule_has_data(ask: Callable) -> None:
    queries = []
    for kind, name, query in rules():
        if kind == "record":
            queries.append((name, name))
        else:
            query = re.sub(r"\[\d+m\]", "[10s]", query)
            queries += [(name, left_side(query))]
    assert not without_data(queries, ask)


def test_dashboards_are_ones_that_grafana_imports() -> None:
    assert len({json.loads(path.read_text())["uid"] for path in DASHBOARDS}) == len(DASHBOARDS) == 2
    for path in DASHBOARDS:
        board = json.loads(path.read_text(encoding="utf-8"))
        variables = {variable["name"] for variable in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?([a-z]+)\b", json.dumps(board["panels"])))
        assert used == variables == {"datasource", "job", "instance"}
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        # No two panels share a place.
        places = [
            (x, y)
            for panel in board["panels"]
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]
        assert len(set(places)) == len(places)
        assert max(x for x, _ in places) < 24


ILL = {
    "SlipstreamNoEngine": {
        'slipstream_engine_up{engine="e"}': "0x40",
        'slipstream_engine_expected{engine="e"}': "1x40",
        'slipstream_engine_up{engine="mirror"}': "1x40",
        'slipstream_engine_expected{engine="mirror"}': "0x40",
    },
    "SlipstreamEngineDown": {
        'slipstream_engine_up{engine="e"}': "0x40",
        'slipstream_engine_expected{engine="e"}': "1x40",
        'slipstream_engine_up{engine="f"}': "1x40",
        'slipstream_engine_expected{engine="f"}': "1x40",
    },
    "SlipstreamEngineFails": {
        'slipstream_engine_failures_total{engine="e",cause="lost"}': "0+1x40",
        'slipstream_engine_requests_total{engine="e"}': "0+10x40",
        'slipstream_engine_expected{engine="e"}': "1x40",
    },
    "SlipstreamRefusesRequests": {
        'slipstream_requests_rejected_total{reason="busy"}': "0+1x40",
        "slipstream_http_requests_total": "0+10x40",
    },
    "SlipstreamStreamsLost": {"slipstream_streams_lost_total": "0x35 1x5"},
    "SlipstreamAnswersBroken": {
        'slipstream_engine_answers_broken_total{engine="e"}': "0x35 1x5",
        'slipstream_engine_expected{engine="e"}': "1x40",
    },
    "SlipstreamMemoryFull": {
        "slipstream_memory_used_bytes": "88x40",
        "slipstream_memory_max_bytes": "100x40",
    },
    "SlipstreamConnectionsFull": {
        "slipstream_connections_open": "88x40",
        "slipstream_connections_max": "100x40",
    },
    "SlipstreamRequestsWait": {
        'vllm:num_requests_waiting{worker="w0"}': "9x40",
        'vllm:num_requests_running{worker="w0"}': "8x40",
    },
}
"""Series, a value per minute, of servers that have each fault."""

WELL = {
    'slipstream_engine_up{engine="e"}': "1x40",
    'slipstream_engine_expected{engine="e"}': "1x40",
    'slipstream_engine_failures_total{engine="e",cause="lost"}': "0+1x40",
    'slipstream_engine_requests_total{engine="e"}': "0+100x40",
    'slipstream_requests_rejected_total{reason="busy"}': "0+1x40",
    "slipstream_http_requests_total": "0+100x40",
    "slipstream_streams_lost_total": "3x40",
    'slipstream_engine_answers_broken_total{engine="e"}': "3x40",
    "slipstream_memory_used_bytes": "75x40",
    "slipstream_memory_max_bytes": "100x40",
    "slipstream_connections_open": "75x40",
    "slipstream_connections_max": "100x40",
    'vllm:num_requests_waiting{worker="w0"}': "3x40",
    'vllm:num_requests_running{worker="w0"}': "8x40",
}
"""A server with a few failures."""


NOT_EXPECTED = {
    'slipstream_engine_up{engine="x"}': "0x40",
    'slipstream_engine_expected{engine="x"}': "0x40",
    'slipstream_engine_failures_total{engine="x",cause="lost"}': "0+10x40",
    'slipstream_engine_requests_total{engine="x"}': "0+10x40",
    'slipstream_engine_answers_broken_total{engine="x"}': "0x35 1x5",
}
"""A mirror or a drained engine that is down and fails whatever is sent there."""


def at_home(series: str) -> str:
    """A series with the labels of a scrape."""
    name, _, labels = series.partition("{")
    own = 'job="slipstream",instance="a:8000",pod="p"'
    return f"{name}{{{own}{',' + labels[:-1] if labels else ''}}}"


def test_alerts_fire_for_their_fault_alone(tmp_path: Path) -> None:
    alerts = {name for kind, name, _ in rules() if kind == "alert"}
    assert set(ILL) == alerts

    def case(name: str, series: dict[str, str], firing: set[str]) -> dict:
        state = 'ALERTS{alertstate="firing"}'
        return {
            "name": name,
            "interval": "1m",
            "input_series": [{"series": at_home(n), "values": v} for n, v in series.items()],
            "promql_expr_test": [
                {
                    "expr": f"count by (alertname) ({state})",
                    "eval_time": "40m",
                    "exp_samples": [
                        {"labels": f'{{alertname="{alert}"}}', "value": 1}
                        for alert in sorted(firing)
                    ],
                }
            ],
        }

    # Without an engine, each is down.
    also = {"SlipstreamNoEngine": {"SlipstreamEngineDown"}}
    cases = [case(name, series, {name} | also.get(name, set())) for name, series in ILL.items()]
    cases.append(case("well", WELL, set()))
    cases.append(case("not expected", WELL | NOT_EXPECTED, set()))
    file = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": cases}
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps(file), encoding="utf-8")
    ran = subprocess.run([tool("promtool"), "test", "rules", path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
