"""Log-probabilities in the two shapes of the API, with token texts that are never ambiguous."""

from collections.abc import Sequence
from typing import Any

from minuet.engine.types import TokenLogprobs
from minuet.models.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token's text; its bytes if it is part of a character; its id if it stands for no text."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode() if raw else f"token_id:{token_id}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    tokenizer: Tokenizer | None,
    reports: Sequence[TokenLogprobs | None],
    token_ids: Sequence[int],
    offset: int,
    top: int,
) -> dict[str, Any]:
    """The shape of ``/v1/completions``.

    Args:
        tokenizer: for texts.
        reports: one per token; None where there is none, as for the first of a prompt.
        token_ids: the tokens.
        offset: characters before the first of them.
        top: alternatives asked for.
    """
    texts = [token_text(tokenizer, i) for i in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [r.logprob if r else None for r in reports],
        "top_logprobs": [_top(tokenizer, r, top) if r else None for r in reports],
        "text_offset": offsets,
    }


def _top(tokenizer: Tokenizer | None, report: TokenLogprobs, top: int) -> dict[str, float]:
    found = {token_text(tokenizer, i): value for i, value in report.top[:top]}
    # the token itself is always among them, as lm-evaluation-harness and others rely on
    found.setdefault(token_text(tokenizer, report.token_id), report.logprob)
    return found


def chat_logprobs(
    tokenizer: Tokenizer | None, reports: Sequence[TokenLogprobs], top: int
) -> list[dict[str, Any]]:
    """The shape of ``/v1/chat/completions``: the ``content`` list."""
    return [
        {
            **_entry(tokenizer, report.token_id, report.logprob),
            "top_logprobs": [_entry(tokenizer, i, value) for i, value in report.top[:top]],
        }
        for report in reports
    ]


def _entry(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id) if tokenizer else b""
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": logprob,
        "bytes": list(raw) if raw else None,
    }


def prompt_logprobs(
    tokenizer: Tokenizer | None, reports: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """VLLM's extension: per prompt token, alternatives by id."""
    return [
        None
        if report is None
        else {
            str(i): {"logprob": value, "rank": rank, "decoded_token": token_text(tokenizer, i)}
            for i, value, rank in _ranked(report)
        }
        for report in reports
    ]


def _ranked(report: TokenLogprobs) -> list[tuple[int, float, int]]:
    listed = [(i, value, rank) for rank, (i, value) in enumerate(report.top, 1)]
    if all(i != report.token_id for i, _, _ in listed):
        listed.append((report.token_id, report.logprob, report.rank))
    return listed
