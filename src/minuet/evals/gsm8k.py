"""GSM8K as lm-evaluation-harness asks and grades it: ``strict-match`` and ``flexible-extract``.

The definition is its ``lm_eval/tasks/gsm8k/gsm8k.yaml``, version 3.0: five examples, the filters
``regex`` and ``take_first``, the metric ``exact_match``. ``tests/evals/gsm8k_lm_eval.json`` records
what lm_eval 0.4.13 makes of prompts and outputs, and a test holds this module equal to it. The data
is in the public format, a JSON object per line with ``question`` and ``answer``.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from minuet.errors import ConfigError

FEWSHOT = 5
FEWSHOT_SEED = 1234  # of lm_eval's sampler unless `--seed` names another
MAX_TOKENS = 256
STOP = ("Question:", "</s>", "<|im_end|>")
NOTHING = "[invalid]"  # what an output without a match counts as

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
# removed from extraction and reference alike, in this order, before they are compared
_IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))


@dataclass(frozen=True, slots=True)
class Document:
    """One line of the data: the question and the worked answer, which ends in ``#### number``."""

    question: str
    answer: str

    @property
    def asked(self) -> str:
        """The question as it stands in a prompt."""
        return f"Question: {self.question}\nAnswer:"


def read(path: Path) -> list[Document]:
    """The documents of a JSONL file.

    Raises:
        ConfigError: unreadable, empty, or a line that is not in the public format.
    """
    try:
        # not splitlines(): a JSON string may hold other line separators
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"cannot read {path}", got=str(problem), expected="UTF-8 text") from None
    documents = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            question, answer = item["question"], item["answer"]
            if not (isinstance(question, str) and isinstance(answer, str)):
                raise TypeError("question and answer must be texts")
        except (ValueError, KeyError, TypeError) as problem:
            raise ConfigError(
                f"{path}:{number}",
                got=repr(problem),
                expected="a JSON object with the texts `question` and `answer`",
            ) from None
        documents.append(Document(question, answer))
    if not documents:
        raise ConfigError(f"{path} has no questions", remedy="name a file in GSM8K's format")
    return documents


def examples(
    documents: Sequence[Document], pool: Sequence[Document] | None, count: int = FEWSHOT
) -> list[list[Document]]:
    """The examples shown before each question, drawn as lm_eval draws them.

    One generator serves the whole run, so the examples of a question depend on its place in the
    data: a limit takes the first questions and leaves their prompts as they are.

    Args:
        documents: the questions, in the order of the file.
        pool: where examples come from (lm_eval: the training split); None takes them from
            ``documents``, without the question itself.
        count: examples per question.

    Raises:
        ConfigError: a pool that is too small.
    """
    source = list(documents if pool is None else pool)
    drawn = count + (pool is None)
    if count and len(source) < drawn:
        raise ConfigError(
            "too few documents to draw examples from",
            got=len(source),
            expected=f"at least {drawn}",
            remedy="name a larger file with --fewshot-data, or show fewer with --fewshot",
        )
    rng = Random(FEWSHOT_SEED)
    chosen = []
    for document in documents:
        shown = rng.sample(source, drawn) if count else []
        if pool is None and count:
            shown = [other for other in shown if other != document][:count]
            if len(shown) < count:  # the data holds the question twice and both were drawn
                shown = rng.sample([other for other in source if other != document], count)
        chosen.append(shown)
    return chosen


def prompt(document: Document, shown: Sequence[Document]) -> str:
    """The text to continue, as for ``lm_eval --model local-completions``."""
    worked = "".join(f"{example.asked} {example.answer}\n\n" for example in shown)
    return worked + document.asked


def messages(document: Document, shown: Sequence[Document]) -> list[dict[str, str]]:
    """The chat, as for ``--model local-chat-completions --apply_chat_template``: a turn each."""
    turns: list[dict[str, str]] = []
    for example in shown:
        turns.append({"role": "user", "content": example.asked})
        turns.append({"role": "assistant", "content": example.answer})
    return [*turns, {"role": "user", "content": document.asked}]


def strict_match(output: str) -> str:
    """The first number after ``#### ``, or :data:`NOTHING`."""
    found = _STRICT.search(output)
    return found[1].strip() if found else NOTHING


def flexible_extract(output: str) -> str:
    """The last thing that looks like a number, or :data:`NOTHING`."""
    last = None
    for last in _FLEXIBLE.finditer(output):  # noqa: B007 - only the last one counts
        pass
    return (last[0].strip() or NOTHING) if last else NOTHING


def grade(output: str, answer: str) -> dict[str, bool]:
    """Whether an output is right by each of the two extractions.

    Args:
        output: what the model wrote.
        answer: the worked answer of the data.
    """
    wanted = _comparable(answer)
    return {
        "strict-match": _comparable(strict_match(output)) == wanted,
        "flexible-extract": _comparable(flexible_extract(output)) == wanted,
    }


def _comparable(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()
