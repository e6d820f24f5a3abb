"""Structured output: what comes back fits, or nothing does."""

import json

import pytest

from minuet.models.m3.parsers import END_THINK, THINK
from tests.server.test_chat import CHAT, chat, user, whole
from tests.server.test_completions import complete, refused

pytest.importorskip("xgrammar", reason="structured output is the extra minuet[grammar]")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "kind", "age"],
}


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize("seed", range(4))
def test_a_random_model_keeps_to_the_schema(tiny, seed):
    body = {"response_format": json_schema(SCHEMA), "seed": seed, "max_tokens": 400}
    answer = chat(tiny, **body, temperature=1.0)["choices"][0]
    assert answer["finish_reason"] == "stop"
    found = json.loads(answer["message"]["content"])
    assert set(found) == {"name", "kind", "age"}
    assert found["kind"] in ("cat", "dog")
    assert 0 <= found["age"] <= 30


def test_any_object(tiny):
    body = {"response_format": {"type": "json_object"}, "seed": 1, "logit_bias": {}}
    content = chat(tiny, **body, max_tokens=2000, temperature=0.3)["choices"][0]
    if content["finish_reason"] == "stop":
        assert isinstance(json.loads(content["message"]["content"]), dict)
    else:
        assert content["message"]["content"].lstrip().startswith("{")


def test_choice_and_regex(tiny):
    choice = complete(tiny, structured_outputs={"choice": ["yes", "no"]}, temperature=1.0)
    assert choice["choices"][0]["text"] in ("yes", "no")
    regex = complete(tiny, structured_outputs={"regex": "[ab]{3}c"}, temperature=1.0)
    text = regex["choices"][0]["text"]
    assert len(text) == 4
    assert set(text[:3]) <= {"a", "b"}


def test_the_grammar_waits_for_the_end_of_reasoning(tiny):
    end = tiny.post("/tokenize", {"prompt": END_THINK}).json()["tokens"][0]
    body = {
        "response_format": json_schema(SCHEMA),
        "chat_template_kwargs": {"thinking_mode": "enabled"},
        "logit_bias": {str(end): 6.0},
        "max_tokens": 600,
        "seed": 5,
    }
    answer = whole(chat(tiny, temperature=1.0, **body))[0]
    assert answer["finish_reason"] == "stop"
    assert set(json.loads(answer["content"])) == {"name", "kind", "age"}


def test_a_token_the_grammar_forbids_ends_the_request(scripted):
    from tests.server.scripted import say

    body = {"messages": user(say("no json")), "response_format": {"type": "json_object"}}
    response = scripted.post(CHAT, body)
    assert response.status_code == 500
    assert "grammar" in response.json()["error"]["message"]
    assert chat(scripted, say(f"{THINK}a{END_THINK}fine"))["choices"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 3},
        {"oneOf": [{"type": "string"}]},
        {"type": "string", "format": "email"},
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"$ref": "http://example.com/schema"},
        {"$ref": "#/$defs/missing"},
        {"type": "bogus"},
        {"properties": {"a": {"if": {}}}},
        {"type": "string", "pattern": "a+", "minLength": 2},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": ".*"},
        {"type": "string", "pattern": "[^a]"},
        {"type": "string", "pattern": "[ -~]+"},
        {"type": "string", "pattern": '\\d"'},
    ],
)
def test_a_schema_that_would_not_be_enforced_is_refused(tiny, schema):
    refused(tiny, "response_format", CHAT, messages=user("x"), response_format=json_schema(schema))


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"choice": []}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "json_object": True}}),
        ("structured_outputs", {"structured_outputs": {"grammar": "root := broken ="}}),
        ("structured_outputs", {"structured_outputs": {"structural_tag": "{}"}}),
        ("ignore_eos", {"structured_outputs": {"json_object": True}, "ignore_eos": True}),
    ],
)
def test_bad_demands_are_refused(tiny, param, body):
    refused(tiny, param, CHAT, messages=user("x"), **body)


def test_nested_beyond_all_measure_is_refused_and_hurts_nobody(tiny):
    schema = {"type": "object"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    refused(tiny, "response_format", CHAT, messages=user("x"), response_format=json_schema(schema))
    assert tiny.get("/health").status_code == 200
