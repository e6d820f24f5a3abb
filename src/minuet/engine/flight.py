"""Steps being put together, and steps under way: submitted to the device, not committed yet.

One, or two when the second was put together before the results of the first were known. What the
first will have done for a request is certain but for the token it draws: :func:`outlook`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minuet.engine.pages import PagePool
from minuet.engine.types import Request, Sampled, ScheduledRequest, Step
from minuet.errors import ContractError

Behind = Mapping[int, tuple[int, ScheduledRequest]]
"""The shares of the step under way with their index in it, by arrival."""


def outlook(request: Request, behind: Behind) -> ScheduledRequest | None:
    """All that is left to compute of a running request after the step under way, as one share.

    Args:
        request: without drafts, if anything is behind.
        behind: what is under way; empty when nothing is.

    Returns:
        None when it has ended, or will have, whatever token is drawn.
    """
    start = request.num_computed
    if behind:
        if request.finish_reason is not None:
            return None
        if (found := behind.get(request.arrival)) is not None:
            index, share = found
            start = share.start + share.num_tokens
            if share.samples:  # what it draws is all that is left
                ends = start + 1 >= request.max_total_tokens
                return None if ends else ScheduledRequest(request, start, 1, True, index)
    num_left = request.num_tokens - start + len(request.draft_token_ids)
    return ScheduledRequest(request, start, num_left, True)


@dataclass(slots=True)
class StepPlan:
    """A step being put together; its parts are found by arrival.

    Attributes:
        budget: tokens that still fit.
        spare: those of them that drafts may use, so that each running request keeps one token.
        ahead: a step is under way, so nobody can be preempted.
        decodes: shares of decoding requests.
        prefills: the others.
        preempted: requests whose pages were taken to make room.
    """

    budget: int
    spare: int
    ahead: bool
    decodes: dict[int, ScheduledRequest] = field(default_factory=dict)
    prefills: dict[int, ScheduledRequest] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)

    def add(self, share: ScheduledRequest, *, decodes: bool) -> None:
        """Take a share in."""
        self.budget -= share.num_tokens
        if decodes:
            self.spare -= share.num_tokens - 1
            self.decodes[share.request.arrival] = share
        else:
            self.prefills[share.request.arrival] = share

    def drop(self, victim: Request) -> None:
        """Leave a request out again that is preempted."""
        for part in (self.decodes, self.prefills):
            if victim.arrival in part:
                self.budget += part.pop(victim.arrival).num_tokens
        self.preempted.append(victim)

    def undo(self, pool: PagePool) -> None:
        """Give the pages back that were taken for a step that will not be."""
        for share in (self.decodes | self.prefills).values():
            num_pages = pool.pages_for(share.start)
            pool.release(share.request.page_ids[num_pages:])
            del share.request.page_ids[num_pages:]


class Flight:
    """The steps under way, oldest first."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._shares: list[dict[int, ScheduledRequest]] = []  # of each step, by arrival

    def __len__(self) -> int:
        """How many."""
        return len(self._steps)

    def begin(self, plan: StepPlan) -> Step:
        """Make the step that was put together; it is under way from now on."""
        shares = plan.decodes | plan.prefills
        step = Step(tuple(shares.values()), tuple(plan.preempted), len(plan.decodes))
        self._steps.append(step)
        self._shares.append(shares)
        return step

    def check(self, step: Step, sampled: Sequence[Sampled]) -> None:
        """Check that these are answers to the oldest step.

        Raises:
            ContractError: they are not, or it is another step.
        """
        if not self._steps or step is not self._steps[0]:
            raise ContractError(
                "only the oldest step under way can be committed", expected="schedule()"
            )
        check_answers(step, sampled)

    def end(self) -> None:
        """Forget the oldest step."""
        del self._steps[0], self._shares[0]

    def behind(self) -> Behind:
        """The shares of the newest step."""
        shares = self._steps[-1].scheduled
        return {share.request.arrival: (index, share) for index, share in enumerate(shares)}

    def holds(self, request: Request) -> bool:
        """Whether a step under way reads and writes its pages."""
        return any(request.arrival in shares for shares in self._shares)

    def reach(self, request: Request) -> int:
        """Tokens in its pages once every step under way is done."""
        ends = (s[request.arrival] for s in self._shares if request.arrival in s)
        return max((s.start + s.num_tokens for s in ends), default=request.num_computed)


def failure(share: ScheduledRequest, drawn: Sampled) -> str:
    """What went wrong with a share; empty if nothing did."""
    if share.samples and drawn.token_id is None and not drawn.error:
        return "no token could be drawn: the logits are not finite"
    return drawn.error


def check_answers(step: Step, sampled: Sequence[Sampled]) -> None:
    """Check that these can be the answers to a step.

    Raises:
        ContractError: their number, or what one of them says, does not fit.
    """
    if len(sampled) != len(step.scheduled):
        raise ContractError(
            "one answer per scheduled request", got=len(sampled), expected=str(len(step.scheduled))
        )
    for share, drawn in zip(step.scheduled, sampled, strict=True):
        if not share.samples and drawn.token_id is not None:
            raise ContractError(
                "a token was drawn before the end of a prompt", got=share.request.request_id
            )
        if drawn.num_accepted == 0:
            continue
        num_drafts = len(share.request.draft_token_ids) if share.samples else 0
        if not 0 <= drawn.num_accepted <= num_drafts:
            raise ContractError(
                "accepted drafts that were not scheduled",
                got=drawn.num_accepted,
                expected=f"0 to {num_drafts}",
            )
