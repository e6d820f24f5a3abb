"""What a request can need: ever, so that it is refused in time, and soon, so that it can wait."""

from minuet.engine.pages import PagePool
from minuet.engine.prefix import PrefixCache
from minuet.engine.types import Request
from minuet.errors import RequestError


def check_length(request: Request, max_model_len: int, pool: PagePool) -> None:
    """Check that there is a prompt, and fits with the output the model and an otherwise empty pool.

    Args:
        request: any request.
        max_model_len: prompt and output tokens of one request.
        pool: where it will live.

    Raises:
        RequestError: no prompt; or the limit that is lower, and the largest value that passes.
    """
    # the last token drawn ends the request before its keys and values are ever written
    pool_limit = pool.capacity * pool.page_size + 1
    limit, what, remedy = max_model_len, "the model length", "--max-model-len"
    if pool_limit < limit:
        limit, what, remedy = pool_limit, "the KV cache", "--kv-cache-pages or --kv-cache-memory"
    remedy = f"start the server with a larger {remedy}"
    num_prompt = len(request.prompt_token_ids)
    if not num_prompt:
        raise RequestError(
            "the prompt is empty", param="prompt", got=0, expected="at least 1 token"
        )
    if num_prompt >= limit:
        raise RequestError(
            f"the prompt does not fit {what}",
            param="prompt",
            got=num_prompt,
            expected=f"at most {limit - 1} tokens",
            remedy=f"shorten the prompt, or {remedy}",
        )
    if request.max_total_tokens > limit:
        raise RequestError(
            f"prompt and output do not fit {what}",
            param="max_tokens",
            got=request.params.max_tokens,
            expected=f"at most {limit - num_prompt} after {num_prompt} prompt tokens",
            remedy=f"lower max_tokens, or {remedy}",
        )


def pages_soon(request: Request, pool: PagePool, *, unknown: bool = False) -> int:
    """Pages a live request will take for its known tokens and one page more.

    No more than it can ever need, and less those it holds.

    Args:
        request: whose.
        pool: its pages.
        unknown: a step under way draws one token more.
    """
    soon = pool.pages_for(request.num_tokens + unknown) + 1
    at_most = pool.pages_for(request.max_total_tokens - 1)
    return max(min(soon, at_most) - len(request.page_ids), 0)


class Admission:
    """Decides whether the head of the queue may begin.

    Args:
        pool: the pages.
        prefix: the prefix cache, if there is one.
    """

    def __init__(self, pool: PagePool, prefix: PrefixCache | None) -> None:
        self._pool, self._prefix = pool, prefix
        self._blocked: tuple[int, int, int] | None = None

    def hits(self, request: Request, available: int) -> list[int] | None:
        """The pages it finds in the prefix cache, or None when it must wait.

        Args:
            request: the head of the queue.
            available: usable pages that the running requests will not need soon.
        """
        if self._prefix is None:
            return [] if pages_soon(request, self._pool) <= available else None
        # a long prompt is not looked up at every step, only with more room or more to be found
        published = self._prefix.stats.published
        if self._blocked is not None:
            arrival, then, cost = self._blocked
            if (arrival, then) == (request.arrival, published) and available < cost:
                return None
        hits = self._prefix.match(request)
        # a cached page that is found costs a usable one, just as a new one does
        held = sum(self._pool.num_holders(page) > 0 for page in hits)
        cost = pages_soon(request, self._pool) - held
        self._blocked = (request.arrival, published, cost) if cost > available else None
        return None if self._blocked else hits
