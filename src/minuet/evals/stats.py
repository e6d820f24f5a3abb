"""How sure a score is, and whether two runs over the same questions differ. Standard library only.

Sources: the score interval is E. B. Wilson, "Probable inference, the law of succession, and
statistical inference", JASA 22 (1927); the paired test is Q. McNemar, "Note on the sampling error
of the difference between correlated proportions", Psychometrika 12 (1947), in its exact form: under
the null hypothesis each question that the runs answer differently falls to either side with
probability one half.
"""

from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

from minuet.errors import ContractError


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The Wilson score interval of a proportion; (0, 1) without trials.

    Args:
        successes: at most ``trials``.
        trials: independent questions.
        confidence: of the two-sided interval, between 0 and 1.

    Raises:
        ContractError: counts that cannot be.
    """
    if not 0 <= successes <= trials:
        raise ContractError("successes", got=successes, expected=f"0 to {trials}")
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, square = successes / trials, z * z
    centre = (share + square / (2 * trials)) / (1 + square / trials)
    spread = share * (1 - share) / trials + square / (4 * trials * trials)
    half = z * sqrt(spread) / (1 + square / trials)
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def binomial_at_most(successes: int, trials: int) -> float:
    """P(X <= successes) for X binomial with probability one half; exact integers until the end."""
    tail: int = sum(comb(trials, k) for k in range(successes + 1))
    return tail / (1 << trials)


@dataclass(frozen=True, slots=True)
class Paired:
    """Two runs over the same questions, by what each got right.

    Attributes:
        both: right in both.
        only_first: right in the first only: what the second lost.
        only_second: right in the second only: what it gained.
        neither: wrong in both.
    """

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def questions(self) -> int:
        """How many there are."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def discordant(self) -> int:
        """Questions that tell the runs apart."""
        return self.only_first + self.only_second

    @property
    def difference(self) -> float:
        """Accuracy of the second less that of the first; 0 without questions."""
        return (self.only_second - self.only_first) / self.questions if self.questions else 0.0

    @property
    def p_value(self) -> float:
        """Exact McNemar, two-sided: how often chance alone splits the discordant this unevenly."""
        fewer = min(self.only_first, self.only_second)
        return min(1.0, 2 * binomial_at_most(fewer, self.discordant))

    @property
    def p_loss(self) -> float:
        """Exact McNemar, one-sided: how often chance alone makes the second lose this much."""
        return binomial_at_most(self.only_second, self.discordant)

    @property
    def smallest_p(self) -> float:
        """The two-sided p of the most uneven split: above 0.05, no outcome was significant."""
        return min(1.0, 2 / (1 << self.discordant))


def paired(first: list[bool], second: list[bool]) -> Paired:
    """Count the four cases.

    Args:
        first: right or wrong per question.
        second: the same questions in the same order.

    Raises:
        ContractError: lists of different lengths.
    """
    if len(first) != len(second):
        raise ContractError("answers of the second run", got=len(second), expected=f"{len(first)}")
    pairs = list(zip(first, second, strict=True))
    return Paired(
        both=pairs.count((True, True)),
        only_first=pairs.count((True, False)),
        only_second=pairs.count((False, True)),
        neither=pairs.count((False, False)),
    )
