"""The official client, unchanged."""

import json

import pytest

from minuet.models.m3.parsers import END_THINK, THINK
from tests.server.scripted import say
from tests.server.test_chat import CALL, TOOL

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(scripted):
    with openai.OpenAI(base_url=scripted.url + "/v1", api_key="any", max_retries=0) as found:
        yield found


def test_models(client):
    assert [model.id for model in client.models.list()] == ["m"]


def test_chat_and_stream(client):
    ask = [{"role": "user", "content": say(f"{THINK}hm{END_THINK}Hello.")}]
    answer = client.chat.completions.create(model="m", messages=ask)
    assert answer.choices[0].message.content == "Hello."
    assert answer.choices[0].message.reasoning_content == "hm"
    options = {"include_usage": True}
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="m", messages=ask, stream=True, stream_options=options
    ):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert (text, usage.completion_tokens) == ("Hello.", answer.usage.completion_tokens)


def test_a_round_with_a_tool(client):
    messages = [{"role": "user", "content": say(CALL)}]
    first = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    call = first.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] == "Oslo"
    # the client sends back what it received, with all its empty fields
    messages.append(first.choices[0].message.model_dump())
    messages.append({"role": "tool", "tool_call_id": call.id, "content": say("It rains.")})
    second = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "It rains."


def test_completions_with_logprobs(client):
    answer = client.completions.create(model="m", prompt=say("abc"), logprobs=1, echo=True)
    assert answer.choices[0].text.endswith("abc")
    assert answer.choices[0].logprobs.token_logprobs[0] is None


def test_responses_and_their_stream(client):
    answer = client.responses.create(model="m", input=say("Hello."))
    assert answer.output_text == "Hello."
    with client.responses.stream(model="m", input=say("Hello.")) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == "Hello."


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    ask = say("abc", split=True, do="nan", at=1)
    with pytest.raises(openai.APIError, match="finite"):
        list(client.completions.create(model="m", prompt=ask, stream=True))
