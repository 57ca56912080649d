"""How answers look in notebooks, and what is said if a package is missing."""

import html
import random
import re
import sys

import pytest
import slipstream as ss
from slipstream import _charts, _display, _optional


def small(requests: int = 200) -> ss.Workload:
    return ss.Workload(rate=20, isl=256, osl=32, requests=requests)


def texts(page: str) -> list[str]:
    """The cells and lines of a page."""
    return [html.unescape(text) for text in re.findall(r">([^<]+)<", page)]


def drawn_table(seed: int) -> tuple[str, list[list[str]]]:
    """A table as the command prints it, and its cells."""
    draw = random.Random(seed)
    columns = draw.randint(2, 7)
    words = ["", "a", "12", "1,234", "ms & s", "<b>", "3 prefill + 1", "99.9 %", "-", "…"]
    rows = [[draw.choice(words) for _ in range(columns)] for _ in range(draw.randint(0, 6))]
    header = [draw.choice(words[1:]) for _ in range(columns)]
    right = [draw.random() < 0.5 for _ in range(columns)]
    widths = [max(len(row[at]) for row in [header, *rows]) for at in range(columns)]

    def line(row: list[str]) -> str:
        cells = zip(row, widths, right, strict=True)
        padded = [text.rjust(width) if at else text.ljust(width) for text, width, at in cells]
        return "  ".join(padded).rstrip()

    rule = "  ".join("─" * width for width in widths)
    # A row of empty cells would be a blank line, which ends a table.
    rows = [row for row in rows if any(row)]
    return "\n".join([line(header), rule, *map(line, rows)]), [header, *rows]


@pytest.mark.parametrize("seed", range(200))
def test_a_printed_table_keeps_its_cells(seed: int) -> None:
    text, cells = drawn_table(seed)
    page = _display.rich(f"before\n\n{text}\n\nafter & more")
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    found = [
        [html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in rows
    ]
    assert found == cells, text
    assert texts(page)[0] == "before"
    assert texts(page)[-1] == "after & more"


def test_answers_are_tables_with_all_that_the_command_prints() -> None:
    result = ss.simulate(ss.Cluster(), small(), slo="ttft=1s")
    swept = ss.sweep(ss.Cluster(), small(), {"pool.main.workers": [1, 2]}, slo="ttft=1s")
    for answer, tables in ((result, 1), (swept, 1)):
        page = answer._repr_html_()
        assert page.count("<table") == tables
        assert "tabular-nums" in page
        # No word is lost.
        shown = " ".join(texts(page)).split()
        assert shown == [word for word in answer.text.split() if set(word) != {"─"}]
    rows = result.requests._repr_html_()
    assert "the first 20 of 200 rows" in rows
    assert rows.count("<tr>") == 21


def test_charts_have_the_figures() -> None:
    pytest.importorskip("plotly")
    result = ss.simulate(ss.Cluster(), small(1000), slo="ttft=1500ms,itl=50ms")
    values = sorted(result.requests.column("ttft_ms"))
    (line,) = result.plot("ttft").data
    assert line.x[0] == values[0]
    assert line.x[-1] == values[-1]
    assert line.y[-1] == 100
    assert len(line.x) <= _charts.POINTS_MAX
    # The share at each point is that of all requests up to it.
    for x, y in zip(line.x, line.y, strict=True):
        assert y == pytest.approx(100 * sum(value <= x for value in values) / len(values), abs=0.2)
    assert [shape.x0 for shape in result.plot("ttft").layout.shapes] == [1500]
    (gaps,) = result.plot("itl").data
    assert gaps.x[1] == result.summary()["latency"]["itl_ms"]["p50"]
    bare = ss.simulate(ss.Cluster(), small(), requests=False)
    assert len(bare.plot("e2e").data[0].x) == 7

    swept = ss.sweep(ss.Cluster(), small(), {"pool.main.workers": range(1, 5)}, slo="ttft=1s")
    others, front = swept.plot().data
    assert len(others.x) + len(front.x) == 4
    assert sorted(front.y) == sorted(row["goodput_per_s"] for row in swept.front())


@pytest.mark.parametrize(
    ("workload", "drawn"),
    [
        # Prompts that no worker can hold: every request fails.
        (ss.Workload(rate=5, isl=1_000_000, osl=5, requests=20), set()),
        # One token has no gap.
        (ss.Workload(rate=5, isl=100, osl=1, requests=20), {"ttft", "e2e"}),
        (ss.Workload(rate=5, isl=100, osl=2, requests=1), {"ttft", "e2e", "itl", "tpot"}),
    ],
)
def test_charts_of_odd_runs_say_what_is_missing(workload: ss.Workload, drawn: set[str]) -> None:
    pytest.importorskip("plotly")
    result = ss.simulate(ss.Cluster(), workload, slo="ttft=1s")
    assert "<table" in result._repr_html_() or not drawn
    for name in _charts.NAMES:
        figure = result.plot(name)
        assert bool(figure.data) == (name in drawn), name
        said = [note.text for note in figure.layout.annotations]
        assert any("no request has one" in text for text in said) == (name not in drawn)
    ss.sweep(ss.Cluster(), workload, {"pool.main.workers": [1, 2]}, slo="ttft=1s").plot().to_json()


def test_a_plan_without_an_answer_has_a_chart_that_says_so() -> None:
    pytest.importorskip("plotly")
    found = ss.plan(
        ss.Workload(rate=5, isl=100, osl=10, requests=20),
        slo="ttft=1us", model="llama-3.1-8b", gpus=["h100-sxm"], quick=True,
    )  # fmt: skip
    assert not found.found
    assert found.plot().layout.title.text == "Nothing attains"
    assert found.text.splitlines()[0] in html.unescape(found._repr_html_())


def test_objectives_of_a_latency_are_found() -> None:
    slo = "chat: ttft=500ms,itl=40ms; summaries: ttft=3s,e2e=1m"
    assert _charts.objectives(slo, "ttft") == {500, 3000}
    assert _charts.objectives(slo, "itl") == {40}
    assert _charts.objectives(slo, "e2e") == {60_000}
    assert _charts.objectives("", "tpot") == set()


@pytest.mark.parametrize(
    ("package", "ask"),
    [
        ("polars", lambda result: result.requests.to_polars()),
        ("pandas", lambda result: result.requests.to_pandas()),
        ("pyarrow", lambda result: result.requests.to_arrow()),
        ("plotly", lambda result: result.plot("ttft")),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str, ask) -> None:
    result = ss.simulate(ss.Cluster(), small(20))
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(ss.MissingPackageError, match=f"needs {package}.*pip install {package}"):
        ask(result)


def test_a_broken_package_reports_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        _optional.load("absent_package", "plot()")


def test_progress_in_a_notebook_is_one_output() -> None:
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        published: list[tuple[dict, bool]] = []
        shell.display_pub.publish = lambda data, **more: published.append(
            (data, more.get("update", False))
        )
        cell = _display.Cell()
        cell("1 of 3 runs ended")
        assert not published, "a quick question shows nothing"
        cell.begun -= 10
        for number in (1, 2, 3):
            cell(f"{number} of 3 runs ended")
        cell.clear()
        assert [update for _, update in published] == [False, True, True, True]
        assert published[-1][0]["text/html"] == ""
    finally:
        InteractiveShell.clear_instance()


def test_the_version_is_the_packages() -> None:
    from importlib import metadata

    assert ss.__version__ == metadata.version("slipstream")
