"""Chat templates: the server's engine against Jinja2 as `transformers` configures it.

`SLIPSTREAM_TEMPLATE_CASES` and `SLIPSTREAM_TEMPLATE_SEED` draw more or other cases.
"""

import json
import os
import random
import subprocess
from pathlib import Path

import jinja_cases

CASES = int(os.environ.get("SLIPSTREAM_TEMPLATE_CASES", "300"))
SEED = int(os.environ.get("SLIPSTREAM_TEMPLATE_SEED", "1"))
FAMILIES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
# Those that iterate over contents, as `_detect_content_format` of vLLM 0.33 finds.
OF_PARTS = {"begin-end-markers", "gmask", "middle-tokens", "pythonic-calls", "turns"}


def render(binary, requests, *args):
    """What the command renders: the prompt of each request, or its error."""
    text = "".join(json.dumps(request) + "\n" for request in requests)
    command = [binary, "tokenizer", "render", *args]
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    lines = run.stdout.split("\n")[:-1]
    assert len(lines) == len(requests), run.stderr
    return [json.loads(line) for line in lines]


def compare(expected, rendered, sources):
    """Asserts equality where Jinja2 renders; says how many did."""
    same = 0
    wrong = []
    for source, theirs, ours in zip(sources, expected, rendered, strict=True):
        # Filters may have changed the case.
        shown = (theirs or "").lower()
        if theirs is None or any(name.lower() in shown for name in jinja_cases.OBJECTS):
            continue
        if ours.get("prompt") == theirs:
            same += 1
        else:
            wrong.append(f"{source!r}\n  Jinja2: {theirs!r}\n  here:   {ours}")
    assert not wrong, f"{len(wrong)} of {len(sources)} differ\n" + "\n".join(
        sorted(wrong, key=len)[:10]
    )
    return same


def test_generated_templates_render_as_in_jinja2(binary):
    sources = [jinja_cases.Cases(SEED * 1_000_003 + at).template() for at in range(CASES)]
    user = [{"role": "user", "content": "x"}]
    requests = [
        {"messages": user, "chat_template": source, "chat_template_kwargs": jinja_cases.VARIABLES}
        for source in sources
    ]
    # Special variables of chats.
    variables = jinja_cases.VARIABLES | {"messages": user, "add_generation_prompt": True}
    variables |= {"tools": None, "documents": None}
    expected = [jinja_cases.reference(source, variables) for source in sources]
    same = compare(expected, render(binary, requests), sources)
    assert same > CASES // 2


def test_templates_like_those_of_model_families(binary):
    requests, expected, names = [], [], []
    for path in FAMILIES:
        source = path.read_text()
        draw = random.Random(f"{SEED} {path.stem}")
        for _ in range(max(CASES // 20, 20)):
            chat = jinja_cases.chat(draw)
            requests.append({**chat, "chat_template": source})
            variables = jinja_cases.seen(chat, as_parts=path.stem in OF_PARTS)
            expected.append(jinja_cases.reference(source, variables))
            names.append(f"{path.stem}: {chat}")
    rendered = render(binary, requests)
    compare(expected, rendered, names)
    # What Jinja2 refuses is refused, and each template renders some chats.
    for name, theirs, ours in zip(names, expected, rendered, strict=True):
        assert theirs is not None or "error" in ours, (name, ours)
    for path in FAMILIES:
        own = zip(names, expected, strict=True)
        rendered_chats = [name for name, text in own if name.startswith(f"{path.stem}:") and text]
        assert len(rendered_chats) > 4, path.stem


def test_jinja2_refuses_what_is_refused_here(binary):
    """Undefined values fail where Jinja2's fail, and templates name their line."""
    user = [{"role": "user", "content": "x"}]
    for source, part in [
        ("\n{{ missing.name }}", "line 2: "),
        ("{{ missing['name'] }}", "line 1: "),
        ("{{ missing + 1 }}", "line 1: "),
        ("{{ none | length }}", "line 1: "),
        ("{{ 'a' + 1 }}", "line 1: "),
        ("{{ 'a'.nosuch() }}", "line 1: "),
        ("{{ [1].append(2) }}", "line 1: "),
        ("{{ {'a': 1}.update({}) }}", "line 1: "),
        ("{{ missing | tojson }}", "line 1: "),
        ("{{ 'a' | nosuch }}", "line 1: "),
        ("\n\n{{ 1 is nosuch }}", "line 3: "),
        ("{% for x in none %}{% endfor %}", "line 1: "),
        ("\n{% include 'x' %}", "line 2: "),
        ("\n{% generation %}", "line 2: "),
        ("{% if x %}", "line 1: "),
        ("{{ raise_exception('no ' ~ 'tools') }}", "no tools"),
    ]:
        assert jinja_cases.reference(source, {"messages": user}) is None, source
        [shown] = render(binary, [{"messages": user, "chat_template": source}])
        assert part in shown.get("error", ""), (source, shown)


def test_render_takes_a_tokenizers_directory(binary, tmp_path):
    special = {"bos_token": "<s>", "unk_token": {"content": "<unk>"}}
    named = [
        {"name": "default", "template": "{{ bos_token }}{{ unk_token }}{{ eos_token }}"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    ]
    config = json.dumps({**special, "chat_template": named})
    (tmp_path / "tokenizer_config.json").write_text(config)
    user = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    chats = [{"messages": user}, {"messages": user, "tools": tools}]
    assert render(binary, chats, tmp_path) == [{"prompt": "<s><unk>"}, {"prompt": "f"}]
    (tmp_path / "chat_template.jinja").write_text("\n{% nosuch %}")
    command = [binary, "tokenizer", "render", tmp_path]
    run = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "chat_template.jinja is not valid Jinja: line 2" in run.stderr, run.stderr


def test_numbers_are_pythons(binary):
    """In arguments of calls, tools and variables: digits, types and literals that JSON lacks."""
    source = "{{ messages[1].tool_calls[0].function.arguments | tojson }} "
    source += "{{ tools | tojson }} {{ k }} {{ [k] }}"
    draw = random.Random(SEED)
    numbers = ["-0", "-0.0", "1.0", "1.10", "1e2", "5e-324", "100000000000000000000.0"]
    numbers += ["18446744073709551615", "18446744073709551616", "-9223372036854775809"]
    numbers += ["1e400", "-1E400", "9" * 309, "-1" + "0" * 400, "7" * 4300]
    for _ in range(CASES):
        number = draw.randrange(1, 10 ** draw.randrange(1, 60))
        numbers.append(f"{draw.choice(['', '-'])}{number}")
    bodies, expected = [], []
    for number in numbers:
        more = f"[NaN, -Infinity, {number}]"
        arguments = f'{{"id": {number}, "more": {more}, "text": "\\"{number}"}}'
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [call]},
        ]
        schema = {"type": "object", "maximum": "NUMBER"}
        function = {"name": "f", "description": "", "parameters": schema}
        body = {
            "messages": said,
            "tools": [{"type": "function", "function": function}],
            "chat_template": source,
            "chat_template_kwargs": {"k": "NUMBER"},
        }
        # A body's own numbers are JSON's.
        own = "1" if "400" in number else number
        text = json.dumps(body).replace('"NUMBER"', own)
        bodies.append(text + "\n")
        value = json.loads(own)
        tools = json.dumps(json.loads(text)["tools"])
        expected.append(f"{json.dumps(json.loads(arguments))} {tools} {value} {[value]}")
    command = [binary, "tokenizer", "render"]
    text = "".join(bodies)
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in run.stdout.split("\n")[:-1]]
    compare(expected, lines, numbers)
    assert len(lines) == len(numbers)


def test_variables_of_the_request(binary):
    """As vLLM: `documents` is a variable, and arguments of `apply_chat_template` are none."""
    user = [{"role": "user", "content": "x"}]
    source = "{{ documents | tojson }}"
    documents = [{"title": "T", "text": "é"}]
    body = {"messages": user, "chat_template": source}
    shown = render(binary, [body, {**body, "chat_template_kwargs": {"documents": documents}}])
    assert shown == [{"prompt": "null"}, {"prompt": json.dumps(documents, ensure_ascii=False)}]
    for name in ("chat_template", "tokenize"):
        [shown] = render(binary, [{**body, "chat_template_kwargs": {name: True}}])
        assert f"chat_template_kwargs.{name}" in shown["error"], shown


def test_what_is_not_supported_is_the_templates_fault(binary):
    user = [{"role": "user", "content": "x"}]
    for source, part in [
        ("\n{{ lipsum() }}", "line 2: unknown function: `lipsum` is not supported"),
        ("{{ [1] | random }}", "line 1: unknown filter: `random` is not supported"),
        ("{{ 'a' | wordwrap(3) }}", "line 1: unknown filter: `wordwrap`"),
        ("{{ 'a'.encode() }}", "line 1: unknown method: "),
        ("{{ nosuch() }}", "line 1: unknown function: "),
        ("\n\n{{ '\\N{BULLET}' }}", "line 3: characters by name"),
    ]:
        [shown] = render(binary, [{"messages": user, "chat_template": source}])
        assert part in shown.get("error", ""), (source, shown)
        assert "refused the messages" not in shown["error"], shown
