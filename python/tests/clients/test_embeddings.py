"""The official `openai` package against `/v1/embeddings`."""

import math

import openai
import pytest


def test_vectors_follow_from_the_tokens(client, model):
    texts = ["The weather is fine.", "It rains.", "The weather is fine."]
    answer = client.embeddings.create(model=model, input=texts)
    vectors = [item.embedding for item in answer.data]
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert [len(vector) for vector in vectors] == [1024] * 3
    assert vectors[0] == vectors[2] != vectors[1]
    for vector in vectors:
        assert math.isclose(sum(x * x for x in vector), 1, rel_tol=1e-5)
    # The same prompts as completions: what is billed is what the engines compute.
    chat = client.completions.create(model=model, prompt=texts, max_tokens=1)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == chat.usage.prompt_tokens


def test_numbers_are_those_of_base64(client, model):
    params = {"model": model, "input": "x", "dimensions": 7}
    floats = client.embeddings.create(encoding_format="float", **params).data[0].embedding
    # The package asks for Base64 by itself, and decodes it.
    decoded = client.embeddings.create(**params).data[0].embedding
    assert len(floats) == len(decoded) == 7
    assert floats == pytest.approx(decoded, rel=1e-6)


def test_inputs_may_be_tokens_and_large(client, model):
    ids = [[1, 2, 3], [4]]
    answer = client.embeddings.create(model=model, input=ids)
    assert answer.usage.prompt_tokens == 4
    alone = client.embeddings.create(model=model, input=[4]).data[0].embedding
    assert alone == answer.data[1].embedding
    many = client.embeddings.create(model=model, input=["x"] * 256, dimensions=2048)
    assert len(many.data) == 256
    assert many.data[0].embedding == many.data[255].embedding


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", ""),
        ("input", []),
        ("input", [[]]),
        ("input", ["x"] * 1025),
        ("input", "word " * 60_000),
        ("dimensions", 0),
        ("dimensions", 10**12),
        ("encoding_format", "uint8"),
    ],
)
def test_errors_name_the_field(client, model, field, value):
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(**{"model": model, "input": "x", field: value})
    assert refused.value.param.startswith(field)


def test_an_unknown_model_has_none(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="none", input="x")
