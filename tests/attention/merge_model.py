"""Attention by a plan, in numpy: what a device kernel does with the plan's tables, and no more.

Work records are carried out in any order into partial results that start as NaN; the merge then
reads the slots of each row. It is a model of the data flow, to be replaced by the kernels
themselves in the conformance suite, and shows that the tables are enough.
"""

import numpy as np

from minuet.attention.plan import DIRECT, DecodePlan


def single_pass(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, float]:
    """Softmax attention of one vector over ``k``, ``v`` ``[tokens, D]``: result and log-sum-exp."""
    scores = k @ q
    top = scores.max()
    weights = np.exp(scores - top)
    return weights @ v / weights.sum(), float(top + np.log(weights.sum()))


def attend(plan: DecodePlan, q: np.ndarray, k: np.ndarray, v: np.ndarray, order) -> np.ndarray:
    """Output ``[S, D]`` for one query vector per sequence; everything unwritten is NaN.

    Args:
        plan: refreshed with the lengths.
        q: ``[S, D]``.
        k: ``[S, L, D]``, NaN beyond each length.
        v: ``[S, L, D]``, NaN beyond each length.
        order: the order in which work records are carried out.
    """
    shape = plan.shape
    out = np.full(q.shape, np.nan)
    partial_out = np.full((shape.slots, q.shape[1]), np.nan)
    partial_lse = np.full(shape.slots, np.nan)
    for index in order:
        sequence, first, end, slot = plan.work[index].tolist()
        if first == end:
            continue
        stop = min(end * shape.tile_tokens, int(plan.lengths[sequence]))
        tokens = slice(first * shape.tile_tokens, stop)
        result, lse = single_pass(q[sequence], k[sequence, tokens], v[sequence, tokens])
        if slot == DIRECT:
            out[sequence] = result
        else:
            partial_out[slot], partial_lse[slot] = result, lse
    merge(plan, partial_out, partial_lse, out)
    return out


def merge(
    plan: DecodePlan, partial_out: np.ndarray, partial_lse: np.ndarray, out: np.ndarray
) -> None:
    """Write rows of several parts from their own slots, and zeros into empty rows."""
    for sequence in range(len(out)):
        first, parts = plan.rows[sequence].tolist()
        if parts == 0:
            out[sequence] = 0.0
        if parts > 1:
            mine = slice(first, first + parts)
            weights = np.exp(partial_lse[mine] - partial_lse[mine].max())
            out[sequence] = weights @ partial_out[mine] / weights.sum()
