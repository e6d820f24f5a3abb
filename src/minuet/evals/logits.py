"""Two servers' distributions over the same tokens: what right and wrong answers are too coarse for.

A text (a question and its right answer) is scored through ``/v1/completions`` with
``prompt_logprobs``, which names alternatives by token id; the other spelling, ``echo`` with
``logprobs``, names them by text, and different tokens can have one text. The server gives the most
likely tokens only, so the divergence is computed over these and one class of all others, which can
hide differences but never invent one: what is reported is a lower bound of the full KL divergence
(the log sum inequality; Cover and Thomas, "Elements of Information Theory", theorem 2.7.1). Which
token is the most likely is exact.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Any

from tqdm import tqdm

from minuet.errors import ConfigError
from minuet.evals.api import COMPLETIONS, Server, ServerError
from minuet.evals.questions import Question, Task
from minuet.evals.records import Records, Run, Scored, key_of

METRIC = "logits"
TOP = 20  # alternatives per token: what servers allow unless told otherwise
_LEAST = 1e-9  # of the class of all other tokens: log-probabilities come rounded
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far the second run's distributions are from the first's, over some positions.

    Attributes:
        positions: token positions compared.
        kl_mean: nats; a lower bound, see the module.
        kl_max: nats; of the worst position.
        same_top: share of positions with the same most likely token.
        logprob_shift: mean absolute difference of the log-probability of the token that stands
            there.
        perplexity: of the texts, by the first and by the second.
    """

    positions: int
    kl_mean: float
    kl_max: float
    same_top: float
    logprob_shift: float
    perplexity: tuple[float, float]

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return {
            "positions": self.positions,
            "kl_mean_at_least": self.kl_mean,
            "kl_max_at_least": self.kl_max,
            "same_top_token": self.same_top,
            "mean_abs_logprob_difference": self.logprob_shift,
            "perplexity": list(self.perplexity),
        }


def as_run(run: Run, top: int) -> Run:
    """The run that keeps log-probabilities where ``run`` would keep answers."""
    settings = {k: v for k, v in run.settings.items() if k != "sampling"} | {"top": top}
    return Run(key_of([METRIC, settings]), f"{METRIC}/{run.task}", METRIC, settings, run.started)


def score_all(
    task: Task, server: Server, run: Run, records: Records, *, top: int, progress: bool = False
) -> list[Scored]:
    """Score what is not scored yet, one text after the other.

    Args:
        task: its questions with their right answers are the texts.
        server: whom; it must have ``/tokenize``, as Minuet and vLLM do.
        run: their settings.
        records: where log-probabilities are kept.
        top: alternatives per position.
        progress: show a bar on stderr.
    """
    records.start(run)
    known = dict(records.texts(run.key))
    for question in tqdm(task.questions, desc=run.task, disable=not progress, unit="text"):
        if question.key in known:
            continue
        try:
            scored = _score(question, server, run, top)
        except ServerError as problem:
            scored = Scored(run.key, question.key, question.id, [], 0, [], [], str(problem))
        records.add(scored)
        known[question.key] = scored
    return [known[question.key] for question in task.questions]


def _score(question: Question, server: Server, run: Run, top: int) -> Scored:
    body = {k: v for k, v in question.body.items() if k in ("messages", "tools", "prompt")}
    asked = server.post("/tokenize", body)["tokens"]
    wanted = server.post("/tokenize", {"prompt": question.expected})["tokens"]
    ids = [*asked, *wanted]
    answer = server.post(
        COMPLETIONS,
        {
            "model": run.settings["model"],
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top,
        },
    )
    reports = answer["choices"][0]["prompt_logprobs"][1:]
    best = [sorted(_pairs(report), key=lambda pair: -pair[1]) for report in reports]
    drawn = [round(r[str(i)]["logprob"], _DIGITS) for r, i in zip(reports, ids[1:], strict=True)]
    return Scored(run.key, question.key, question.id, ids, len(asked), drawn, best)


def _pairs(report: Mapping[str, Mapping[str, Any]]) -> list[tuple[int, float]]:
    return [(int(i), round(entry["logprob"], _DIGITS)) for i, entry in report.items()]


def divergence(
    first: Iterable[Scored], second: Iterable[Scored], *, answers_only: bool = False
) -> Divergence:
    """Compare two runs over the texts that both scored.

    Args:
        first: the measure.
        second: what is judged.
        answers_only: look at the tokens of the right answers alone.

    Raises:
        ConfigError: no text in common, or texts of different tokens.
    """
    others = {text.question: text for text in second}
    rows = []
    for one in first:
        two = others.get(one.question)
        if two is None:
            continue
        if one.token_ids != two.token_ids:
            raise ConfigError(
                f"{one.id} is not the same tokens in both runs",
                remedy="compare runs of models with one tokenizer and one chat template",
            )
        start = max(0, one.answer_at - 1) if answers_only else 0
        rows += list(zip(one.logprobs, one.top, two.logprobs, two.top, strict=True))[start:]
    if not rows:
        raise ConfigError("the runs have no text in common", expected="two runs of one task")
    count = len(rows)
    apart = [kl_at_least(dict(top), dict(other)) for _, top, _, other in rows]
    return Divergence(
        positions=count,
        kl_mean=sum(apart) / count,
        kl_max=max(apart),
        same_top=sum(top[0][0] == other[0][0] for _, top, _, other in rows) / count,
        logprob_shift=sum(abs(p - q) for p, _, q, _ in rows) / count,
        perplexity=(
            exp(-sum(row[0] for row in rows) / count),
            exp(-sum(r[2] for r in rows) / count),
        ),
    )


def kl_at_least(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """A lower bound of KL(first || second), from the log-probabilities that both name.

    Args:
        first: token id -> natural log-probability; any part of the vocabulary.
        second: likewise.
    """
    common = first.keys() & second.keys()
    total = sum(exp(first[i]) * (first[i] - second[i]) for i in common)
    rest = max(0.0, 1.0 - sum(exp(first[i]) for i in common))
    other = max(_LEAST, 1.0 - sum(exp(second[i]) for i in common))
    if rest > _LEAST:
        total += rest * log(rest / other)
    return max(0.0, total)
