"""Errors and broken streams by rate, as clients meet them."""

import json
import urllib.error
import urllib.request

import anthropic
import openai
import pytest

ASKED = [{"role": "user", "content": "x"}]


@pytest.fixture
def faulty(binary, tmp_path, request):
    from conftest import serving

    key = tmp_path / "admin"
    key.write_text("secret\n")
    args = ("--set", f'live.admin_key_file="{key}"', "--set", "live.faults.seed=7")
    speedup = getattr(request, "param", "0")
    with serving.running(binary, "--speedup", speedup, *args) as server:
        yield server


def admin(server, method: str, body=None, key="secret"):
    """Status and JSON of an answer of `/admin/faults`."""
    request = urllib.request.Request(
        f"{server.url}/admin/faults",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chat(client, model, **params):
    return client.chat.completions.create(model=model, messages=ASKED, max_tokens=20, **params)


def fates(client, model, count: int) -> str:
    """`.` for each request that is answered, else the status."""
    shown = ""
    for _ in range(count):
        try:
            chat(client, model)
            shown += "."
        except openai.APIStatusError as error:
            assert error.body["code"] == "injected_fault"
            assert error.status_code != 429 or "retry-after" in error.response.headers
            shown += {429: "4", 500: "5"}[error.status_code]
    return shown


def test_errors_by_rate_are_repeated_by_their_seed_and_counted(faulty, model):
    client = faulty.client()
    assert fates(client, model, 5) == ".....", "off by default"
    status, rates = admin(faulty, "POST", {"error_429": 0.3, "error_500": 0.3})
    assert (status, rates["error_429"], rates["seed"]) == (200, 0.3, 7)
    first = fates(client, model, 24)
    assert set(first) == {".", "4", "5"}
    admin(faulty, "POST", {})
    assert fates(client, model, 24) == first
    admin(faulty, "POST", {"seed": 8})
    assert fates(client, model, 24) != first
    admin(faulty, "POST", {"error_429": 1, "error_500": 0})
    # All endpoints that generate; an endpoint that does not is spared.
    for use in (
        lambda: client.responses.create(model=model, input="x"),
        lambda: client.embeddings.create(model=model, input="x"),
        lambda: client.completions.create(model=model, prompt="x"),
    ):
        with pytest.raises(openai.RateLimitError):
            use()
    messages = anthropic.Anthropic(base_url=faulty.url, api_key="none", max_retries=0).messages
    with pytest.raises(anthropic.RateLimitError) as refused:
        messages.create(model=model, max_tokens=1, messages=ASKED)
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    assert client.models.list().data
    _, rates = admin(faulty, "GET")
    counted = rates["injected"]
    assert counted["429"] >= 2 * first.count("4") + 4
    assert counted["500"] >= 2 * first.count("5")
    with urllib.request.urlopen(f"{faulty.url}/metrics", timeout=30) as page:
        line = f'slipstream_faults_injected_total{{fault="429"}} {counted["429"]}'
        assert line in page.read().decode()
    assert admin(faulty, "DELETE")[1]["error_429"] == 0
    assert fates(client, model, 5) == "....."


def test_a_client_that_retries_gets_its_answers(faulty, model):
    admin(faulty, "POST", {"error_500": 0.3})
    client = openai.OpenAI(base_url=f"{faulty.url}/v1", api_key="none", max_retries=9, timeout=60)
    for _ in range(3):
        assert chat(client, model).choices[0].message.content


# A step takes some of a millisecond, so that streams come in several pieces.
@pytest.mark.parametrize("faulty", ["20"], indirect=True)
def test_streams_break_and_answers_that_are_not_streamed_do_not(faulty, model):
    client = faulty.client()
    admin(faulty, "POST", {"cut": 1})
    broken = 0
    for _ in range(10):
        try:
            events = list(chat(client, model, stream=True))
            assert events[-1].choices[0].finish_reason
        except openai.APIConnectionError:
            broken += 1
    assert chat(client, model).choices[0].message.content
    # A stream that ends before it would break counts as none.
    assert admin(faulty, "GET")[1]["injected"]["cut"] == broken > 0
    admin(faulty, "POST", {"cut": 0, "stall": 1, "stall_s": 0.01})
    for _ in range(10):
        whole = list(chat(client, model, stream=True))
        assert whole[-1].choices[0].finish_reason, "a stalled stream comes to its end"
    assert admin(faulty, "GET")[1]["injected"]["stall"] > 0


def test_the_admin_path_has_a_key_of_its_own(faulty, server):
    assert admin(faulty, "GET", key="wrong")[0] == 401
    assert admin(server, "GET")[0] == 404, "without a key there is no such path"
    for body in ({"cut": 2}, {"cut": 0.6, "stall": 0.6}, {"error_418": 1}, [1], {"stall_s": -1}):
        status, error = admin(faulty, "POST", body)
        assert status == 400
        assert error["error"]["message"]
    assert admin(faulty, "PUT", {})[0] == 405
