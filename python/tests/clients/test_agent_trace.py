"""The session of an agent with tools, replayed through LangChain step by step."""

import json
from pathlib import Path

import jsonschema
import pytest

pytest.importorskip("langchain_openai")

TRACE = json.loads((Path(__file__).parent / "agent_trace.json").read_text())
BLOCK = 16


def recorded_messages() -> list:
    """The conversation before each step, and after the last one."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

    history = [SystemMessage(TRACE["system"]), HumanMessage(TRACE["user"])]
    each = [list(history)]
    for number, step in enumerate(TRACE["steps"]):
        call = {"name": step["tool"], "args": step["arguments"], "id": f"call_{number}"}
        history.append(AIMessage("", tool_calls=[call]))
        history.append(ToolMessage(step["result"], tool_call_id=call["id"]))
        each.append(list(history))
    history += [AIMessage(TRACE["last"]), HumanMessage("Now do the same for the stack.")]
    each.append(list(history))
    return each


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agents_session_is_replayed(server, model, streamed):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model=model,
        base_url=f"{server.url}/v1",
        api_key="none",
        max_tokens=512,
        stream_usage=True,
        # Sessions of their own, so that each meets its own cache only.
        extra_body={"cache_salt": f"agent {streamed}"},
        default_headers={"x-session-id": f"agent-{streamed}"},
    ).bind_tools(TRACE["tools"])
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TRACE["tools"]}
    before = 0
    for messages in recorded_messages():
        if streamed:
            answer = None
            for part in chat.stream(messages):
                answer = part if answer is None else answer + part
        else:
            answer = chat.invoke(messages)
        # Text follows the result of a tool, a call follows a question.
        assert bool(answer.tool_calls) == (messages[-1].type == "human")
        for call in answer.tool_calls:
            jsonschema.validate(call["args"], schemas[call["name"]])
        assert answer.content or answer.tool_calls
        used = answer.usage_metadata
        assert used["input_tokens"] > before
        # The prompt of the step before is cached, but for its last blocks: with the header of the
        # answer, which differs from the recorded one.
        cached = used["input_token_details"].get("cache_read", 0)
        assert cached >= max(0, before - 2 * BLOCK), messages
        assert cached % BLOCK == 0
        before = used["input_tokens"]
