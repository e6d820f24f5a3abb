"""Two runs over the same questions, question by question: what one run alone cannot show.

The standard error of one score of 0.93 over GSM8K's 1,319 questions is 0.7 points; most of it is
which questions are hard, and falls away when the same questions are compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minuet.errors import ConfigError
from minuet.evals.records import Answer, Run
from minuet.evals.stats import Paired, paired

SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, paired.

    Attributes:
        first: the run that is the measure.
        second: the run that is judged.
        metric: what counts as right.
        counts: of the four cases.
        discordant: questions that one got right and the other did not: (first's, second's answer).
        differing: questions that were answered in other words, right or wrong.
        unpaired: questions that only one of the runs answered.
    """

    first: Run
    second: Run
    metric: str
    counts: Paired
    discordant: tuple[tuple[Answer, Answer], ...]
    differing: int
    unpaired: int

    @property
    def is_significant_loss(self) -> bool:
        """Whether the second is worse than chance would make an equal one (one-sided, 0.05)."""
        return self.counts.p_loss < SIGNIFICANT

    @property
    def settings(self) -> dict[str, tuple[Any, Any]]:
        """What the runs were made with that differs, by dotted name."""
        one, two = _flat(self.first.settings), _flat(self.second.settings)
        names = sorted(one.keys() | two.keys())
        return {n: (one.get(n), two.get(n)) for n in names if one.get(n) != two.get(n)}

    def as_json(self) -> dict[str, Any]:
        """Everything, the discordant questions included."""
        counts = self.counts
        return {
            "first": self.first.key,
            "second": self.second.key,
            "task": self.first.task,
            "metric": self.metric,
            "questions": counts.questions,
            "both_right": counts.both,
            "only_first_right": counts.only_first,
            "only_second_right": counts.only_second,
            "both_wrong": counts.neither,
            "difference": round(counts.difference, 6),
            "p_two_sided": counts.p_value,
            "p_loss": counts.p_loss,
            "smallest_p_possible": counts.smallest_p,
            "significant_loss": self.is_significant_loss,
            "differing_answers": self.differing,
            "unpaired": self.unpaired,
            "settings": {name: list(pair) for name, pair in self.settings.items()},
            "discordant": [
                {"id": a.id, "expected": a.expected, "first": a.output, "second": b.output}
                for a, b in self.discordant
            ],
        }


Side = tuple[Run, Mapping[str, Answer]]
"""A run and its answers by question; questions without an answer are not in it."""


def compare(first: Side, second: Side, metric: str = "") -> Comparison:
    """Pair the answers of two runs by question.

    Args:
        first: the run that is the measure.
        second: the run that is judged.
        metric: what counts as right; empty: the first run's.

    Raises:
        ConfigError: no question that both answered, or a metric that neither has.
    """
    (one, answers), (two, judged) = first, second
    metric = metric or one.metric
    common = [key for key in answers if key in judged]
    if not common:
        raise ConfigError(
            "the runs have no question in common",
            got=f"{one.task} and {two.task}",
            expected="two runs of one task with the same options",
        )
    pairs = [(answers[key], judged[key]) for key in common]
    known = sorted(pairs[0][0].scores)
    if any(metric not in answer.scores for pair in pairs for answer in pair):
        raise ConfigError("no such metric in both runs", got=metric, expected=", ".join(known))
    counts = paired([a.scores[metric] for a, _ in pairs], [b.scores[metric] for _, b in pairs])
    return Comparison(
        first=one,
        second=two,
        metric=metric,
        counts=counts,
        discordant=tuple((a, b) for a, b in pairs if a.scores[metric] != b.scores[metric]),
        differing=sum(a.output != b.output for a, b in pairs),
        unpaired=len(answers) + len(judged) - 2 * len(common),
    )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return found
