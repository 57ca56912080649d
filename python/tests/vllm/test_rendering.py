"""Chats rendered by `slipstream tokenizer render` and by vLLM.

vLLM's side is its parser of messages, its choice between texts and lists of parts, and the template
in `transformers`. `SLIPSTREAM_BIN` is the command, `SLIPSTREAM_CHATS` the number of chats, and
`SLIPSTREAM_CHATS_SEED` their seed. Templates are ours, generated ones, those in installed packages,
and those in the folder `SLIPSTREAM_TEMPLATES`.
"""

import importlib.util
import json
import os
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from bodies import SCHEMA
from transformers.utils import chat_template_utils
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import hf
from vllm.renderers.chat_utils.chat_message import parse_chat_messages

CONFIG: Any = SimpleNamespace(
    multimodal_config=None,
    enable_prompt_embeds=False,
    is_multimodal_model=False,
    allowed_local_media_path="",
    allowed_media_domains=None,
    hf_config=SimpleNamespace(model_type=""),
)
LOOPS = [
    "m.content",
    "m['content']",
    "m.content | list",
    "m.content[:1]",
    "(m.content or [])",
    "m.get('content')",
    "content",
    "show(m.content)",
    "m.tool_calls",
    "[m.content]",
]
LISTS = [
    "messages",
    "messages[1:]",
    "rest",
    "ns.rest",
    "messages | list",
    "(messages)",
    "messages + []",
]


def generated(rng: random.Random) -> str:
    """A template that writes contents by one of many loops."""
    loop, over = rng.choice(LOOPS), rng.choice(LISTS)
    each = (
        "{%- if c is string %}{{ c }}{% else %}{% for p in LOOP %}"
        "[{{ p['text'] if p is mapping else p }}]{% endfor %}{% endif %}"
    )
    inner = each.replace("LOOP", "c")
    head = "{% set rest = messages %}{% set ns = namespace(rest=messages) %}"
    if loop == "show(m.content)":
        name = rng.choice(["c", "content", "x"])
        inner = (
            each.replace("LOOP", name)
            .replace("c is", f"{name} is")
            .replace("{{ c }}", f"{{{{ {name} }}}}")
        )
        head += f"{{% macro show({name}) %}}{inner}{{% endmacro %}}"
        body = "{{ show(m.content) }}"
    else:
        body = "{% set c = m.content %}{% set content = c %}" + each.replace("LOOP", loop)
    if rng.random() < 0.2:
        head += "{% if messages[0].role == 'developer' %}D{% endif %}"
    if rng.random() < 0.5:
        body += (
            "{% for t in m.tool_calls or [] %}{{ t | tojson }}{% endfor %}{{ m.reasoning or '' }}"
        )
    tail = rng.choice(["", "{{ tools | tojson }}", "{{ reasoning_effort }}{{ enable_thinking }}"])
    return f"{head}{{% for m in {over} %}}<{{{{ m.role }}}}>{body}{{% endfor %}}{tail}"


def installed() -> list[tuple[str, str]]:
    """Templates in installed packages."""
    found = []
    for package in ("vllm", "llama_cpp", "transformers", "sglang", "mlx_lm"):
        spec = importlib.util.find_spec(package)
        if spec and spec.submodule_search_locations:
            for path in sorted(Path(spec.submodule_search_locations[0]).rglob("*.jinja")):
                found.append((f"{package}/{path.name}", path.read_text()))
    folder = os.environ.get("SLIPSTREAM_TEMPLATES")
    if folder:
        found += [(path.name, path.read_text()) for path in sorted(Path(folder).rglob("*.jinja"))]
    return found


def content(rng: random.Random) -> Any:
    """A content as clients send it."""
    texts = ["hi", " a b ", "", "x\n", "é"]
    if rng.random() < 0.5:
        return rng.choice(texts)
    return [{"type": "text", "text": rng.choice(texts)} for _ in range(rng.choice([0, 1, 1, 2, 3]))]


def chat(rng: random.Random) -> dict[str, Any]:
    """A chat with the usual turns."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "developer"]), "content": content(rng)})
    for _ in range(rng.choice([1, 1, 2, 3])):
        messages.append({"role": "user", "content": content(rng)})
        turn: dict[str, Any] = {"role": "assistant", "content": content(rng)}
        if rng.random() < 0.3:
            arguments = rng.choice(['{"a": 1}', "{}", '{"b": [1, "x"], "a": null}', "not JSON"])
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": "call12345",
                    "function": {"name": "f", "arguments": arguments},
                }
            ]
            messages += [
                turn,
                {"role": "tool", "tool_call_id": "call12345", "content": content(rng)},
            ]
            turn = {"role": "assistant", "content": content(rng)}
        if rng.random() < 0.2:
            turn["reasoning"] = "so"
        messages.append(turn)
        if rng.random() < 0.1:
            messages.append({"role": "developer", "content": content(rng)})
    messages.append({"role": "user", "content": content(rng)})
    made: dict[str, Any] = {"messages": messages}
    if rng.random() < 0.4:
        function = {"name": "f", "parameters": SCHEMA} | rng.choice(
            [{}, {"description": "d"}, {"strict": True}, {"x": 1}]
        )
        made["tools"] = [{"type": "function", "function": function}]
    return made


def expected(source: str, body: dict[str, Any]) -> str | None:
    """What vLLM renders; `None` if the template refuses."""
    request = ChatCompletionRequest.model_validate(json.loads(json.dumps(body)))
    form = hf._detect_content_format(source, default="string")
    messages, _, _ = parse_chat_messages(request.messages, CONFIG, form)
    if any(
        message["role"] == "developer" for message in messages
    ) and not hf._detect_developer_role_support(source):
        messages = hf._consolidate_system_messages(hf._convert_developer_to_system(messages))
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            [messages],
            tools=tools,
            chat_template=source,
            add_generation_prompt=True,
            **(request.chat_template_kwargs or {}),
        )
    except Exception:
        return None
    return rendered[0]


def rendered(bodies: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What the command renders."""
    binary = os.environ.get("SLIPSTREAM_BIN")
    if not binary:
        pytest.skip("SLIPSTREAM_BIN names no command")
    text = "".join(json.dumps(body) + "\n" for body in bodies)
    run = subprocess.run(
        [binary, "tokenizer", "render"], input=text, capture_output=True, text=True, check=False
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_chats_are_rendered_as_by_vllm() -> None:
    count = int(os.environ.get("SLIPSTREAM_CHATS", "300"))
    seed = int(os.environ.get("SLIPSTREAM_CHATS_SEED", "1"))
    rng = random.Random(seed)
    own = Path(__file__).parent.parent / "tests" / "templates"
    known = [(path.stem, path.read_text()) for path in sorted(own.glob("*.jinja"))] + installed()
    cases = []
    for at in range(count):
        name, source = known[at % len(known)] if at % 2 else ("generated", generated(rng))
        cases.append((name, source, chat(rng)))
    answers = rendered([{**body, "chat_template": source} for _, source, body in cases])
    assert len(answers) == len(cases)
    wrong = []
    same = 0
    for (name, source, body), answer in zip(cases, answers, strict=True):
        wanted = expected(source, body)
        if wanted is None:
            continue
        if answer.get("prompt") == wanted:
            same += 1
        else:
            shown = source if name == "generated" else name
            wrong.append(f"{shown}\n  {json.dumps(body)}\n  vLLM: {wanted!r}\n  here: {answer}")
    assert not wrong, f"seed {seed}: {len(wrong)} of {count} differ, {same} agree\n" + "\n".join(
        sorted(wrong, key=len)[:8]
    )
    assert same > count // 3
