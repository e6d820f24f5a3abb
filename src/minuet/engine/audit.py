"""Do queue, requests, steps under way, pages and prefix cache agree? Asked at any moment."""

from collections.abc import Mapping

from minuet.engine.flight import Flight
from minuet.engine.pages import PagePool
from minuet.engine.prefix import PrefixCache
from minuet.engine.types import Request
from minuet.errors import IntegrityError


def check(
    *,
    live: Mapping[str, Request],
    running: Mapping[int, Request],
    waiting: Mapping[int, Request],
    flight: Flight,
    pool: PagePool,
    prefix: PrefixCache | None,
) -> None:
    """Check the parts of a scheduler against each other.

    Args:
        live: requests that have not ended, by id.
        running: requests with a place in the batch, by arrival, in its order.
        waiting: requests of the queue, likewise.
        flight: steps under way.
        pool: the pages.
        prefix: the prefix cache, if there is one.

    Raises:
        IntegrityError: names what contradicts what.
    """
    if (order := [*running, *waiting]) != sorted(set(order)):
        raise IntegrityError(
            f"arrivals out of order: running {list(running)}, waiting {list(waiting)}"
        )
    for request in waiting.values():
        if request.page_ids or request.num_computed or request.draft_token_ids:
            raise IntegrityError(f"request {request.request_id}: waits, but holds pages")
    everyone = [*running.values(), *waiting.values()]
    for request in everyone:
        known = live.get(request.request_id) is request
        # one that ended keeps its pages while a step under way uses them
        if known is (request.finish_reason is not None):
            raise IntegrityError(f"request {request.request_id}: kept after its end, or lost")
        if not known and not flight.holds(request):
            raise IntegrityError(f"request {request.request_id}: ended, but not released")
    if len(live) != sum(r.finish_reason is None for r in everyone):
        raise IntegrityError("a live request is neither running nor waiting")
    for request in running.values():
        _check_pages(request, flight, pool)
    pool.integrity(request.page_ids for request in everyone)
    if prefix is not None:
        prefix.integrity(everyone)


def _check_pages(request: Request, flight: Flight, pool: PagePool) -> None:
    num_tokens = flight.reach(request)
    if len(request.page_ids) != pool.pages_for(num_tokens):
        raise IntegrityError(
            f"request {request.request_id}: {len(request.page_ids)} pages for "
            f"{num_tokens} tokens of {pool.page_size} each"
        )
    if not flight.holds(request) and request.num_computed >= request.num_tokens:
        raise IntegrityError(f"request {request.request_id}: nothing left to compute")
