"""Bodies of /tokenize, /detokenize, Responses and Messages, with the verdicts of vLLM's classes.

`recorded_bodies.jsonl` is written by `python/tests/vllm/test_other_bodies.py`, which compares far
more where vLLM is installed.
"""

import json
import urllib.error
import urllib.request
from pathlib import Path

from conftest import Server

PATHS = {
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count": "/v1/messages/count_tokens",
}


def status(url: str, body: str) -> int:
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_recorded_bodies_have_the_verdicts_of_vllm(server: Server, model: str) -> None:
    lines = (Path(__file__).parent / "recorded_bodies.jsonl").read_text().splitlines()
    assert len(lines) > 100
    wrong = []
    for line in lines:
        kind, takes, body = json.loads(line)
        got = status(server.url + PATHS[kind], body.replace("MODEL", model))
        if (got == 200) != takes:
            wrong.append(f"{kind} {got}: {body}")
    assert not wrong, "\n".join(wrong)
