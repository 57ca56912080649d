"""Tools and structured output with the official `openai` package."""

import enum
import json

import openai
import pytest
from pydantic import BaseModel, Field

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 3},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
                "unit": {"enum": ["celsius", "kelvin"]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASKED = [{"role": "user", "content": "What is the weather like?"}]


def check_weather(arguments: str) -> None:
    """The arguments satisfy the schema of `weather`."""
    sent = json.loads(arguments)
    assert len(sent["city"]) >= 3
    assert 1 <= sent["days"] <= 7
    assert sent.get("unit") in (None, "celsius", "kelvin")
    assert set(sent) <= {"city", "days", "unit"}


def test_a_loop_of_calls_and_answers_ends(client, model):
    messages = list(ASKED)
    for turn in range(5):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=[WEATHER], max_tokens=512, seed=turn
        )
        (choice,) = answer.choices
        if choice.finish_reason != "tool_calls":
            break
        assert choice.message.content is None
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            assert (call.type, call.function.name) == ("function", "weather")
            check_weather(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert turn == 1, "a call, then text"
    assert choice.message.tool_calls is None
    assert choice.message.content
    assert answer.usage.prompt_tokens > 0


def collect(stream):
    """The calls and the text of a stream, and why it ended."""
    calls, text, reason, usage = {}, "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                if part.id:
                    assert part.index not in calls, "a call begins once"
                    calls[part.index] = [part.id, part.function.name, ""]
                calls[part.index][2] += part.function.arguments or ""
    return calls, text, reason, usage


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_stream_has_the_calls_of_the_whole_answer(client, model, choice):
    for seed in range(12):
        params = {
            "model": model,
            "messages": ASKED,
            "tools": [WEATHER, CLOCK],
            "tool_choice": choice,
            "max_tokens": 512,
            "seed": seed,
        }
        whole = client.chat.completions.create(**params)
        stream = client.chat.completions.create(
            **params, stream=True, stream_options={"include_usage": True}
        )
        calls, text, reason, usage = collect(stream)
        assert text == ""
        assert reason == whole.choices[0].finish_reason == "tool_calls"
        expected = [
            (call.function.name, call.function.arguments)
            for call in whole.choices[0].message.tool_calls
        ]
        assert [(name, arguments) for _, name, arguments in calls.values()] == expected
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert len({id for id, _, _ in calls.values()}) == len(calls)


def test_tool_choice_decides(client, model):
    def ask(**params):
        answer = client.chat.completions.create(
            model=model, messages=ASKED, tools=[WEATHER, CLOCK], max_tokens=512, **params
        )
        return answer.choices[0]

    named = ask(tool_choice={"type": "function", "function": {"name": "clock"}})
    (call,) = named.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("clock", "{}")
    assert named.finish_reason == "stop", "as with OpenAI and vLLM"
    assert ask(tool_choice="none").message.tool_calls is None
    counts = {len(ask(seed=seed).message.tool_calls) for seed in range(30)}
    assert counts == {1, 2}, "parallel calls, now and then"
    single = {
        len(ask(seed=seed, parallel_tool_calls=False).message.tool_calls) for seed in range(30)
    }
    assert single == {1}


def test_too_few_tokens_cut_a_call(client, model):
    params = {"model": model, "messages": ASKED, "tools": [WEATHER], "seed": 1}
    whole = client.chat.completions.create(**params, max_tokens=512)
    needed = whole.usage.completion_tokens
    again = client.chat.completions.create(**params, max_tokens=needed)
    assert again.choices[0].finish_reason == "tool_calls"
    cut = client.chat.completions.create(**params, max_tokens=needed - 1)
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.tool_calls is None
    assert cut.usage.completion_tokens == needed - 1
    stream = client.chat.completions.create(**params, max_tokens=needed - 8, stream=True)
    _, _, reason, _ = collect(stream)
    assert reason == "length"


def test_tools_count_as_prompt(client, model):
    plain = client.chat.completions.create(model=model, messages=ASKED, max_tokens=1)
    tools = client.chat.completions.create(
        model=model, messages=ASKED, tools=[WEATHER], max_tokens=512
    )
    assert tools.usage.prompt_tokens > plain.usage.prompt_tokens + 40


class Color(enum.Enum):
    """Some colors."""

    RED = "red"
    BLUE = "blue"


class Leaf(BaseModel):
    """A leaf, or what grows on a branch."""

    color: Color
    length: float = Field(ge=0.5, le=9)
    children: list["Leaf"] = []


class Tree(BaseModel):
    """Nested, with what pydantic makes of it: `$defs`, `anyOf`, `enum`."""

    name: str
    age: int | None = None
    leaves: list[Leaf] = Field(min_length=2, max_length=4)
    kind: str = Field(pattern="^[A-Z]{2}-[0-9]{3}$")


def test_parse_gives_a_model(client, model):
    for seed in range(10):
        answer = client.chat.completions.parse(
            model=model, messages=ASKED, response_format=Tree, max_tokens=4096, seed=seed
        )
        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, Tree)
        assert 2 <= len(parsed.leaves) <= 4
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_json_mode(client, model, stream):
    answer = client.chat.completions.create(
        model=model,
        messages=ASKED,
        response_format={"type": "json_object"},
        max_tokens=512,
        stream=stream,
    )
    if stream:
        text, reason = collect(answer)[1:3]
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert isinstance(json.loads(text), dict)
    assert reason == "stop"


def test_structured_outputs_of_vllm(client, model):
    def text(**extra):
        answer = client.completions.create(
            model=model, prompt="x", max_tokens=512, extra_body=extra
        )
        return answer.choices[0].text

    assert text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert text(guided_choice=["a b", "c"]) in ("a b", "c")
    assert text(structured_outputs={"regex": "[0-9]{3}-x"}).endswith("-x")
    assert isinstance(json.loads(text(guided_json={"type": "array"})), list)


def test_what_is_not_modelled_is_refused_by_name(client, model):
    for extra, param in [
        ({"guided_grammar": "root ::= 'x'"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {"properties": {"a": {"not": {"type": "null"}}}},
                    },
                }
            },
            "response_format.json_schema.schema.properties.a",
        ),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=model, messages=ASKED, extra_body=extra)
        assert refused.value.body["param"] == param
