"""Query tokens of a step cut into tiles, and into chunks whose scores fit scratch memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minuet.attention.plan import Int32Array

ROW_TILE_TOKENS = 8  # sparse query tokens of a tile at most: one bit each beside a block's id
NO_SEQUENCE = -1  # of a query token that only pads its step
FIELDS = 4  # of a record


@dataclass(frozen=True, slots=True)
class Chunk:
    """Query tokens whose scores and lists are in scratch together.

    Attributes:
        first: query token.
        end: query token after the last.
        score_tiles: first and end record of ``score_tiles``.
        row_tiles: first and end record of ``row_tiles``; empty in a decode step.
    """

    first: int
    end: int
    score_tiles: tuple[int, int]
    row_tiles: tuple[int, int] = (0, 0)


def query_tiles(
    lens: tuple[Sequence[int], Sequence[int]], num_tokens: int, tile_tokens: int, chunk_tokens: int
) -> tuple[Int32Array, list[int]]:
    """Cut a step's query tokens into tiles; no tile crosses a sequence or a chunk of tokens.

    Tokens beyond the sequences' pad the step: their tiles see nothing.

    Args:
        lens: query tokens and context length of each sequence.
        num_tokens: query tokens of the step with its padding.
        tile_tokens: of a tile at most.
        chunk_tokens: of a chunk.

    Returns:
        Records (sequence, first query token, query tokens, first position) [n, 4], and the number
        of them up to the end of each chunk.
    """
    parts: list[np.ndarray] = []
    ends: list[int] = []
    token = made = 0
    query_lens, seq_lens = lens
    real = sum(query_lens)
    spans = [
        (s, n, total - n) for s, (n, total) in enumerate(zip(query_lens, seq_lens, strict=True))
    ]
    if num_tokens > real:
        spans.append((NO_SEQUENCE, num_tokens - real, 0))
    for sequence, query_len, position in spans:
        left = query_len
        while left:
            count = min(left, chunk_tokens - token % chunk_tokens)
            first = np.arange(0, count, tile_tokens)
            tokens = np.minimum(tile_tokens, count - first)
            at = -tokens if sequence == NO_SEQUENCE else position + first
            whose = np.full_like(first, max(sequence, 0))
            parts.append(np.stack([whose, token + first, tokens, at], axis=1))
            token, position, left = token + count, position + count, left - count
            made += len(first)
            if token % chunk_tokens == 0:
                ends.append(made)
    if token % chunk_tokens:
        ends.append(made)
    records = np.concatenate(parts) if parts else np.zeros((0, FIELDS))
    return records.astype(np.int32), ends
