#!/usr/bin/env python3
"""CPU time for which one request holds up a frontend thread.

    scripts/longest-polls.py BINARY

Sends requests that are expensive to read or to answer to `slipstream serve` with one shard, each to
a server of its own, and prints the longest time that its shard worked on one thing
(`slipstream_shard_poll_max_seconds`, CPU time). Exits with 1 if one took more than 10 ms, which is
the limit of docs/reliability.md for release builds.
"""

import http.client
import json
import re
import subprocess
import sys

LIMIT_S = 0.010
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def chat(count: int) -> dict:
    """Make a conversation of many short messages."""
    return {"messages": [{"role": "user", "content": "a" * 50}] * count}


def choices(**fields: object) -> dict:
    """Make a request for the most choices."""
    return {"prompt": "hello", "n": 128, "max_tokens": 400, **fields}


TOKENS = list(range(300, 1324))
CASES: dict[str, tuple[str, object]] = {
    "a short prompt": (COMPLETIONS, {"prompt": "hello", "max_tokens": 4}),
    "80,000 messages": (CHAT, chat(80_000)),
    "80,000 items after a stored response": (
        "/v1/responses",
        {"input": chat(80_000)["messages"], "previous_response_id": "resp_none"},
    ),
    "350,000 unknown fields": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 1, **{f"f{number}": [1, 2] for number in range(350_000)}},
    ),
    "metadata with 300,000 keys": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 1, "metadata": {f"k{n}": [[1]] for n in range(300_000)}},
    ),
    "60,000 tools": (
        CHAT,
        {
            **chat(1),
            "tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(60_000)],
        },
    ),
    "1,500,000 tokens": (COMPLETIONS, {"prompt": list(range(1, 1000)) * 1500}),
    "JSON that breaks off after 7 MB": (COMPLETIONS, b'{"prompt":[' + b"1," * 3_500_000),
    "/tokenize of 3 MB": ("/tokenize", {"prompt": "ab " * 1_000_000}),
    "/detokenize of 1,400,000 tokens": ("/detokenize", {"tokens": list(range(1, 1000)) * 1400}),
    "an image of 7 MB": (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:," + "A" * 7_000_000}}
                    ],
                }
            ]
        },
    ),
    "128 choices": (COMPLETIONS, choices(ignore_eos=True)),
    "128 choices of 1,024 allowed tokens": (COMPLETIONS, choices(allowed_token_ids=TOKENS)),
    "the same, streamed with 20 log probabilities": (
        COMPLETIONS,
        choices(allowed_token_ids=TOKENS, logprobs=20, stream=True),
    ),
    "128 choices without 1,024 tokens": (
        COMPLETIONS,
        choices(ignore_eos=True, logit_bias={str(token): -100 for token in TOKENS}),
    ),
    "128 choices that repeat 30,000 tokens": (
        COMPLETIONS,
        choices(prompt=[300] * 30_000, max_tokens=2, echo=True),
    ),
    "log probabilities of 30,000 tokens of a prompt": (
        COMPLETIONS,
        {"prompt": [300] * 30_000, "max_tokens": 2, "prompt_logprobs": 20},
    ),
    "128 choices that fit a pattern": (
        COMPLETIONS,
        choices(structured_outputs={"regex": "(a|b|c){1,50}"}),
    ),
}


def measure(binary: str, path: str, body: object) -> tuple[float, int, int]:
    """Return the longest poll in s, the body's size in bytes and the status of the answer."""
    command = [binary, "serve", "--listen=127.0.0.1:0", "--speedup=100", "--set=live.shards=1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            address = next(
                found for line in server.stdout if (found := re.search(r"//(\S+)", line))
            )

            def send(method: str, path: str, data: bytes = b"") -> tuple[int, bytes]:
                connection = http.client.HTTPConnection(address[1], timeout=120)
                connection.request(method, path, data, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                whole = answer.read()
                connection.close()
                return answer.status, whole

            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            status, _ = [send("POST", path, data) for _ in range(3)][-1]
            page = send("GET", "/metrics")[1].decode()
            longest = re.findall(r"^slipstream_shard_poll_max_seconds\S* (\S+)", page, re.MULTILINE)
            return max(map(float, longest)), len(data), status
        finally:
            server.terminate()


def main() -> int:
    """Measure each case."""
    binary = sys.argv[1]
    worst = 0.0
    print("| Request | Body, bytes | Status | Longest poll, ms |\n| --- | --- | --- | --- |")
    for name, (path, body) in CASES.items():
        longest_s, size, status = measure(binary, path, body)
        print(f"| {name} | {size:,} | {status} | {longest_s * 1e3:.2f} |", flush=True)
        worst = max(worst, longest_s)
    return int(worst > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
