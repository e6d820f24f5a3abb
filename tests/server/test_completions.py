"""``/v1/completions`` over the real engine: a field does what it says, or is refused by name."""

import json

import pytest

PROMPT = "Once upon a time"


def complete(server, **body):
    response = server.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events_of(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def stream(server, path="/v1/completions", **body):
    given = {"prompt": PROMPT, "temperature": 0, "stream": True, **body}
    response = server.post(path, given)
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response)


def refused(server, param, path="/v1/completions", status=400, **body):
    base = {} if "messages" in body else {"prompt": PROMPT}
    response = server.post(path, {**base, **body})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    return error


def test_shape_of_an_answer(tiny):
    answer = complete(tiny, max_tokens=4, ignore_eos=True)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4


def test_a_stream_adds_up_to_the_whole(tiny):
    how = {"max_tokens": 24, "ignore_eos": True, "seed": 3, "temperature": 1.0, "n": 2}
    whole = complete(tiny, **how)
    parts = stream(tiny, **how, stream_options={"include_usage": True})
    texts = ["", ""]
    for part in parts[:-1]:
        (choice,) = part["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 48
    assert len({part["id"] for part in parts}) == 1


def test_choices_of_one_seed_differ_and_repeat(tiny):
    how = {"n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    first = [c["text"] for c in complete(tiny, **how)["choices"]]
    assert [c["text"] for c in complete(tiny, **how)["choices"]] == first
    assert len(set(first)) == 4
    one = complete(tiny, **{**how, "n": 1})["choices"][0]["text"]
    assert one == first[0]


def test_token_id_prompts_and_batches(tiny):
    ids = tiny.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    text = complete(tiny, max_tokens=5)["choices"][0]["text"]
    assert complete(tiny, prompt=ids, max_tokens=5)["choices"][0]["text"] == text
    both = complete(tiny, prompt=[ids, ids[:2]], max_tokens=5)
    assert [c["index"] for c in both["choices"]] == [0, 1]
    assert both["choices"][0]["text"] == text
    assert both["usage"]["prompt_tokens"] == len(ids) + 2


def test_echo_with_logprobs_scores_a_text(tiny):
    ids = tiny.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    answer = complete(tiny, prompt=[ids], echo=True, logprobs=2, max_tokens=1)
    report = answer["choices"][0]["logprobs"]
    assert len(report["tokens"]) == len(ids) + 1
    assert report["token_logprobs"][0] is None
    assert all(value < 0 for value in report["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in report["top_logprobs"][1:])
    assert report["text_offset"] == sorted(report["text_offset"])
    only = complete(tiny, prompt=[ids], echo=True, logprobs=2, max_tokens=0)["choices"][0]
    assert only["text"] == PROMPT
    scored = only["logprobs"]["token_logprobs"][1:]
    assert scored == pytest.approx(report["token_logprobs"][1:-1], rel=1e-4)
    assert complete(tiny, prompt=ids, max_tokens=0, echo=True)["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_as_vllm_reports_them(tiny):
    choice = complete(tiny, prompt_logprobs=1, max_tokens=1)["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    for entry in choice["prompt_logprobs"][1:]:
        assert any(value["rank"] == 1 for value in entry.values())


def test_token_ids_are_returned_when_asked_for(tiny):
    choice = complete(tiny, max_tokens=3, ignore_eos=True, return_token_ids=True)["choices"][0]
    assert len(choice["token_ids"]) == 3
    text = tiny.post("/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"]
    assert text == choice["text"] or "\ufffd" in text
    parts = stream(tiny, max_tokens=3, ignore_eos=True, return_token_ids=True)
    streamed = [i for p in parts for c in p["choices"] for i in c["token_ids"]]
    assert streamed == choice["token_ids"]


def test_stop_strings_end_and_are_cut(tiny):
    text = complete(tiny, max_tokens=12, ignore_eos=True)["choices"][0]["text"]
    stop = text[4:6]
    choice = complete(tiny, max_tokens=12, ignore_eos=True, stop=stop)["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    kept = complete(
        tiny, max_tokens=12, ignore_eos=True, stop=[stop], include_stop_str_in_output=True
    )
    assert kept["choices"][0]["text"] == choice["text"] + stop


def test_stop_token_ids_and_bias(tiny):
    biased = complete(tiny, logit_bias={"40": 100}, max_tokens=3, return_token_ids=True)
    assert biased["choices"][0]["token_ids"] == [40, 40, 40]
    ended = complete(tiny, logit_bias={"40": 100}, stop_token_ids=[40], max_tokens=9)["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", 40)


def test_cached_tokens_are_counted_and_can_be_dropped(tiny):
    body = {"prompt": "the same beginning of a text " * 3, "max_tokens": 1}
    complete(tiny, **body)
    hit = complete(tiny, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert hit > 0
    assert tiny.post("/reset_prefix_cache").status_code == 200
    assert complete(tiny, **body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", 1e-300),
        ("repetition_penalty", 1e300),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 100000),
        ("max_tokens", 0),
        ("max_tokens", 10**9),
        ("max_tokens", 10**30),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"100000": 1}),
        ("logit_bias", {"5": 1000}),
        ("stop_token_ids", [100000]),
        ("stop", [""]),
        ("seed", 2**64),
        ("suffix", "x"),
        ("best_of", 3),
        ("priority", 1),
        ("cache_salt", "x"),
        ("request_id", "x"),
        ("add_special_tokens", True),
        ("stream_options", {"include_usage": True}),
        ("min_tokens", 17),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", [100000]),
        ("prompt", [2**40]),
        ("prompt", [-1]),
        ("prompt", ["a", 1]),
        ("prompt", None),
        ("guided_json", {}),
        ("no_such_field", 1),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tiny, param, value):
    error = refused(tiny, *[param], **{param: value}) if param != "prompt" else None
    if error is None:
        response = tiny.post("/v1/completions", {"prompt": value})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith("prompt")
    assert complete(tiny, max_tokens=1)["choices"]


def test_an_unknown_model_is_404_and_an_alias_is_known(tiny):
    refused(tiny, "model", status=404, model="gpt-4")
    assert complete(tiny, model="alias", max_tokens=1)["model"] == "alias"


def test_half_a_surrogate_pair_is_refused(tiny):
    response = tiny.post("/v1/completions", None, content=b"")
    assert response.status_code == 400
    raw = b'{"prompt": "\\ud800"}'
    headers = {"content-type": "application/json"}
    response = tiny.post("/v1/completions", None, content=raw, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
