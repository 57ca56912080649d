"""The server as `curl` and raw sockets see it: formats, limits and unusual clients."""

import json
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

JSON = "Content-Type: application/json"


def curl(*args: str) -> str:
    """The output of `curl`."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "--silent", "--show-error", "--max-time", "30", *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def post(url: str, body: str, header: str = JSON) -> tuple[int, dict]:
    """Status and JSON of a POST."""
    *lines, status = curl(
        url, "--header", header, "--data-binary", body, "--write-out", "\n%{http_code}"
    ).split("\n")
    return int(status), json.loads("\n".join(lines))


def test_curl_gets_an_answer(server):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
    status, answer = post(f"{server.url}/v1/chat/completions", body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] <= 3


def test_curl_gets_a_stream(server):
    body = json.dumps(
        {
            "prompt": "hi",
            "max_tokens": 5,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
    )
    shown = curl(
        "--no-buffer",
        "--include",
        f"{server.url}/v1/completions",
        "--header",
        JSON,
        "--header",
        "x-request-id: mine",
        "--data",
        body,
    )
    head, _, events = shown.replace("\r\n", "\n").partition("\n\n")
    assert "text/event-stream" in head
    assert "x-request-id: mine" in head
    *events, done, rest = events.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {event["id"] for event in events} == {"cmpl-mine"}
    assert [event["usage"] is None for event in events] == [True] * (len(events) - 1) + [False]
    assert events[-1]["usage"]["completion_tokens"] == 5


def test_the_small_routes(server):
    for path in ("/health", "/live", "/ready", "/version", "/openapi.json", "/v1/models"):
        assert json.loads(curl("--fail", server.url + path)), path
    metrics = curl("--fail", f"{server.url}/metrics")
    assert "# TYPE" in metrics
    openapi = json.loads(curl(f"{server.url}/openapi.json"))
    for path in openapi["paths"]:
        status = curl(
            server.url + path.replace("{id}", "x"),
            "--output",
            "/dev/null",
            "--write-out",
            "%{http_code}",
        )
        assert status != "404" or "{id}" in path, f"{path} is documented, but not there"


def test_tokenize_and_detokenize(server):
    text = "The engine waits; 12345 tokens, é漢😀<|im_end|>\n"
    status, answer = post(
        f"{server.url}/tokenize", json.dumps({"prompt": text, "return_token_strs": True})
    )
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    status, back = post(f"{server.url}/detokenize", json.dumps({"tokens": answer["tokens"]}))
    assert (status, back) == (200, {"prompt": text})


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ("{", 400, "EOF while parsing"),
        ("[1]", 400, "a JSON object"),
        ('{"prompt": "a", }', 400, "line 1 column"),
        ('{"prompt": "a"} x', 400, "trailing characters"),
        ("{}", 400, "`prompt` is missing"),
        ('{"prompt": ""}', 400, "at least one token"),
        ('{"prompt": "x", "model": "other"}', 404, "does not exist"),
        ('{"prompt": [99999999]}', 400, "not in the vocabulary"),
        ('{"prompt": "%s"}' % ("x " * 400_000), 400, "maximum context length"),
        ('{"prompt": "%s"}' % ("x " * 5_000_000), 413, "longer than"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_bad_bodies_get_a_reason(server, tmp_path, body, status, part):
    file = tmp_path / "body"
    file.write_text(body)
    got, answer = post(f"{server.url}/v1/completions", f"@{file}")
    assert got == status
    assert part in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_invalid_utf8_is_told_where(server, tmp_path):
    file = tmp_path / "body"
    file.write_bytes(b'{"prompt": "\xff"}')
    status, answer = post(f"{server.url}/v1/completions", f"@{file}")
    assert status == 400
    assert "byte 12" in answer["error"]["message"]


def test_wrong_methods_and_paths(server):
    status, answer = post(f"{server.url}/v1/models", "{}")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    status, answer = post(f"{server.url}/v1/nothing", "{}")
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    status, answer = post(f"{server.url}/v1/completions", "x", "Content-Type: text/plain")
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")


def read_all(stream: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    pieces = []
    while piece := stream.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def request(body: bytes) -> bytes:
    """A POST to `/v1/completions` that ends its connection, as bytes."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{JSON}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def test_half_closed_clients_disturb_nothing(server):
    # All was said, but an end of input is how a client that left looks: no answer is owed.
    with socket.create_connection(server.address, 30) as stream:
        stream.sendall(request(b'{"prompt": "hi", "max_tokens": 2}'))
        stream.shutdown(socket.SHUT_WR)
        answer = read_all(stream)
        assert not answer or b" 200 " in answer.split(b"\r\n")[0]
    with socket.create_connection(server.address, 30) as stream:
        stream.sendall(request(b'{"prompt": "hi", "max')[:-3])
        stream.shutdown(socket.SHUT_WR)
        answer = read_all(stream)
        assert b" 400 " in answer.split(b"\r\n")[0]
        assert b"the body broke off" in answer
    assert json.loads(curl(f"{server.url}/health"))["status"] == "ok"


def test_slow_heads_and_bodies_are_cut(start):
    with start("--set", "live.read_timeout_s=0.3") as server:
        with socket.create_connection(server.address, 30) as stream:
            stream.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
            answer = read_all(stream)
            assert not answer or b" 408 " in answer.split(b"\r\n")[0]
        with socket.create_connection(server.address, 30) as stream:
            stream.sendall(request(b'{"prompt": "hi"}')[:-4])
            answer = read_all(stream)
            assert b" 408 " in answer.split(b"\r\n")[0]
            assert b"did not arrive within 0.3 s" in answer
        assert json.loads(curl(f"{server.url}/health"))["status"] == "ok"


def test_nonsense_on_the_wire_hurts_nobody(server):
    hello = b"\x16\x03\x01\x02\x00"
    for bytes_ in (hello, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 4096):
        with socket.create_connection(server.address, 30) as stream:
            stream.sendall(bytes_)
            stream.shutdown(socket.SHUT_WR)
            read_all(stream)
    assert json.loads(curl(f"{server.url}/health"))["status"] == "ok"


def test_many_clients_at_once_get_what_they_asked_for(server):
    def one(number: int) -> int:
        body = {"prompt": f"client {number}", "max_tokens": 10 + number, "ignore_eos": True}
        with socket.create_connection(server.address, 60) as stream:
            stream.sendall(request(json.dumps(body).encode()))
            answer = read_all(stream).partition(b"\r\n\r\n")[2]
        return json.loads(answer)["usage"]["completion_tokens"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(64))) == [10 + number for number in range(64)]


def test_a_taken_port_is_said_so(server, binary):
    host, port = server.address
    run = subprocess.run(
        [binary, "serve", "--listen", f"{host}:{port}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert f"{host}:{port}" in run.stderr
