"""Bodies of /tokenize, /detokenize, Responses and Messages: read as by vLLM's classes.

`SLIPSTREAM_BODIES` and `SLIPSTREAM_BODIES_SEED` as for chats. `SLIPSTREAM_RECORD=FILE` writes the
bodies with vLLM's verdicts, which `python/tests/base/test_recorded_bodies.py` compares with the
server where vLLM is not installed.
"""

import collections
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from other_bodies import PATHS, bodies
from pydantic import BaseModel, TypeAdapter, ValidationError
from reading import RefusedError
from test_bodies import Server, server
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
from vllm.renderers.chat_utils.chat_message import parse_chat_messages

__all__ = ["server"]

VOCABULARY = 35_249
CLASSES: dict[str, Any] = {
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
    "responses": ResponsesRequest,
    "messages": AnthropicMessagesRequest,
    "count": AnthropicCountTokensRequest,
}


class Judge:
    """vLLM's classes in front of a model."""

    def __init__(self, server: Server) -> None:
        from reading import Reader

        self.reader = Reader(server.model, server.context, VOCABULARY)
        self.adapters = {kind: TypeAdapter(of) for kind, of in CLASSES.items()}

    def read(self, kind: str, body: bytes) -> dict[str, Any]:
        """The body in its plainest form; raises what vLLM refuses."""
        try:
            members = json.loads(body)
            if not isinstance(members, dict):
                raise RefusedError("not an object")
            request = self.adapters[kind].validate_python(members)
            if request.model not in (None, "", self.reader.model):
                raise RefusedError("no such model")
            return self.plain(kind, request, members)
        except RefusedError:
            raise
        except ValidationError as error:
            at = [(".".join(map(str, of["loc"])), of["type"]) for of in error.errors()]
            why = "; ".join(f"{loc} {kind}" for loc, kind in at)
            # Of the union of the two classes of /tokenize, the one that was meant.
            why = re.sub(r"function-wrap\[[^\]]*\]\.", "", why)
            why = why.replace("prompt missing; ", "").replace("messages missing; ", "")
            raise RefusedError(why) from error
        except Exception as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error

    def plain(self, kind: str, request: Any, members: dict[str, Any]) -> dict[str, Any]:
        """What the servers check behind the class, and the plain form."""
        self.chat = None
        if kind in ("messages", "count"):
            chat = AnthropicServingMessages.to_chat_completion_request(request)
            self.chat = chat
            if not chat.messages:
                raise RefusedError("no message")
            if kind == "messages":
                self.reader.chat(chat)
            else:
                parse_chat_messages(chat.messages, self.reader.config, "string")
        elif kind == "responses":
            self.reader.check(request, request.max_output_tokens)
            request.extract_structured_outputs()
        elif kind == "tokenize" and hasattr(request, "messages"):
            chat = request.to_chat_completion_request()
            if not chat.messages:
                raise RefusedError("no message")
            parse_chat_messages(chat.messages, self.reader.config, "string")
            if request.continue_final_message and request.add_generation_prompt:
                raise RefusedError("continue_final_message with add_generation_prompt")
        elif kind == "detokenize" and any(token >= VOCABULARY for token in request.tokens):
            raise RefusedError("token id out of vocabulary")
        plain: dict[str, Any] = {}
        for name in request.model_fields_set & type(request).model_fields.keys():
            value = getattr(request, name)
            if value is not None:
                plain[name] = as_json(value)
        if "messages" in plain and kind == "tokenize":
            plain["messages"] = members["messages"]  # its lists are read once
        return plain


def as_json(value: Any) -> Any:
    """A value of a request, as it could have been sent."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True, mode="json", warnings=False)
    if isinstance(value, list):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {name: as_json(of) for name, of in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    return [as_json(each) for each in value]  # pydantic's lazy iterables


Known = Callable[[str, dict[str, Any], str], bool]
MEANT: dict[str, Known] = {
    "null counts as not sent, also where pydantic has no null": lambda kind, body, why: (
        " 400" not in why and all(body.get(name, 0) is None for name in fields(why))
    ),
    "members of messages are checked as far as they are used": lambda kind, body, why: (
        why.startswith(("messages", "system", "input", "0.", "1.", "2.", "AttributeError"))
    ),
    "parts, names and calls are checked before a template drops them": lambda kind, body, why: (
        why.startswith(("`messages.", "`tools.", "`input.", "`prompt`"))
    ),
    "a body without a model is for the served one": lambda kind, body, why: (
        fields(why) <= {"model", "messages", "system", "tools", "input"} | nulls(body)
    ),
    "what a chat has is not read beside a prompt": lambda kind, body, why: (
        kind == "tokenize" and "prompt" in body
    ),
    "as many stop sequences as of a chat": lambda kind, body, why: "too_long" in why,
    "a conversation has a message": lambda kind, body, why: (
        "is empty; send at least one message" in why
        or why == "no message"
        or "`input` must be" in why
    ),
    "a choice among no tools is a mistake": lambda kind, body, why: "needs `tools`" in why,
    "a bool is read as its field is": lambda kind, body, why: "Cannot set both" in why,
    "only text can be continued": lambda kind, body, why: "only text can be continued" in why,
    "an empty stop string is a mistake": lambda kind, body, why: (
        "`stop` has an empty string" in why
    ),
    "names stand in logs and headers": lambda kind, body, why: (
        "control character" in why or "must have at most" in why
    ),
}


def fields(why: str) -> set[str]:
    """The fields that pydantic names in a refusal."""
    return {of.split(" ")[0].split(".")[0] for of in why.split("; ")}


def nulls(body: dict[str, Any]) -> set[str]:
    """The fields of a body that are null."""
    return {name for name, value in body.items() if value is None}


def clean(value: Any) -> Any:
    """An answer without what differs each time."""
    if isinstance(value, dict):
        gone = (
            "id",
            "created_at",
            "created",
            "item_id",
            "completed_at",
            "input_tokens_details",
            "sequence_number",
        )
        gone += ("cache_read_input_tokens", "cache_creation_input_tokens", "request_id")
        return {name: clean(of) for name, of in value.items() if name not in gone}
    if isinstance(value, list):
        return [clean(of) for of in value]
    return value


def ask(server: Server, kind: str, body: bytes) -> tuple[int, Any]:
    """Status and answer, or the text of events."""
    headers = {"Content-Type": "application/json"}
    server.connection.request("POST", PATHS[kind], body, headers)
    response = server.connection.getresponse()
    text = response.read().decode()
    if response.headers["Content-Type"].startswith("text/event-stream"):
        lines = [
            line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")
        ]
        return response.status, [clean(json.loads(line)) for line in lines]
    return response.status, clean(json.loads(text))


def message(answer: Any) -> str:
    """The message of an error."""
    return str(answer.get("error", answer).get("message", answer))


def output(kind: str, answer: Any) -> Any:
    """What the model said."""
    if isinstance(answer, list):
        return "events"
    return answer.get({"responses": "output", "messages": "content"}.get(kind, ""), answer)


def agrees(server: Server, judge: Judge, kind: str, body: bytes) -> tuple[bool | None, str | None]:
    """Whether both take the body (`None`: one does); how the server reads it otherwise.

    Differences that are meant count as none.
    """
    status, answer = ask(server, kind, body)
    members = json.loads(body)
    try:
        plain = judge.read(kind, body)
    except RefusedError as refusal:
        why = str(refusal)
        if status == 200 and not any(known(kind, members, why) for known in MEANT.values()):
            return None, f"{kind} taken, and vLLM refuses it: {why}"
        return (False if status != 200 else None), None
    if status != 200:
        why = message(answer)
        if any(known(kind, members, why) for known in MEANT.values()):
            return None, None
        return None, f"{kind} {status}, and vLLM takes it: {why}"
    again = ask(server, kind, json.dumps(plain).encode())
    if kind == "tokenize" and "prompt" in members and "messages" in members:
        return True, None
    if again[0] != 200:
        return True, f"{kind} plain form {again[0]}: {message(again[1])} as {json.dumps(plain)}"
    if kind == "count" and judge.chat is not None:
        # The prompt that vLLM makes of it.
        chat = judge.chat.model_dump(
            mode="json", exclude_none=True, include={"messages", "tools", "chat_template_kwargs"}
        )
        counted = ask(server, "tokenize", json.dumps(chat).encode())
        repr_of_blocks = "Tool result: [" in json.dumps(chat)
        if (
            counted[0] == 200
            and counted[1]["count"] != answer["input_tokens"]
            and not repr_of_blocks  # as Python writes them
        ):
            return (
                True,
                f"{kind} another prompt: {answer} and {counted[1]['count']}"
                f" of {json.dumps(chat)[:400]}",
            )
    if plain.get("temperature", 1) == 0 or kind in ("tokenize", "detokenize", "count"):
        one, other = output(kind, answer), output(kind, again[1])
        if one != other:
            return (
                True,
                f"{kind} read otherwise: {json.dumps(one)[:200]} and {json.dumps(other)[:200]}"
                f" as {json.dumps(plain)[:300]}",
            )
    return True, None


def test_other_bodies_are_read_as_by_vllm(server: Server) -> None:
    count = int(os.environ.get("SLIPSTREAM_BODIES", "600"))
    seed = int(os.environ.get("SLIPSTREAM_BODIES_SEED", "1"))
    judge = Judge(server)
    found: dict[str, list[str]] = collections.defaultdict(list)
    recorded = []
    for kind, body in bodies(seed, count):
        named = body.replace(b'"MODEL"', json.dumps(server.model).encode())
        both, what = agrees(server, judge, kind, named)
        if what:
            found[what.split("\n")[0][:110]].append(f"{named.decode()}\n    {what}")
        elif both is not None and len(body) < 400:
            recorded.append(json.dumps([kind, both, body.decode()]))
    if path := os.environ.get("SLIPSTREAM_RECORD"):
        Path(path).write_text("\n".join(recorded) + "\n")
    lines = [f"{len(of)} of: {of[0]}" for of in sorted(found.values(), key=len, reverse=True)]
    if lines:
        pytest.fail(
            f"seed {seed}, {sum(map(len, found.values()))} of {count}, {len(lines)} kinds:\n"
            + "\n".join(lines)
        )
