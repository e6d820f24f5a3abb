"""What a request can need: ever, so that it is refused in time, and soon, so that it can wait."""

from minuet.engine.pages import PagePool
from minuet.engine.types import Request
from minuet.errors import RequestError


def check_length(request: Request, max_model_len: int, pool: PagePool) -> None:
    """Check that prompt and output together fit the model and an otherwise empty pool.

    Args:
        request: any request with a prompt.
        max_model_len: prompt and output tokens of one request.
        pool: where it will live.

    Raises:
        RequestError: names the limit that is lower, and the largest value that passes.
    """
    # the last token drawn ends the request before its keys and values are ever written
    pool_limit = pool.capacity * pool.page_size + 1
    limit, what, remedy = max_model_len, "the model length", "--max-model-len"
    if pool_limit < limit:
        limit, what, remedy = pool_limit, "the KV cache", "--kv-cache-pages or --kv-cache-memory"
    remedy = f"start the server with a larger {remedy}"
    num_prompt = len(request.prompt_token_ids)
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


def pages_soon(request: Request, pool: PagePool) -> int:
    """Pages a live request will take for its known tokens and one page more.

    No more than it can ever need, and less those it holds.
    """
    soon = pool.pages_for(request.num_tokens) + 1
    at_most = pool.pages_for(request.max_total_tokens - 1)
    return max(min(soon, at_most) - len(request.page_ids), 0)
