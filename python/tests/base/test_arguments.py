"""Wrong values of every argument: an error of ours that names the argument, or an answer."""

import inspect
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import slipstream as ss

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e300, float("nan"), float("inf"), 10**400, 2**63,
    2**64,
    "", "x", "1", "nan", "\ud800", b"x", object(), int, (), [], {}, set(), [None], ["x"], [1],
    [0.5], [True], [[1]],
    ["\ud800"], [object()], {"x": 1}, {"x": None}, {1: 1}, {"h100-sxm": float("nan")},
    {"h100-sxm": "1"},
    np.int64(1), np.float32(0.5), np.float64("nan"), np.bool_(True), np.array(1), np.array([1,
    2]), np.array([0.5]),
    np.array([[1]]), np.str_("x"), pd.Series([1, 2]), pd.Series([None]), pd.NA, pd.NaT,
    pd.DataFrame({"a": [1]}),
    pl.Series([1]), pl.Series([0.5]), pl.DataFrame({"a": [1]}), range(1, 2), 1j, Ellipsis,
    lambda: 1,
]  # fmt: skip


def workload() -> ss.Workload:
    return ss.Workload(rate=1, isl=1, osl=1, requests=1, seed=1)


def questions() -> dict[str, Callable[..., Any]]:
    """Questions that are answered at once, unless the argument makes them long."""
    cluster = ss.Cluster()
    return {
        "simulate": lambda **of: ss.simulate(**{"cluster": cluster, "workload": workload(), **of}),
        "sweep": lambda **of: ss.sweep(
            **{"cluster": cluster, "workload": workload(), "vary": {"load": [1]}, **of}
        ),
        "plan": lambda **of: ss.plan(
            **{
                "workload": workload(),
                "slo": "ttft=1s",
                "model": "llama-3.1-8b",
                "quick": True,
                "seeds": 1,
                "tensor_parallel": [1],
                "serving": ["aggregated"],
                "max_gpus": 1,
                "policies": ["kv"],
                "max_num_seqs": [64],
                "max_num_batched_tokens": [2048],
                **of,
            }
        ),
        "predict": lambda **of: ss.predict(**{"table": {"id": ["a"]}, **of}),
        "Workload": lambda **of: ss.Workload(**{"isl": 1, "osl": 1, "requests": 1, **of}),
        "Trace": lambda **of: ss.Trace(**{"path": "/none.jsonl", **of}),
        "Cluster": lambda **of: ss.Cluster(**of),
    }


# Values that are right, and cost time.
SLOW = {
    ("plan", "seeds"),
    ("plan", "max_gpus"),
    ("plan", "load"),
    ("simulate", "speedup"),
    ("plan", "on"),
    ("sweep", "on"),
    ("plan", "max_num_batched_tokens"),
}


def cases() -> Iterator[tuple[str, str, Any]]:
    for name, argument in itertools.chain.from_iterable(
        [(name, each) for each in inspect.signature(getattr(ss, name)).parameters]
        for name in questions()
    ):
        for value in VALUES:
            if argument == "progress" or (name, argument) in SLOW:
                continue
            yield name, argument, value


def test_a_wrong_argument_is_named() -> None:
    count = int(os.environ.get("SLIPSTREAM_ARGUMENTS", "400"))
    seed = int(os.environ.get("SLIPSTREAM_ARGUMENTS_SEED", "1"))
    drawn = list(cases())
    random.Random(seed).shuffle(drawn)
    # Every argument once, then others.
    first = {case[:2]: case for case in reversed(drawn)}.values()
    drawn = [*first, *(case for case in drawn if not any(case is one for one in first))]
    assert len(first) < count
    ask = questions()
    wrong = []
    for name, argument, value in drawn[:count]:
        try:
            ask[name](**{argument: value})
        except ss.Error as error:
            if isinstance(error, ss.QuestionError) and argument.split("_")[0] not in str(
                error
            ).replace("the column", "table"):
                wrong.append(f"{name}({argument}={value!r}): {error} does not name it")
        except BaseException as error:
            wrong.append(f"{name}({argument}={value!r}): {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong[:40])


@pytest.mark.parametrize("one", [np.int64(1), np.int32(1), 1, np.array(1)])
def test_scalars_of_numpy_are_numbers(one: Any) -> None:
    made = ss.Workload(rate=np.float32(1), isl=one, osl=one, requests=one, seed=one)
    assert made == workload()
    assert ss.Cluster().set("pool.main.workers", one) == ss.Cluster().set("pool.main.workers", 1)
    swept = ss.sweep(ss.Cluster(), made, {"pool.main.workers": np.array([1, 2])}, seeds=one)
    assert len(swept) == 2
