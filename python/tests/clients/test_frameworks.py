"""LangChain and LiteLLM, each with a conversation that calls a tool."""

import json

import pytest

langchain_core = pytest.importorskip("langchain_core")


def test_langchain_agent_calls_a_tool_and_answers(server, model):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    chat = ChatOpenAI(model=model, base_url=f"{server.url}/v1", api_key="none", max_tokens=512)
    bound = chat.bind_tools([add])
    messages = [HumanMessage("What is the sum?")]
    answer = bound.invoke(messages)
    assert answer.tool_calls
    messages.append(answer)
    for call in answer.tool_calls:
        assert call["name"] == "add"
        result = add.invoke(call["args"])
        messages.append(ToolMessage(str(result), tool_call_id=call["id"]))
    last = bound.invoke(messages)
    assert not last.tool_calls
    assert last.content
    assert last.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]

    # Streamed parts of calls add up.
    whole = None
    for part in bound.stream(messages[:1]):
        whole = part if whole is None else whole + part
    assert whole.tool_calls
    assert all(isinstance(call["args"]["a"], int) for call in whole.tool_calls)


def test_langchain_structured_output(server, model):
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        """Somebody."""

        name: str
        age: int

    chat = ChatOpenAI(model=model, base_url=f"{server.url}/v1", api_key="none", max_tokens=512)
    for method in ("json_schema", "function_calling"):
        person = chat.with_structured_output(Person, method=method).invoke("Who?")
        assert isinstance(person, Person), method


def test_litellm_calls_a_tool(server, model):
    litellm = pytest.importorskip("litellm")
    params = {
        "model": f"openai/{model}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 512,
    }
    tools = [
        {
            "type": "function",
            "function": {
                "name": "look",
                "parameters": {
                    "type": "object",
                    "properties": {"at": {"type": "string"}},
                    "required": ["at"],
                },
            },
        }
    ]
    answer = litellm.completion(**params, tools=tools)
    call = answer.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["at"]
    assert answer.choices[0].finish_reason == "tool_calls"
    text = "".join(
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**params, stream=True)
    )
    assert text
