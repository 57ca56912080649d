"""The official `anthropic` package against `/v1/messages`."""

import anthropic
import pytest

TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
        "required": ["city", "days"],
    },
}
ASKED = [{"role": "user", "content": "What is the weather like?"}]


@pytest.fixture
def client(server) -> anthropic.Anthropic:
    """An official client that does not retry."""
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30)


def test_message(client, model):
    answer = client.messages.create(model=model, max_tokens=12, messages=ASKED, system="Be brief.")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", model)
    (block,) = answer.content
    assert block.type == "text"
    assert block.text
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert 0 < answer.usage.output_tokens <= 12


def test_stop_sequences_and_length(client, model):
    params = {"model": model, "messages": ASKED, "extra_body": {"seed": 4}}
    text = client.messages.create(max_tokens=16, **params).content[0].text
    word = text.split(" ")[3]
    cut = client.messages.create(max_tokens=16, stop_sequences=[word], **params)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert word not in cut.content[0].text
    short = client.messages.create(max_tokens=1, **params)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)


def test_count_tokens_is_what_is_billed(client, model):
    params = {"model": model, "messages": ASKED, "system": "Be brief.", "tools": [TOOL]}
    counted = client.messages.count_tokens(**params).input_tokens
    usage = client.messages.create(max_tokens=256, **params).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    plain = client.messages.count_tokens(model=model, messages=ASKED).input_tokens
    assert 0 < plain < counted


def test_count_tokens_of_a_prompt_that_does_not_fit(client, model):
    long = [{"role": "user", "content": "word " * 50_000}]
    counted = client.messages.count_tokens(model=model, messages=long).input_tokens
    assert counted > 45_000, "clients ask in order to shorten it"
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        client.messages.create(model=model, max_tokens=1, messages=long)


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tool_uses_ends(client, model, stream):
    messages = list(ASKED)
    rounds = 0
    while rounds < 4:
        params = {"model": model, "max_tokens": 512, "messages": messages, "tools": [TOOL]}
        if stream:
            with client.messages.stream(**params) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**params)
        uses = [block for block in answer.content if block.type == "tool_use"]
        if not uses:
            break
        assert answer.stop_reason == "tool_use"
        messages.append({"role": "assistant", "content": answer.content})
        results = []
        for use in uses:
            assert use.name == "weather"
            assert isinstance(use.input["city"], str)
            assert use.input["days"] >= 1
            results.append({"type": "tool_result", "tool_use_id": use.id, "content": "sunny"})
        # Text may follow the results.
        text = [{"type": "text", "text": "Thanks."}] if stream else []
        messages.append({"role": "user", "content": results + text})
        rounds += 1
    assert rounds == 1, "a call, then text"
    assert answer.content[0].text


def test_a_stream_is_the_whole_message(client, model):
    params = {
        "model": model,
        "max_tokens": 64,
        "messages": ASKED,
        "extra_body": {"seed": 9},
    }
    whole = client.messages.create(**params)
    kinds = []
    with client.messages.stream(**params) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


def test_tool_choice(client, model):
    def ask(choice, **params):
        return client.messages.create(
            model=model, max_tokens=512, messages=ASKED, tools=[TOOL], tool_choice=choice, **params
        )

    assert ask({"type": "any"}).stop_reason == "tool_use"
    assert ask({"type": "tool", "name": "weather"}).stop_reason == "tool_use"
    assert ask({"type": "none"}).content[0].type == "text"
    single = {"type": "auto", "disable_parallel_tool_use": True}
    counts = {len(ask(single, extra_body={"seed": seed}).content) for seed in range(20)}
    assert counts == {1}


def test_errors_have_anthropics_shape(client, model):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="none", max_tokens=1, messages=ASKED)
    assert missing.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    for params in [
        {"messages": [{"role": "user", "content": [image]}]},
        {"messages": ASKED, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": ASKED, "tool_choice": {"type": "any"}},
        {"messages": [], "max_tokens": 1},
    ]:
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**{"model": model, "max_tokens": 8, **params})
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_the_key_comes_by_its_own_header(model, binary, tmp_path):
    from conftest import serving

    keys = tmp_path / "keys"
    keys.write_text("right\n")
    with serving.running(binary, *serving.FAST, "--set", f'live.api_keys_file="{keys}"') as server:
        for key in ("right", "wrong"):
            client = anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)
            if key == "right":
                assert client.messages.count_tokens(model=model, messages=ASKED).input_tokens
            else:
                with pytest.raises(anthropic.AuthenticationError):
                    client.messages.count_tokens(model=model, messages=ASKED)
