"""The official `openai` package against `slipstream serve`."""

import math

import openai
import pytest

MESSAGES = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is a KV cache?"}]},
]


def chat(client: openai.OpenAI, model: str, **params):
    """A chat completion of `MESSAGES`."""
    return client.chat.completions.create(model=model, messages=MESSAGES, **params)


def tokens(client: openai.OpenAI, text: str) -> list[int]:
    """The tokens of `text`, by the server."""
    answer = client.post("/../tokenize", body={"prompt": text}, cast_to=object)
    return answer["tokens"]


def test_models(client, model):
    assert [m.id for m in client.models.list()] == [model]
    shown = client.models.retrieve(model)
    assert (shown.id, shown.object) == (model, "model")
    assert shown.max_model_len > 0


def test_chat(client, model):
    answer = chat(client, model, max_tokens=12)
    assert answer.object == "chat.completion"
    assert answer.model == model
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_says_the_same_as_the_whole(client, model):
    params = {"max_tokens": 40, "seed": 7, "extra_body": {"ignore_eos": True}}
    whole = chat(client, model, **params)
    stream = chat(client, model, stream=True, stream_options={"include_usage": True}, **params)
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert sum(bool(text) for text in texts) == 40, "one event a token"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(c.usage is None for c in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 40
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_seed_decides_the_answer(client, model):
    def said(seed):
        return chat(client, model, max_tokens=16, seed=seed).choices[0].message.content

    assert said(1) == said(1)
    assert said(1) != said(2)


def test_answers_come_back_as_the_tokens_that_were_counted(client, model):
    answer = chat(client, model, max_tokens=64, seed=3, extra_body={"ignore_eos": True})
    text = answer.choices[0].message.content
    assert len(tokens(client, text)) == answer.usage.completion_tokens == 64


def test_the_next_turn_hits_the_cache(client, model):
    said = [{"role": "user", "content": "cache me " * 40}]
    first = client.chat.completions.create(
        model=model, messages=said, max_tokens=64, extra_body={"ignore_eos": True}
    )
    said += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "go on"},
    ]
    second = client.chat.completions.create(model=model, messages=said, max_tokens=1)
    cached = second.usage.prompt_tokens_details.cached_tokens
    # The answer's blocks are hit too, not only the first prompt's. The last generated token was
    # never computed, and blocks are whole.
    assert cached > first.usage.prompt_tokens
    assert second.usage.prompt_tokens > cached


def test_n_choices_differ(client, model):
    answer = chat(client, model, n=3, max_tokens=8, seed=5, extra_body={"ignore_eos": True})
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) == 3
    assert answer.usage.completion_tokens == 24

    texts = ["", "", ""]
    stream = chat(
        client, model, n=3, max_tokens=8, seed=5, stream=True, extra_body={"ignore_eos": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in answer.choices]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings_end_an_answer(client, model, stream, keep):
    params = {"max_tokens": 32, "seed": 11}
    words = chat(client, model, extra_body={"ignore_eos": True}, **params)
    words = words.choices[0].message.content.split(" ")[1:]
    # Half of one word and half of the next: found across tokens.
    stop = words[9][-1] + " " + words[10][0]
    text = " " + " ".join(words)
    end = text.index(stop) + (len(stop) if keep else 0)
    extra = {"ignore_eos": True, "include_stop_str_in_output": keep}
    answer = chat(client, model, stop=[stop, "\n"], stream=stream, extra_body=extra, **params)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        said = "".join(choice.delta.content or "" for choice in choices)
        last = choices[-1]
    else:
        last = answer.choices[0]
        said = last.message.content
    assert said == text[:end]
    assert last.finish_reason == "stop"
    assert last.stop_reason == stop


def test_natural_end_and_min_tokens(client, model):
    answer = chat(client, model, seed=4)
    assert answer.choices[0].finish_reason == "stop"
    natural = answer.usage.completion_tokens
    longer = chat(client, model, seed=4, extra_body={"min_tokens": natural + 10})
    assert longer.usage.completion_tokens >= natural + 10


def test_chat_logprobs(client, model):
    params = {"max_tokens": 5, "logprobs": True, "top_logprobs": 3, "seed": 2}
    answer = chat(client, model, extra_body={"ignore_eos": True}, **params)
    content = answer.choices[0].logprobs.content
    assert "".join(t.token for t in content) == answer.choices[0].message.content
    for token in content:
        assert bytes(token.bytes).decode() == token.token
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == token.top_logprobs[0].logprob < 0
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1
    stream = chat(client, model, stream=True, extra_body={"ignore_eos": True}, **params)
    pieces = [c.choices[0].logprobs for c in stream]
    streamed = [token for piece in pieces if piece for token in piece.content]
    assert streamed == content


def test_completions(client, model):
    answer = client.completions.create(model=model, prompt="Once upon a time")
    assert answer.object == "text_completion"
    assert answer.usage.completion_tokens <= 16
    answer = client.completions.create(
        model=model,
        prompt="Once",
        max_tokens=4,
        logprobs=2,
        echo=False,
        seed=1,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset[0] == 0
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 4


def test_prompts_in_batches_and_as_tokens(client, model):
    ids = tokens(client, "one two three")
    answer = client.completions.create(model=model, prompt=[ids, ids[:2]], max_tokens=3, n=2)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == len(ids) + 2
    text = client.completions.create(model=model, prompt="one two three", max_tokens=3, seed=9)
    same = client.completions.create(model=model, prompt=ids, max_tokens=3, seed=9)
    assert text.choices[0].text == same.choices[0].text
    assert text.usage.prompt_tokens == same.usage.prompt_tokens == len(ids)


def test_echo_repeats_the_prompt(client, model):
    params = {"model": model, "prompt": "Say é: ", "max_tokens": 3, "echo": True, "seed": 1}
    whole = client.completions.create(**params).choices[0].text
    assert whole.startswith("Say é: ") and len(whole) > len("Say é: ")
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(stream=True, **params)
    )
    assert streamed == whole


def test_a_stream_can_be_left(client, model):
    """Closing a stream frees the engine: the server continues and answers the next request."""
    stream = chat(client, model, stream=True, max_tokens=10_000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert chat(client, model, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("params", "param", "part"),
    [
        ({"temperature": -1}, "temperature", "from 0 to 2"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"max_tokens": -3}, "max_tokens", "is -3"),
        ({"max_tokens": 10**9}, "max_tokens", "maximum context length"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "only tools of type `function`"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}},
                }
            },
            "response_format.json_schema.schema",
            "`not` of JSON Schema is not modelled",
        ),
        ({"stop": [""]}, "stop", "empty string"),
        ({"extra_body": {"stop_token_ids": [10**9]}}, "stop_token_ids", "not in the vocabulary"),
    ],
)
def test_bad_requests_name_the_field(client, model, params, param, part):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, model, **params)
    assert caught.value.param == param
    assert part in caught.value.message


def test_images_are_refused(client, model):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match="takes no images") as caught:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": [part]}])
    assert caught.value.param == "messages.0.content"


def test_unknown_model(client, model):
    with pytest.raises(openai.NotFoundError, match=f"this server has `{model}`") as caught:
        chat(client, "gpt-none")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-none")


def test_keys(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("from-file\n")
    setting = f'live.api_keys_file="{keys}"'
    with start("--set", setting, env={"SLIPSTREAM_API_KEYS": "one,two"}) as server:
        for key in ("from-file", "one", "two"):
            assert server.client(key).models.list().data
        with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"):
            server.client("three").models.list()
