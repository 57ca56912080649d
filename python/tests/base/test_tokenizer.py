"""The exported tokenizer against Hugging Face's library and against the server."""

import json
import random
import subprocess
import urllib.request

from tokenizers import Tokenizer

CHARACTERS = [
    "the",
    "The",
    " engine",
    "  ",
    "\n",
    "\t",
    "1",
    "23",
    "4567",
    "é",
    "漢",
    "😀",
    "<|im_end|>",
    "<|im_start|>",
    "<|",
    "|>",
    ",",
    ".",
    "unfathomable",
    "Xylophonic",
    "aaaaaaaaaaaaaaaaaaaaaaaaaa",
    "'s",
    "\u00a0",
    "\u200d",
    "_",
    "-",
    "ß",
    "\0",
]


def export(binary, directory) -> Tokenizer:
    """The tokenizer written by `slipstream tokenizer export`."""
    subprocess.run([binary, "tokenizer", "export", directory], check=True, capture_output=True)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_the_exported_tokenizer_gives_the_servers_ids(binary, server, tmp_path):
    exported = export(binary, tmp_path)
    draw = random.Random(1)
    for _ in range(200):
        text = "".join(draw.choices(CHARACTERS, k=draw.randrange(1, 30)))
        body = json.dumps({"prompt": text}).encode()
        head = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{server.url}/tokenize", body, head), timeout=30
        ) as answer:
            served = json.load(answer)["tokens"]
        assert exported.encode(text).ids == served, text
        assert exported.decode(served, skip_special_tokens=False) == text


def test_export_replaces_nothing_unasked(binary, tmp_path):
    export(binary, tmp_path)
    command = [binary, "tokenizer", "export", tmp_path]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "--force" in again.stderr
    subprocess.run([*command, "--force"], check=True, capture_output=True)


def test_a_server_takes_a_tokenizer_directory(binary, start, tmp_path):
    """The built-in tokenizer, loaded from its files: the same answers, the same counts."""
    export(binary, tmp_path)
    ask = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 5, "seed": 3}
    with start("--set", f'model.tokenizer="{tmp_path}"') as server:
        client = server.client()
        answer = client.chat.completions.create(model=client.models.list().data[0].id, **ask)
    assert answer.usage.prompt_tokens > 2
    assert answer.choices[0].message.content.startswith(" ")


def ask(server, path, body):
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_tokenize_counts_what_a_chat_counts(server):
    """Tools, variables and an open last message included."""
    tool = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
    tools = [{"type": "function", "function": tool}]
    said = [{"role": "user", "content": "hi there"}]
    last = {"role": "assistant", "content": "I see"}
    for more in [
        {},
        {"tools": tools},
        {"tools": []},
        {"chat_template_kwargs": {"x": 1}, "tools": tools},
        {"add_generation_prompt": False, "tools": tools},
    ]:
        chat = {"messages": said, **more}
        counted = ask(server, "/tokenize", chat)["count"]
        chat = {k: v for k, v in chat.items() if v != []}
        usage = ask(server, "/v1/chat/completions", {**chat, "max_tokens": 1})["usage"]
        assert usage["prompt_tokens"] == counted, more
    opened = {"add_generation_prompt": False, "continue_final_message": True}
    opened |= {"messages": [*said, last], "tools": tools, "return_token_strs": True}
    answer = ask(server, "/tokenize", opened)
    assert ask(server, "/detokenize", {"tokens": answer["tokens"]})["prompt"].endswith("I see")
    assert answer["token_strs"][-1] == "Ġsee"
