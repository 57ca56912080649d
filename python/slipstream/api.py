"""The questions: `simulate`, `sweep`, `plan`, `predict`."""

from __future__ import annotations

import json
import operator
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from slipstream import _display, _native
from slipstream.errors import ArgumentTypeError, QuestionError
from slipstream.results import Page, Plan, Result, Sweep, Table
from slipstream.sources import (
    Cluster,
    Trace,
    Value,
    Workload,
    as_text,
    check_count,
    check_flag,
    check_number,
    check_text,
    duration,
    plain,
)

__all__ = ["PoolState", "Progress", "plan", "predict", "simulate", "sweep"]

Progress = bool | Callable[[str], None] | None
"""Whether progress is shown, or a function of each line; `None`: on terminals and in notebooks."""

WAIT_S = 0.05
"""Interval at which signals are handled during a question."""

STOP_S = 2.0
"""Longest wait for the threads of a question that was interrupted."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of a pool, for a function that decides how many workers it needs."""

    pool: str
    """Its name."""
    now_s: float
    """Simulated time, s."""
    ready: int
    """Workers that take requests."""
    wanted: int
    """Workers that are wanted now; those that have not started yet count."""
    waiting: int
    """Requests that wait, in engines and in front of them."""
    running: int
    """Requests that engines compute."""
    slots: int
    """Requests that one worker computes at a time, at most."""
    arrivals: int
    """Requests that arrived at the cluster since the last decision."""
    ttft_ratio: float | None
    """Mean TTFT over its objective since then; `None` without an objective or a first token."""


def simulate(
    cluster: Cluster,
    workload: Workload | Trace,
    *,
    slo: str | None = None,
    seed: int | None = None,
    label: str | None = None,
    max_sim_time_s: float | None = None,
    speedup: float = 1.0,
    threads: int | None = None,
    retries: int = 0,
    requests: bool = True,
    over_time: bool = False,
    autoscale: Callable[[PoolState], int] | None = None,
    progress: Progress = None,
) -> Result:
    """Run a cluster under a workload in virtual time, as `slipstream simulate`.

    `seed` replaces the workload's. `requests` keeps one row per request (about 130 bytes each).
    `over_time` records the run over time for the page. `threads` is a limit; the result is the same
    for any number. The interpreter's lock is released.

    `autoscale` decides how many workers a pool with `autoscale.policy = "custom"` needs: a function
    of a `PoolState`, called every `autoscale.interval_s` of simulated time. It is slow: each call
    waits for the interpreter. An exception of the function ends the run.

    If the question is wrong or a file cannot be read, this raises a subclass of `slipstream.Error`.

    >>> import slipstream as ss
    >>> workload = ss.Workload(rate=20, requests=200, seed=1)
    >>> result = ss.simulate(ss.Cluster(), workload, slo="ttft=1s")
    >>> result.summary()["requests"]["succeeded"]
    200
    >>> result.digest == ss.simulate(ss.Cluster(), workload).digest
    True
    """
    question = {
        "cluster": source(cluster, Cluster, "cluster"),
        "workload": with_seed(source(workload, (Workload, Trace), "workload"), seed),
        "slo": check_slo(slo),
        "label": check_text(label, "label"),
        "max_sim_time": duration(max_sim_time_s, "max_sim_time_s"),
        "speedup": check_number(speedup, "speedup"),
        "threads": check_threads(threads, "threads"),
        "retries": needed(check_count(retries, "retries", 2**32 - 1), "retries"),
    }
    if autoscale is not None and not callable(autoscale):
        raise ArgumentTypeError(
            f"autoscale is {autoscale!r}, but must be a function of a PoolState"
        )
    scales = autoscale is not None
    kept, series = check_flag(requests, "requests"), check_flag(over_time, "over_time")
    job = _native.start_simulate(json.dumps(question), kept, series, scales)
    answer = finish(job, progress, scale=autoscale)
    table = answer["table"]
    return Result(
        json=answer["json"],
        text=answer["text"],
        notes=tuple(answer["notes"]),
        page=Page(answer["page"]),
        table=None if table is None else Table(table),
    )


def sweep(
    cluster: Cluster,
    workload: Workload | Trace,
    vary: Mapping[str, str | Iterable[Value]],
    *,
    slo: str | None = None,
    attain: float | str | None = None,
    seeds: int = 1,
    prices: Mapping[str, float] | None = None,
    tolerance: float = 1.0,
    max_sim_time_s: float | None = None,
    jobs: int | None = None,
    on: str | None = None,
    progress: Progress = None,
) -> Sweep:
    """Run every combination of the values of `vary`, as `slipstream sweep`.

    A key of `vary` is one of the cluster or workload file, or `load`; its values are a list, a
    `range`, or the command's text (`"2..8"`). `on="ray"` runs them on the Ray cluster that is
    connected (or starts one here), `on="ray://HOST:PORT"` on another one; the answer is the same.

    If the question is wrong or a file cannot be read, this raises a subclass of `slipstream.Error`.

    >>> import slipstream as ss
    >>> swept = ss.sweep(ss.Cluster(), ss.Workload(rate=10, requests=50),
    ...                  {"pool.main.workers": range(1, 4), "load": [0.5, 1]})
    >>> len(swept), swept.table.column("pool.main.workers")[:2]
    (6, ['1', '1'])
    """
    question = json.dumps(
        {
            "cluster": source(cluster, Cluster, "cluster"),
            "workload": source(workload, (Workload, Trace), "workload"),
            "vary": axes(vary),
            "slo": check_slo(slo),
            "attain": None if attain is None else share(attain, "attain"),
            "seeds": check_seeds(seeds),
            "prices": price_source(prices),
            "tolerance": check_number(tolerance, "tolerance"),
            "max_sim_time": duration(max_sim_time_s, "max_sim_time_s"),
        }
    )
    jobs, on = check_jobs(jobs), check_text(on, "on")
    call = uuid.uuid4().hex
    count = int(finish(_native.start_sweep_check(call, question), progress)["count"])
    if on is None:
        job = _native.start_sweep_rows(call, question, 0, count, jobs)
        rows = [finish(job, progress)["rows"]]
    else:
        from slipstream import _ray

        with _ray.Tasks(on, shown(progress)) as tasks:
            rows = tasks.sweep_rows(call, question, count)
    answer = finish(_native.start_sweep_finish(call, question, rows), progress)
    return Sweep(
        table=Table(answer["table"]),
        text=answer["text"],
        front_text=answer["front"],
        notes=tuple(answer["notes"]),
        page=Page(answer["page"]),
    )


def plan(
    workload: Workload | Trace,
    *,
    slo: str | None = None,
    attain: float | str = 0.99,
    gpus: Sequence[str] = ("h100-sxm",),
    model: str | None = None,
    cluster: Cluster | None = None,
    load: Sequence[float] = (1.0,),
    headroom: float | str = 0.0,
    prices: Mapping[str, float] | None = None,
    tensor_parallel: Sequence[int] = (1, 2, 4, 8),
    pipeline_parallel: Sequence[int] = (),
    data_parallel: Sequence[int] = (),
    expert_parallel: Sequence[bool] = (),
    host_memory: Sequence[float] = (),
    speculation: Sequence[int] = (),
    precision: Sequence[str] = (),
    kv_cache_dtype: Sequence[str] = ("auto",),
    serving: Sequence[str] = ("aggregated", "disaggregated"),
    max_num_seqs: Sequence[int] = (256, 64, 1024),
    max_num_batched_tokens: Sequence[int] = (8192, 2048, 16384),
    policies: Sequence[str] = ("kv", "power_of_two", "round_robin"),
    prefill_weights: Sequence[float] = (),
    temperatures: Sequence[float] = (),
    autoscale_min: Sequence[int] = (),
    max_gpus: int = 1024,
    seeds: int = 3,
    quick: bool = False,
    jobs: int | None = None,
    on: str | None = None,
    progress: Progress = None,
) -> Plan:
    """Find the cheapest cluster that attains objectives under a workload, as `slipstream plan`.

    `prices` is a mapping of GPUs to a price per hour (without it, the cost is the number of GPUs).
    `cluster` has settings that are not searched. `on` is as in `sweep`.

    If the question is wrong or a file cannot be read, this raises a subclass of `slipstream.Error`.

    >>> import slipstream as ss
    >>> found = ss.plan(ss.Workload(rate=2, isl=256, osl=32, requests=100), slo="ttft=1s,itl=50ms",
    ...                 model="llama-3.1-8b", tensor_parallel=[1], serving=["aggregated"],
    ...                 max_gpus=4, quick=True)
    >>> found.found, found.answers[0]["answer"]["gpus"]
    (True, 1)
    """
    question = json.dumps(
        {
            "workload": source(workload, (Workload, Trace), "workload"),
            "slo": check_slo(slo),
            "attain": share(attain, "attain"),
            "load": [check_number(factor, "load") for factor in sequence(load, "load")],
            "headroom": share(headroom, "headroom"),
            "model": check_text(model, "model"),
            "cluster": source(Cluster() if cluster is None else cluster, Cluster, "cluster"),
            "axes": {
                "gpus": words(gpus, "gpus"),
                "tensor_parallel": counts(tensor_parallel, "tensor_parallel"),
                "pipeline_parallel": counts(pipeline_parallel, "pipeline_parallel"),
                "data_parallel": counts(data_parallel, "data_parallel"),
                "expert_parallel": switches(expert_parallel, "expert_parallel"),
                "host_memory": numbers(host_memory, "host_memory"),
                "speculation": counts(speculation, "speculation"),
                "precision": words(precision, "precision"),
                "kv_cache_dtype": words(kv_cache_dtype, "kv_cache_dtype"),
                "serving": words(serving, "serving"),
                "max_num_seqs": counts(max_num_seqs, "max_num_seqs"),
                "max_num_batched_tokens": counts(max_num_batched_tokens, "max_num_batched_tokens"),
                "policies": words(policies, "policies"),
                "prefill_weights": numbers(prefill_weights, "prefill_weights"),
                "temperatures": numbers(temperatures, "temperatures"),
                "autoscale_min": counts(autoscale_min, "autoscale_min"),
            },
            "max_gpus": needed(check_count(max_gpus, "max_gpus", 2**32 - 1), "max_gpus"),
            "prices": price_source(prices),
            "seeds": check_seeds(seeds),
            "quick": check_flag(quick, "quick"),
        }
    )
    jobs, on = check_jobs(jobs), check_text(on, "on")
    if on is None:
        answer = finish(_native.start_plan(question, jobs, False), progress)
    else:
        from slipstream import _ray

        with _ray.Tasks(on, shown(progress)) as tasks:
            trials = tasks.trials(uuid.uuid4().hex, question)
            answer = finish(_native.start_plan(question, jobs, True), progress, trials)
    return Plan(
        found=answer["found"],
        json=answer["json"],
        text=answer["text"],
        cluster_toml=answer["cluster"],
        notes=tuple(answer["notes"]),
        page=Page(answer["page"]),
    )


def predict(
    table: object,
    *,
    profile: str | os.PathLike[str] | None = None,
    models: str | os.PathLike[str] | None = None,
    progress: Progress = None,
) -> Table:
    """Predict TTFT and TPOT of a table of deployments, as `slipstream predict`.

    `docs/accuracy.md` lists the columns.

    `table` is a path of a CSV file, a mapping of columns, or a DataFrame of polars, pandas or
    pyarrow.

    If the table is none or a file cannot be read, this raises a subclass of `slipstream.Error`.

    >>> import slipstream as ss
    >>> rows = {"id": ["a"], "model_path": ["meta-llama/Llama-3.1-70B"],
    ...         "system": ["h200_sxm"], "backend": ["vllm"], "precision": ["fp8"],
    ...         "isl": [1024], "osl": [1024],
    ...         "batch_size": [16], "tp_size": [8]}
    >>> answer = ss.predict(rows)
    >>> answer.column("ttft_ms")[0] > answer.column("tpot_ms")[0] > 0
    True
    """
    from slipstream._csv import csv_of

    name, text = csv_of(table)
    question = {
        "name": name,
        "table": text,
        "profile": check_path(profile, "profile"),
        "models": check_path(models, "models"),
    }
    return Table(finish(_native.start_predict(json.dumps(question)), progress)["table"])


def check_path(path: str | os.PathLike[str] | None, name: str) -> str | None:
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"{name} is {path!r}, but must be a path")
    return check_text(os.fspath(path), name)


def workers_of(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ArgumentTypeError(
            f"autoscale returned {value!r}, but must return a whole number of workers"
        )
    # Bounds of the pool apply anyway.
    return min(max(operator.index(value), 0), 2**32 - 1)


def source(value: Any, kinds: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, kinds):
        of = kinds if isinstance(kinds, tuple) else (kinds,)
        names = " or ".join(f"slipstream.{kind.__name__}" for kind in of)
        raise ArgumentTypeError(
            f"{name} is {value!r}, which is no {names}; use {of[0].__name__}.read(PATH) for a file"
        )
    answer: dict[str, Any] = value.source()
    return answer


def with_seed(workload: dict[str, Any], seed: int | None) -> dict[str, Any]:
    seed = check_count(seed, "seed")
    return workload if seed is None else {**workload, "seed": seed}


def check_slo(slo: str | None) -> str | None:
    if slo is None:
        return None
    if not isinstance(slo, str):
        raise ArgumentTypeError(f"slo is {slo!r}, but must be a str such as 'ttft=1s,itl=50ms'")
    check_text(slo, "slo")
    _native.check_slo(slo)
    return slo


def check_threads(value: int | None, name: str) -> int | None:
    value = check_count(value, name)
    if value is not None and not 1 <= value <= 256:
        raise QuestionError(f"{name} is {value}, but must be 1 to 256")
    return value


def needed(value: int | None, name: str) -> int:
    if value is None:
        raise ArgumentTypeError(f"{name} is None, but must be a whole number")
    return value


def check_seeds(value: int) -> int:
    seeds = check_count(value, "seeds")
    if seeds is None or not 1 <= seeds <= 1000:
        raise QuestionError(f"seeds is {value}, but must be 1 to 1000")
    return seeds


def check_jobs(value: int | None) -> int | None:
    value = check_count(value, "jobs")
    if value is not None and not 1 <= value <= 1024:
        raise QuestionError(f"jobs is {value}, but must be 1 to 1024")
    return value


def share(value: float | str, name: str) -> float:
    if isinstance(value, str):
        text = value.strip()
        try:
            value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
        except ValueError:
            raise QuestionError(f"{name}: `{value}` is no share; write '99%' or 0.99") from None
    return check_number(value, name)


def sequence(values: Any, name: str) -> list[Any]:
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Iterable):
        raise ArgumentTypeError(f"{name} is {values!r}, but must be a list")
    try:
        return list(values)
    except TypeError:  # an array without dimensions
        raise ArgumentTypeError(f"{name} is {values!r}, but must be a list") from None


def words(values: Sequence[str], name: str) -> list[str]:
    each = sequence(values, name)
    for word in each:
        if not isinstance(word, str):
            raise ArgumentTypeError(f"{name} has {word!r}, but must be a list of str")
        check_text(word, name)
    return each


def counts(values: Sequence[int], name: str) -> list[int]:
    each = [check_count(value, name) for value in sequence(values, name)]
    for value in each:
        if value is None or value >= 2**32:
            raise QuestionError(
                f"{name} has {value}, but must be a list of whole numbers below 2^32"
            )
    return [value for value in each if value is not None]


def numbers(values: Sequence[float], name: str) -> list[float]:
    return [check_number(value, name) for value in sequence(values, name)]


def switches(values: Sequence[bool], name: str) -> list[bool]:
    each = sequence(values, name)
    for value in each:
        if not isinstance(plain(value), bool):
            raise ArgumentTypeError(f"{name} has {value!r}, but must be a list of bool")
    return [bool(value) for value in each]


def axes(vary: Mapping[str, str | Iterable[Value]]) -> list[Any]:
    if not isinstance(vary, Mapping):
        raise ArgumentTypeError(
            f"vary is {vary!r}, but must be a mapping of keys to lists of values"
        )
    if not vary:
        raise QuestionError("vary is empty; name a key and its values")
    each: list[Any] = []
    for key, values in vary.items():
        if not isinstance(key, str):
            raise ArgumentTypeError(f"vary has the key {key!r}, but keys are str")
        if isinstance(values, str):
            each.append(f"{key}={values}")
        else:
            each.append(
                (
                    key,
                    [
                        as_text(value, f"vary[{key!r}]")
                        for value in sequence(values, f"vary[{key!r}]")
                    ],
                )
            )
    return each


def price_source(prices: Mapping[str, float] | None) -> dict[str, Any]:
    if prices is None:
        return {}
    if not isinstance(prices, Mapping):
        raise ArgumentTypeError(
            f"prices is {prices!r}, but must be a mapping of GPUs to prices per hour"
        )
    for gpu in prices:
        if not isinstance(gpu, str):
            raise ArgumentTypeError(f"prices has the GPU {gpu!r}, but names are str")
    each = [(gpu, check_number(price, f"prices[{gpu!r}]")) for gpu, price in prices.items()]
    return {"prices": [f"{gpu}={price!r}" for gpu, price in each]}


def shown(progress: Progress) -> Callable[[str], None] | None:
    """Return the function that receives lines of progress."""
    if callable(progress):
        return progress
    if progress is not None and not isinstance(progress, bool):
        raise ArgumentTypeError(
            f"progress is {progress!r}, but must be True, False, None or a function of a line"
        )
    if progress is None:
        progress = sys.stderr.isatty() or _display.in_notebook()
    if not progress:
        return None
    return _display.Cell() if _display.in_notebook() else _display.Line()


def finish(
    job: _native.Job,
    progress: Progress,
    trials: Callable[[str], str] | None = None,
    scale: Callable[[PoolState], int] | None = None,
) -> dict[str, Any]:
    """Wait for a job's answer. An exception, such as Ctrl-C's, ends the job.

    `trials` runs a batch of trials of a plan; `scale` decides about a pool.
    """
    failed, show = False, None
    try:
        show = shown(progress)
        while True:
            try:
                said = job.wait(WAIT_S)
            except Exception:
                # The question's own error, which is its end.
                failed = True
                raise
            match said:
                case ("done", answer):
                    done: dict[str, Any] = answer
                    return done
                case ("batch", batch, line):
                    if show:
                        show(line)
                    if trials is None:
                        raise RuntimeError("a plan without tasks asks for trials")
                    job.give(trials(batch))
                case ("scale", state):
                    if scale is None:
                        raise RuntimeError("a run without a function asks for a number of workers")
                    job.scale(workers_of(scale(PoolState(*state))))
                case ("line", line):
                    if show:
                        show(line)
    except BaseException:
        job.cancel()
        until = time.monotonic() + STOP_S
        try:
            while not failed and time.monotonic() < until:
                match job.wait(WAIT_S):
                    case ("done", _):
                        break
        except Exception:
            pass
        raise
    finally:
        if isinstance(show, _display.Line | _display.Cell):
            show.clear()
