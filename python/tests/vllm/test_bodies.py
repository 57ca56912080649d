"""Generated request bodies: the server takes those that vLLM's classes take, and reads the same.

The server under test is `SLIPSTREAM_BIN`. `SLIPSTREAM_BODIES` is the number of bodies, and
`SLIPSTREAM_BODIES_SEED` their seed.
"""

import collections
import http.client
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from bodies import bodies
from reading import Reader, RefusedError

Answer = tuple[int, Any]


class Server:
    """`slipstream serve`, and a connection to it."""

    def __init__(self, address: str) -> None:
        self.connection = http.client.HTTPConnection(address, timeout=60)
        card = self.request("GET", "/v1/models")[1]["data"][0]
        self.model, self.context = card["id"], card["max_model_len"]

    def request(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """Status, and the JSON of the answer, or of its events."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        self.connection.request(method, path, body, headers)
        response = self.connection.getresponse()
        text = response.read().decode()
        if response.headers["Content-Type"].startswith("text/event-stream"):
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            return response.status, [
                event if event == "[DONE]" else json.loads(event) for event in events
            ]
        return response.status, json.loads(text)

    def answer(self, chat: bool, body: bytes) -> Answer:
        """The same for a chat or a completion, without what differs each time."""
        status, value = self.request(
            "POST", "/v1/chat/completions" if chat else "/v1/completions", body
        )
        for event in value if isinstance(value, list) else [value]:
            if isinstance(event, dict):
                for name in ("id", "created"):
                    event.pop(name, None)
                # What the cache held before.
                (event.get("usage") or {}).pop("prompt_tokens_details", None)
        return status, value


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server without modelled waits."""
    binary = os.environ.get("SLIPSTREAM_BIN")
    if not binary:
        pytest.skip("SLIPSTREAM_BIN names no server")
    process = subprocess.Popen(
        [binary, "serve", "--listen", "127.0.0.1:0", "--speedup", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith("listening on http://"), line
        yield Server(line.removeprefix("listening on http://").strip())
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


Known = Callable[[dict[str, Any], str], bool]
"""Whether a disagreement about a body is one that is meant, by the text of the refusal."""

MEANT: dict[str, Known] = {
    "null counts as not sent, also where pydantic has no null": lambda body, why: all(
        body.get(name, 0) is None for name in fields(why)
    ),
    "fields without an effect here take any value": lambda body, why: (
        fields(why) <= IGNORED | nulls(body)
    ),
    "members of messages are checked as far as they are used": lambda body, why: (
        why.startswith(("messages.", "0.", "0 ", "1."))
        and not (has_calls(body) and ".tool_calls." in why)
    ),
    "parts, names and calls are checked before a template drops them": lambda body, why: (
        why.startswith("`messages.")
    ),
    "a tool has a name": lambda body, why: why.startswith("`tools.") and "name` is missing" in why,
    "64 stop strings, in vLLM as many as VLLM_MAX_STOP_STRINGS": lambda body, why: (
        "stop.list[str] too_long" in why
    ),
    "a part without its text is a mistake": lambda body, why: (
        ".content" in why and ("is missing" in why or "must be a string" in why)
    ),
    "each limit of tokens is 1 or more": lambda body, why: (
        "`max_tokens` is 0" in why and "max_completion_tokens" in body
    ),
    "a duplicate member is the last one, and the others are checked": lambda body, why: (
        "seed` must be" in why
    ),
    "a message has a role": lambda body, why: ".role` is empty" in why,
    "names stand in logs and headers": lambda body, why: (
        "control character" in why or "bytes; it must have at most" in why
    ),
    "an unknown form is not ignored": lambda body, why: (
        "structured_outputs" in why or "structured outputs" in why
    ),
    "NaN is not JSON": lambda body, why: "NaN" in json.dumps(body),
    "a bool is read as its field is": lambda body, why: "Cannot set both" in why,
}
IGNORED = {
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "length_penalty",
    "include_reasoning",
    "bad_words",
}


def has_calls(body: dict[str, Any]) -> bool:
    """Whether the assistant calls tools in the history."""
    of = body.get("messages")
    turns = [each for each in of if isinstance(each, dict)] if isinstance(of, list) else []
    return any(turn.get("role") == "assistant" and turn.get("tool_calls") for turn in turns)


def fields(why: str) -> set[str]:
    """The fields that pydantic names in a refusal."""
    return {of.split(" ")[0].split(".")[0] for of in why.split("; ")}


def nulls(body: dict[str, Any]) -> set[str]:
    """The fields of a body that are null."""
    return {name for name, value in body.items() if value is None}


def is_meant(body: bytes, why: str) -> bool:
    """Whether the disagreement has a reason."""
    try:
        members = json.loads(body)
    except ValueError:
        return False
    return isinstance(members, dict) and any(known(members, why) for known in MEANT.values())


def agrees(server: Server, reader: Reader, chat: bool, body: bytes) -> str | None:
    """How the server reads `body` otherwise than vLLM; `None` if it does not."""
    body = body.replace(b'"MODEL"', json.dumps(server.model).encode())
    status, answer = server.answer(chat, body)
    try:
        plain = reader.read(chat, body)
    except RefusedError as refusal:
        if status == 200 and not is_meant(body, str(refusal)):
            return f"taken, and vLLM refuses it: {refusal}"
        return None
    if status != 200:
        message = answer["error"]["message"]
        if is_meant(body, message):
            return None
        return f"{status}, and vLLM takes it: {message}"
    if reader.seed is None:
        return None
    # Events of several choices come in any order.
    prompts = plain.get("prompt")
    several = plain.get("n", 1) != 1 or (isinstance(prompts, list) and len(prompts) > 1)
    if b"NaN" in body or (isinstance(answer, list) and several):
        return None
    again = server.answer(chat, json.dumps(plain).encode())
    if again != (200, answer):
        return f"read otherwise: {differs(answer, again[1])}; as {json.dumps(plain)}"
    return None


def differs(one: Any, other: Any) -> str:
    """The first difference of two answers."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                return f"{name}: {differs(one.get(name), other.get(name))}"
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next((differs(a, b) for a, b in zip(one, other, strict=True) if a != b), "nothing")
    return f"{json.dumps(one)[:200]} and {json.dumps(other)[:200]}"


def test_bodies_are_read_as_by_vllm(server: Server) -> None:
    count = int(os.environ.get("SLIPSTREAM_BODIES", "600"))
    seed = int(os.environ.get("SLIPSTREAM_BODIES_SEED", "1"))
    reader = Reader(server.model, server.context, vocabulary=35_249)
    found: dict[str, list[str]] = collections.defaultdict(list)
    for chat, body in bodies(seed, count):
        if what := agrees(server, reader, chat, body):
            found[what.split("\n")[0][:120]].append(f"{body.decode()}\n    {what}")
    lines = [f"{len(of)} of: {of[0]}" for of in found.values()]
    if lines:
        pytest.fail(f"seed {seed}, {len(lines)} kinds:\n" + "\n".join(lines))
