"""`import slipstream`: the same answers as the command's, in Python's types."""

import csv
import doctest
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import slipstream as ss
from slipstream import api, results, sources

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "examples/cluster.toml"
CHAT = ROOT / "examples/chat.workload.toml"


def command(binary: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([binary, *args], capture_output=True, text=True, timeout=120, cwd=ROOT)


def small(requests: int = 200, **options: float) -> ss.Workload:
    return ss.Workload(rate=20, isl=256, osl=32, requests=requests, seed=3, **options)


@pytest.mark.parametrize("module", [ss, api, results, sources])
def test_examples_of_docstrings_run(module) -> None:
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


def test_simulate_gives_the_figures_of_the_command(binary: Path, tmp_path: Path) -> None:
    drag = tmp_path / "drag.csv"
    sets = ("--set", "pool.main.workers=3", "--workload-set", "requests=300")
    ran = command(
        binary, "simulate", CLUSTER, "--workload", CHAT, *sets, "--slo", "ttft=500ms,itl=30ms",
        "--seed", "7", "--json", "--drag", drag,
    )  # fmt: skip
    theirs = json.loads(ran.stdout)
    cluster = ss.Cluster.read(CLUSTER).set("pool.main.workers", 3)
    workload = ss.Workload.read(CHAT).set({"requests": 300})
    result = ss.simulate(cluster, workload, slo="ttft=500ms,itl=30ms", seed=7)
    ours = result.summary()
    assert result.digest == theirs["simulation"]["digest"]
    # The line about the model as it was read comes first, as on stderr.
    assert result.notes[0] == ran.stderr.splitlines()[0]
    assert "of KV cache per token" in result.notes[0]
    for figures in (ours, theirs):
        figures.pop("client", None)
        figures["simulation"].pop("wall_s")
    assert ours == theirs
    # Each request's latencies, by the stages that the command records.
    table = result.requests.to_dict()
    rows = {row["id"]: row for row in csv.DictReader(drag.open())}
    assert len(table["id"]) == len(rows) == 300
    for at, name in enumerate(table["id"]):
        row = rows[name]
        due, first = int(row["due"]), int(row["client_recv"])
        assert table["ttft_ms"][at] == pytest.approx((first - due) / 1e6)
        assert table["e2e_ms"][at] == pytest.approx((int(row["last_client_recv"]) - due) / 1e6)
        assert table["worker"][at] == int(row["worker"])
        assert table["output_tokens"][at] == int(row["osl"])


def test_an_overload_is_reported() -> None:
    # One request at a time, for 100 ms: ten tokens of 10 ms.
    cluster = ss.Cluster.parse(
        "engine.max_num_seqs = 1\nengine.timing.kind = 'constant'\n"
        "engine.timing.step_ns = 10_000_000\npool.main.workers = 1\n"
    )

    def simulate(**load: int) -> ss.Result:
        return ss.simulate(cluster, ss.Workload(isl=64, osl=10, requests=600, **load))

    over = simulate(rate=600)
    found = over.summary()["overloaded"]
    assert found["offered_per_s"] > 40 * found["served_per_s"] > 0
    assert 0 <= found["since_s"] < 0.5
    assert "\noverloaded since" in over.text
    # A closed loop waits for its answers.
    for calm in (simulate(rate=3), simulate(concurrency=100)):
        assert "overloaded" not in calm.summary()
        assert "overloaded" not in calm.text


def test_sweep_gives_the_rows_of_the_command(binary: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep.csv"
    ran = command(
        binary, "sweep", CLUSTER, "--rate", "20", "--isl", "256", "--osl", "32",
        "--requests", "100", "--seeds", "2", "--slo", "ttft=200ms", "--attain", "90%",
        "--vary", "pool.main.workers=1..3", "--vary", "load=0.5,2",
        "--price", "h100-sxm=2.5", "--out", out,
    )  # fmt: skip
    swept = ss.sweep(
        ss.Cluster.read(CLUSTER),
        ss.Workload(rate=20, isl=256, osl=32, requests=100),
        {"pool.main.workers": range(1, 4), "load": [0.5, 2]},
        slo="ttft=200ms",
        attain="90%",
        seeds=2,
        prices={"h100-sxm": 2.5},
    )
    assert ran.returncode == 0, ran.stderr
    assert swept.text == ran.stdout
    theirs = list(csv.DictReader(out.open()))
    ours = swept.table.to_dict()
    assert [row["digest"] for row in theirs] == ours["digest"]
    assert len(set(ours["digest"])) == 6
    assert [row["goodput_per_s"] for row in theirs] == [str(x) for x in ours["goodput_per_s"]]
    assert {row["pool.main.workers"] for row in swept.front()} <= {"1", "2", "3"}


def test_plan_gives_the_answer_of_the_command(binary: Path, tmp_path: Path) -> None:
    flags = ("--rate", "4", "--isl", "512", "--osl", "64", "--requests", "60")
    ran = command(
        binary, "plan", *flags, "--slo", "ttft=1s,itl=30ms", "--model", "llama-3.1-8b",
        "--gpus", "h100-sxm,l40s", "--price", "h100-sxm=2.5", "--price", "l40s=0.9",
        "--tensor-parallel", "1,2", "--max-num-seqs", "256,64", "--max-num-batched-tokens", "8192",
        "--max-gpus", "8", "--json", "--html", tmp_path / "plan.html",
    )  # fmt: skip
    found = ss.plan(
        ss.Workload(rate=4, isl=512, osl=64, requests=60),
        slo="ttft=1s,itl=30ms",
        model="llama-3.1-8b",
        gpus=["h100-sxm", "l40s"],
        prices={"h100-sxm": 2.5, "l40s": 0.9},
        tensor_parallel=[1, 2],
        max_num_seqs=[256, 64],
        max_num_batched_tokens=[8192],
        max_gpus=8,
    )
    assert ran.returncode == 0, ran.stderr
    assert found.summary() == json.loads(ran.stdout)
    again = ss.simulate(
        found.cluster(), ss.Workload(rate=4, isl=512, osl=64, requests=60), slo="ttft=1s,itl=30ms"
    )
    assert again.digest == found.answers[0]["answer"]["digest"]


def test_predict_gives_the_table_of_the_command(binary: Path, tmp_path: Path) -> None:
    columns = {
        "id": ["a,b", "c"],
        "model_path": ["meta-llama/Llama-3.1-70B", "acme/unknown"],
        "system": ["h200_sxm", "h200_sxm"],
        "backend": ["vllm", "vllm"],
        "precision": ["fp8", "fp8"],
        "isl": [1024, 1024],
        "osl": [1024, 1024],
        "batch_size": [16, None],
        "tp_size": [8, 8],
    }
    path = tmp_path / "deployments.csv"
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    theirs = list(csv.DictReader(command(binary, "predict", path).stdout.splitlines()))
    polars, pandas = pytest.importorskip("polars"), pytest.importorskip("pandas")
    pyarrow = pytest.importorskip("pyarrow")
    for table in (
        path,
        columns,
        *(m(columns) for m in (polars.DataFrame, pandas.DataFrame, pyarrow.table)),
    ):
        ours = ss.predict(table).to_dict()
        assert ours["id"] == [row["id"] for row in theirs] == ["a,b", "c"]
        assert f"{ours['ttft_ms'][0]:.4f}" == theirs[0]["ttft_ms"]
        assert ours["ttft_ms"][1] is None
        assert ours["reason"] == [None, "unknown model: acme/unknown"]


def test_arrow_consumers_get_the_values_without_a_copy() -> None:
    polars, pandas = pytest.importorskip("polars"), pytest.importorskip("pandas")
    pyarrow = pytest.importorskip("pyarrow")
    # A crash without retries: some requests fail, and have no latency.
    cluster = ss.Cluster.read(ROOT / "examples/cluster-faults.toml").set("router.resumes_max", 0)
    table = ss.simulate(cluster, ss.Workload(rate=60, requests=2000, seed=1)).requests
    values = table.to_dict()
    assert None in values["ttft_ms"], "some failed"
    for frame in (table.to_polars(), table.to_arrow(), polars.DataFrame(table)):
        lists = frame.to_pydict() if hasattr(frame, "to_pydict") else frame.to_dict(as_series=False)
        assert lists == values
    assert table.to_pandas()["input_tokens"].tolist() == values["input_tokens"]
    assert isinstance(table.to_pandas(), pandas.DataFrame)
    first, second = (pyarrow.table(table)["e2e_ms"].chunk(0).buffers()[1] for _ in range(2))
    assert first.address == second.address, "both consumers see our memory"
    # The memory lives as long as a consumer.
    frame = pyarrow.table(table)
    del table
    assert frame["id"].to_pylist() == values["id"]
    frame.validate(full=True)
    schema = pyarrow.schema(ss.simulate(cluster, ss.Workload(requests=5)).requests)
    assert schema.names == list(values)


def test_objects_pickle() -> None:
    cluster = ss.Cluster.read(CLUSTER).set("pool.main.workers", 2)
    workload = small()
    assert pickle.loads(pickle.dumps((cluster, workload))) == (cluster, workload)
    result = ss.simulate(cluster, workload)
    again = pickle.loads(pickle.dumps(result))
    assert again.summary() == result.summary()
    assert again.requests.to_dict() == result.requests.to_dict()
    swept = ss.sweep(cluster, workload, {"pool.main.workers": "1..2"})
    assert pickle.loads(pickle.dumps(swept)).table.to_dict() == swept.table.to_dict()
    with pytest.raises(ValueError, match="broken"):
        ss._native.Table._of_buffers(3, [("t", "text", [b"\0" * 8, b""], None)])


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda: ss.Cluster.read("/none/cluster.toml"), ss.MissingFileError, "/none/cluster.toml"),
        (lambda: ss.Cluster().set("pool.main.worker", 2), ss.ConfigError, "workers"),
        (lambda: ss.Cluster().set("pool.main.workers", "many"), ss.ConfigError, "workers"),
        (lambda: ss.Cluster().set("pool.main.workers", object()), TypeError, "no value of a key"),
        (lambda: ss.Cluster.parse("[engine"), ss.ConfigError, "cluster:1:8: unclosed"),
        (lambda: ss.Workload(rate=-1), ss.QuestionError, "rate is -1, but must be 1e-08 to"),
        (lambda: ss.Workload(rate=1e-320), ss.QuestionError, "rate is 1e-320"),
        (lambda: ss.Workload(requests=0), ss.QuestionError, "requests is 0, but must be 1 to"),
        (lambda: ss.Workload(concurrency=0), ss.QuestionError, "concurrency is 0"),
        (lambda: ss.Workload(isl=0), ss.QuestionError, "isl is 0"),
        (lambda: ss.Workload(osl=0), ss.QuestionError, "osl is 0"),
        (lambda: ss.Workload(duration_s=0), ss.QuestionError, "duration_s is 0"),
        (lambda: ss.Workload(time_scale=-1), ss.QuestionError, "time_scale is -1"),
        (lambda: ss.Cluster.read(b"/x"), ss.QuestionError, "path is b'/x'"),
        (lambda: ss.Workload.read(5), ss.QuestionError, "path is 5"),
        (lambda: ss.simulate(ss.Cluster(), small(), progress="x"), ss.QuestionError, "progress is"),
        (
            lambda: ss.simulate(ss.Cluster(), small(), slo="ttft=1ms,ttft=1s"),
            ss.QuestionError,
            "`ttft` is stated twice",
        ),
        (lambda: ss.Workload(rate="1"), TypeError, "rate is '1'"),
        (lambda: ss.Workload(rate=1, concurrency=2), ss.QuestionError, "two kinds of load"),
        (lambda: ss.Workload(requests=-1), ss.QuestionError, "requests is -1"),
        (lambda: ss.Workload(rate=1).set("osl", 3), ss.QuestionError, "there is none"),
        (lambda: ss.Workload.parse("isl = 'x'"), ss.ConfigError, "isl"),
        (lambda: ss.Trace.read("/none.jsonl"), ss.MissingFileError, "/none.jsonl"),
        (lambda: ss.simulate("cluster.toml", small()), TypeError, "Cluster.read"),
        (lambda: ss.simulate(ss.Cluster(), small(), slo="ttft=1"), ss.Error, "--slo ttft=1: `1`"),
        (lambda: ss.simulate(ss.Cluster(), small(), speedup=0), ss.QuestionError, "--speedup is 0"),
        (lambda: ss.simulate(ss.Cluster(), small(), threads=0), ss.QuestionError, "threads is 0"),
        (lambda: ss.simulate(ss.Cluster(), small(), requests=False).requests, ss.Error, "not kept"),
        (lambda: ss.simulate(ss.Cluster(), small()).plot("x"), ss.QuestionError, "ttft"),
        (lambda: ss.sweep(ss.Cluster(), small(), {}), ss.QuestionError, "vary is empty"),
        (lambda: ss.sweep(ss.Cluster(), small(), {"load": [0]}), ss.QuestionError, "not a factor"),
        (lambda: ss.sweep(ss.Cluster(), small(), {"load": 1}), TypeError, "must be a list"),
        (lambda: ss.sweep(ss.Cluster(), small(), {"load": [1, 1.0]}), ss.Error, "1 and 1.0"),
        (lambda: ss.sweep(ss.Cluster(), small(), {"load": [1]}, on="http://x"), ss.Error, "ray://"),
        (lambda: ss.plan(small()), ss.QuestionError, "no objective"),
        (lambda: ss.plan(small(), slo="ttft=1s", policies=["x"]), ss.QuestionError, "`x`"),
        (lambda: ss.plan(small(), slo="ttft=1s", gpus=["l4", "l4"]), ss.QuestionError, "l4 twice"),
        (lambda: ss.plan(small(), slo="ttft=1s", load=[1, 1]), ss.QuestionError, "1 twice"),
        (lambda: ss.plan(small(), slo="ttft=1s", gpus="h100-sxm"), TypeError, "must be a list"),
        (lambda: ss.predict({"id": [1], "isl": [1, 2]}), ValueError, "different lengths"),
        (lambda: ss.predict(3), TypeError, "no table"),
    ],
)  # fmt: skip
def test_wrong_input_raises_its_error(ask, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        ask()
    assert text in str(raised.value)


def test_an_error_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The question is over: nothing is left to stop, however long that may take.
    monkeypatch.setattr(api, "STOP_S", 1e9)
    with pytest.raises(ss.QuestionError, match="--speedup"):
        ss.simulate(ss.Cluster(), small(), speedup=0)


def test_errors_have_the_texts_of_the_command(binary: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[pool.main]\nworkers = 0\n[router]\npolicy = 'best'\n")
    ran = command(binary, "simulate", path, "--rate", "1")
    with pytest.raises(ss.ConfigError) as raised:
        ss.Cluster.read(path)
    assert ran.stderr.strip().removeprefix("error: ") == str(raised.value).strip()
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 5}\n')
    ran = command(binary, "simulate", "--trace", trace)
    with pytest.raises(ss.WorkloadError) as raised:
        ss.simulate(ss.Cluster(), ss.Trace.read(trace))
    # Before the error the command says what it read of the model.
    assert ran.stderr.partition("error: ")[2].strip() == str(raised.value).strip()


def test_threads_ask_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(lambda _: ss.simulate(ss.Cluster(), small()).digest, range(16)))
    assert len(set(digests)) == 1


def test_other_threads_run_during_a_question() -> None:
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    seen: list[str] = []
    ss.simulate(ss.Cluster(), small(20_000), progress=seen.append)
    done.set()
    thread.join()
    assert ticks > 10
    assert any("ended" in line for line in seen)


def test_a_child_of_fork_can_ask() -> None:
    digest = ss.simulate(ss.Cluster(), small()).digest
    child = os.fork()
    if child == 0:
        same = ss.simulate(ss.Cluster(), small(), progress=False).digest == digest
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


ENDLESS = """
import sys, slipstream as ss
cluster, workload = ss.Cluster(), ss.Workload(rate=20, isl=256, osl=32, requests=10**9)
print("asks", flush=True)
try:
    {question}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    "question",
    [
        "ss.simulate(cluster, workload, requests=False, progress=False)",
        "ss.sweep(cluster, workload, {'pool.main.workers': range(1, 100)}, progress=False)",
        "ss.simulate(cluster.set('router.policy', 'random'), workload, requests=False)",
    ],
)
def test_ctrl_c_ends_a_question(question: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS.format(question=question)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "asks\n"
    # Before it runs, the signal would end the interpreter's own code: that is the same exception.
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and cpu_ticks(process.pid) < 50:
        pass
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    assert process.wait(30) == 0


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_a_job_that_is_dropped_ends() -> None:
    before = threads()
    question = {"workload": small(10**9).source()}
    job = ss._native.start_simulate(json.dumps(question), False, False, False)
    assert job.wait(0.0) is None
    del job
    deadline = time.monotonic() + 60
    while threads() > before and time.monotonic() < deadline:
        pass
    assert threads() <= before


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules); import slipstream; "
        "heavy = {'polars', 'pandas', 'pyarrow', 'numpy', 'ray', 'vllm', 'IPython', 'csv'}; "
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr


def test_pages_are_self_contained(tmp_path: Path) -> None:
    result = ss.simulate(ss.Cluster(), small(), slo="ttft=1s", over_time=True)
    assert "Over time" in result.page.html
    assert "Over time" not in ss.simulate(ss.Cluster(), small()).page.html
    result.page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == result.page.html
    for loads in (" src=", "href=", "@import", "url("):
        assert loads not in result.page.html


def test_the_notebook_runs() -> None:
    nbclient = pytest.importorskip("nbclient", reason="the notebook takes nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "examples/capacity.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "examples")}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    bundles = [output["data"] for output in outputs if "data" in output]
    # JupyterLab and VS Code draw the figure's own type, nbconvert's pages its HTML.
    figures = [data for data in bundles if "application/vnd.plotly.v1+json" in data]
    assert len(figures) == 3
    assert all("text/html" in data for data in figures)
    tables = [data for data in bundles if "<table" in data.get("text/html", "")]
    assert len(tables) == 3, "results are tables"
    assert not any("<iframe" in data.get("text/html", "") for data in bundles)
    assert not [output for output in outputs if output.get("name") == "stderr"]


def scaled(**more: object) -> ss.Cluster:
    keys = {"policy": "custom", "interval_s": 1, "cooldown_s": 0, **more}
    scaling = {f"autoscale.{key}": value for key, value in keys.items()}
    return ss.Cluster().set({"pool.main.workers": 6, **scaling})


def test_a_function_decides_how_many_workers_run() -> None:
    states: list[ss.PoolState] = []

    def policy(state: ss.PoolState) -> int:
        states.append(state)
        return 4 if state.now_s >= 3 else 2

    workload = small(200)
    result = ss.simulate(scaled(), workload, autoscale=policy, slo="ttft=1s")
    changes = result.summary()["autoscale"]["changes"]
    assert [(c["at_s"], c["before"], c["wanted"]) for c in changes] == [(1.0, 1, 2), (3.0, 2, 4)]
    assert [state.now_s for state in states[:3]] == [1.0, 2.0, 3.0]
    assert [(state.pool, state.ready, state.wanted) for state in states[:3]] == [
        ("main", 1, 1),
        ("main", 2, 2),
        ("main", 2, 2),
    ]
    arrived = sum(state.arrivals for state in states)
    assert 0 < arrived <= 200
    assert all(state.slots == 256 for state in states)
    again = ss.simulate(scaled(), workload, autoscale=policy, slo="ttft=1s")
    assert again.digest == result.digest
    # The bounds of the pool apply.
    bounded = ss.simulate(scaled(workers_max=3), workload, autoscale=lambda state: 10**30)
    assert bounded.summary()["autoscale"]["pools"][0]["workers_max"] == 3
    # The same rule as a policy of the cluster file.
    constant = ss.simulate(scaled(workers_start=2), workload, autoscale=lambda state: state.wanted)
    assert constant.summary()["autoscale"]["changes"] == []


def test_a_function_that_fails_ends_the_run() -> None:
    def raises(state: ss.PoolState) -> int:
        raise LookupError(f"at {state.now_s}")

    with pytest.raises(LookupError, match=r"at 1\.0"):
        ss.simulate(scaled(), small(), autoscale=raises)
    for wrong in (None, 1.5, "2", True):
        with pytest.raises(TypeError, match="whole number of workers"):
            ss.simulate(scaled(), small(), autoscale=lambda state, wrong=wrong: wrong)
    with pytest.raises(TypeError, match="function of a PoolState"):
        ss.simulate(scaled(), small(), autoscale=4)
    # Neither a policy without a function, nor a function without a policy.
    with pytest.raises(ss.Error, match="autoscale=") as missing:
        ss.simulate(scaled(), small())
    assert "custom" in str(missing.value)
    with pytest.raises(ss.QuestionError, match="would decide nothing"):
        ss.simulate(ss.Cluster(), small(), autoscale=lambda state: 1)


NAN, INF = float("nan"), float("inf")
WRONG_NUMBERS = [NAN, INF, -INF, True, 10**400]
WRONG_COUNTS = [*WRONG_NUMBERS, 1.5, 1e12, -1, 2**64]


def wrong_arguments():
    for kind in (ss.Workload, lambda **keys: ss.Trace("t", **keys)):
        for name in ("rate", "duration_s", "time_scale"):
            yield from ((kind, name, value) for value in WRONG_NUMBERS)
        for name in ("concurrency", "requests", "seed"):
            yield from ((kind, name, value) for value in WRONG_COUNTS)
    for name in ("isl", "osl"):
        yield from ((ss.Workload, name, value) for value in [*WRONG_COUNTS, 2**32])

    def run(**keys):
        return ss.simulate(ss.Cluster(), small(), **keys)

    def search(**keys):
        return ss.plan(small(), slo="ttft=1s", **keys)

    for name in ("retries", "seed", "threads"):
        yield from ((run, name, value) for value in WRONG_COUNTS)
    for name in ("speedup", "max_sim_time_s"):
        yield from ((run, name, value) for value in WRONG_NUMBERS)
    for name in ("seeds", "max_gpus", "jobs"):
        yield from ((search, name, value) for value in WRONG_COUNTS)
    for name in ("attain", "headroom"):
        yield from ((search, name, value) for value in [*WRONG_NUMBERS, "nan", "inf%"])
    for name in ("load", "host_memory", "prefill_weights", "temperatures"):
        yield from ((search, name, [value]) for value in WRONG_NUMBERS)
    for name in ("tensor_parallel", "speculation", "max_num_seqs", "autoscale_min"):
        yield from ((search, name, [value]) for value in WRONG_COUNTS)


def test_a_number_out_of_range_is_an_error_of_its_argument() -> None:
    for call, name, value in wrong_arguments():
        with pytest.raises(ss.QuestionError, match=name):
            call(**{name: value})
