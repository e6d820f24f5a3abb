"""What sampling takes of a device: tiles, parts, and the bytes of its scratch. No torch.

Tiles are what was fastest on one H200, 2026-11, benchmarks/results/h200/
2026-11-29-sampling-sweeps.json; the report's has not been varied.
"""

from minuet.dtypes import DType
from minuet.errors import ContractError

# R rows, V vocabulary

MAX_VOCAB = 1 << 19
"""Weights of so many tokens can be summed up and multiplied by top-p in 64 bits."""

SCAN_TILE = 2048
"""Logits a program looks at together when it looks for the largest."""
DRAW_TILE = 2048
"""The same when it draws: the generator needs registers."""
MAX_PARTS = 128
"""Parts a row is divided into at most; one more launch puts them together."""
PROGRAMS = 512
"""Programs that fill a device; fewer rows are divided into more parts."""
REPORT_TILE = 4096
"""Logits a program looks at together for log-probabilities."""
GROUP_COLUMNS = 128
"""Groups of tokens whose maxima one program finds."""
MAX_GROUPS = 4096
"""Groups of a row at most; their maxima choose which tokens are candidates."""
GROUP_SIZE = 64
"""Tokens of a group, unless the vocabulary has more than the groups can hold."""
CANDIDATES = 2048
"""Candidates of a filtered row; a kept set that does not fit is found by search."""
VALUE_ROUNDS = 24
"""Rounds in which the search halves values; then it halves their order, 32 bits of it."""
SEARCH_ROUNDS = 2 * (VALUE_ROUNDS + 32 + 3 + 20) + 2
"""Rounds at most: for top-k and for top-p values, orders, three of their own, the bits of an id."""
STATE = 7 + 2 * SEARCH_ROUNDS
"""int64 per filtered row: what is known of it, and the sums of each round of the search."""
SEARCH_PROGRAMS = 128
"""Programs that search together, all of which must be resident: any chip has as many units."""
ENTRIES = 1 << 16
"""Tokens with a penalty or bias that are sent at a time, of 16 bytes each."""
PIECE = 4 * ENTRIES
"""int32 sent at a time."""
ANSWER_BYTES = 128
"""Token, flags and parameters of a row, rounded up."""


def parts_of(rows: int, vocab: int, tile: int) -> tuple[int, int]:
    """How a row is divided: (parts, tiles per part).

    Args:
        rows: rows of the call.
        vocab: columns.
        tile: logits per tile.
    """
    tiles = -(-vocab // tile)
    parts = max(1, min(tiles, MAX_PARTS, -(-PROGRAMS // max(rows, 1))))
    each = -(-tiles // parts)
    return -(-tiles // each), each


def searchers_of(rows: int, vocab: int, tile: int, programs: int) -> tuple[int, int]:
    """How a row is divided among those who search it: (programs, tiles of each).

    Args:
        rows: rows of the call.
        vocab: columns.
        tile: logits per tile.
        programs: as many as are resident together; where rows are more, each has one.
    """
    tiles = -(-vocab // tile)
    each = -(-tiles // max(1, min(tiles, programs // rows)))
    return -(-tiles // each), each


def groups_of(vocab: int) -> int:
    """Groups of a row: token ``t`` is in group ``t mod groups``."""
    groups = -(-vocab // GROUP_SIZE)
    return min(MAX_GROUPS, -(-groups // GROUP_COLUMNS) * GROUP_COLUMNS)


def scratch_bytes(rows: int, vocab: int, logprobs: int) -> int:
    """Device memory that sampling takes at most, besides the logits it is given; an upper bound.

    A copy of the logits for bias, penalties and masks; candidates and group maxima of filtered
    rows; the best of each part; candidates of log-probabilities and the report.

    Args:
        rows: rows of the largest step.
        vocab: columns.
        logprobs: alternatives a request may ask for.

    Raises:
        ContractError: a vocabulary whose weights could overflow.
    """
    if vocab > MAX_VOCAB:
        raise ContractError("vocabulary to draw from", got=vocab, expected=f"<= {MAX_VOCAB}")
    shaped = vocab * DType.FP32.itemsize
    filtered = CANDIDATES * DType.INT64.itemsize + groups_of(vocab) * DType.FP32.itemsize
    parts = 2 * MAX_PARTS * DType.INT64.itemsize
    tiles = -(-vocab // REPORT_TILE)
    depth = min(logprobs, REPORT_TILE)
    report = (tiles * (depth + 2) + logprobs + 2) * DType.INT64.itemsize
    mask = -(-vocab // 32) * DType.INT32.itemsize
    sent = PIECE * DType.INT32.itemsize
    return sent + rows * (shaped + filtered + parts + report + mask + STATE * 8 + ANSWER_BYTES)
