"""The chat template renders through transformers, in M3's turn layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minuet.models.tokenizer import Tokenizer

NS = "]<]minimax[>["
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "How warm is it?"}


@pytest.fixture(scope="module")
def render(checkpoint: Callable[..., Path]) -> Callable[..., str]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint("tiny"))

    def call(messages: list[dict[str, Any]], **options: Any) -> str:
        options = {"add_generation_prompt": True, **options}
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    call.tokenizer = tokenizer  # type: ignore[attr-defined]
    return call


def after_system(text: str) -> str:
    """What follows the system turn, whose prose is nobody's contract."""
    head, turn, rest = text.partition("]~b]developer\n")
    assert head.startswith("]~!b[]~b]system\n")
    assert head.count("<thinking_instructions>") == head.count("</thinking_instructions>") == 1
    assert head.endswith("</thinking_instructions>[e~[\n")
    return turn + rest


def test_plain_conversation(render: Callable[..., str]) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Mild.", "reasoning_content": "It is May."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}],
        },
        {"role": "assistant", "content": "Cold."},
    ]
    assert after_system(render(messages, add_generation_prompt=False)) == (
        "]~b]developer\nBe brief.[e~[\n"
        "]~b]user\nHow warm is it?[e~[\n"
        "]~b]ai\n<mm:think>It is May.</mm:think>Mild.[e~[\n"
        "]~b]user\nAnd now?[e~[\n"
        "]~b]ai\n</mm:think>Cold.[e~[\n"
    )


def test_caller_without_instructions_gets_the_default(render: Callable[..., str]) -> None:
    assert after_system(render([USER])).startswith(
        "]~b]developer\nYou are a helpful assistant.[e~[\n]~b]user\n"
    )


def test_system_and_developer_share_a_turn(render: Callable[..., str]) -> None:
    messages = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, USER]
    assert after_system(render(messages)).startswith("]~b]developer\nA\n\nB[e~[\n]~b]user\n")


@pytest.mark.parametrize(
    ("mode", "end"),
    [
        ("enabled", "]~b]ai\n<mm:think>"),
        ("disabled", "]~b]ai\n</mm:think>"),
        ("adaptive", "]~b]ai\n"),
        (None, "]~b]ai\n"),
    ],
)
def test_thinking_mode_prefills(render: Callable[..., str], mode: str | None, end: str) -> None:
    assert render([USER], thinking_mode=mode).endswith("[e~[\n" + end)


def test_unknown_thinking_mode_is_refused(render: Callable[..., str]) -> None:
    with pytest.raises(Exception, match="thinking_mode"):
        render([USER], thinking_mode="often")


def test_tools_are_listed_one_per_line(render: Callable[..., str]) -> None:
    text = after_system(render([USER], tools=[TOOL, TOOL]))
    developer = text.partition("[e~[")[0]
    listed = developer.partition("<tools>\n")[2].partition("</tools>")[0].splitlines()
    assert len(listed) == 2
    assert listed[0].startswith('<tool>{"name": "get_weather"')
    assert listed[0].endswith("}</tool>")


def test_calls_and_results_in_history(render: Callable[..., str]) -> None:
    arguments = {
        "city": "Lisbon & <Sintra>",
        "days": 3,
        "hourly": False,
        "nothing": None,
        "at": {"lat": 38.7, "tags": ["a", ["b", 1]]},
    }
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "18"},
        {"role": "tool", "content": "19"},
    ]
    one = (
        f'{NS}<invoke name="get_weather">'
        f"{NS}<city>Lisbon & <Sintra>{NS}</city>"
        f"{NS}<days>3{NS}</days>"
        f"{NS}<hourly>false{NS}</hourly>"
        f"{NS}<at>{NS}<lat>38.7{NS}</lat>"
        f"{NS}<tags>{NS}<item>a{NS}</item>"
        f"{NS}<item>{NS}<item>b{NS}</item>{NS}<item>1{NS}</item>{NS}</item>{NS}</tags>{NS}</at>"
        f"{NS}</invoke>\n"
    )
    assert after_system(render(messages, tools=[TOOL])).partition("]~b]ai\n")[2] == (
        f"</mm:think>{NS}<tool_call>\n{one}{one}{NS}</tool_call>[e~[\n"
        "]~b]tool\n<response>18</response>\n<response>19</response>[e~[\n"
        "]~b]ai\n"
    )


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image_url"),
        ({"role": "narrator", "content": "x"}, "narrator"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            "arguments",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused(
    render: Callable[..., str], message: dict[str, Any], named: str
) -> None:
    with pytest.raises(Exception, match=named):
        render([message])


def test_transformers_encodes_a_rendered_prompt_as_we_do(
    render: Callable[..., str], checkpoint: Callable[..., Path]
) -> None:
    text = render([USER], tools=[TOOL], thinking_mode="enabled")
    ours = Tokenizer.load(checkpoint("tiny"))
    theirs = render.tokenizer  # type: ignore[attr-defined]
    ids = ours.encode(text)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert theirs.decode(ids) == ours.decode(ids, skip_special=False) == text
    assert theirs.eos_token_id == ours.token_id("[e~[")
