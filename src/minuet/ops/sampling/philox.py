"""Philox-4x32-10: random words as a function of a key and a counter.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
doi 10.1145/2063384.2063405. Integers only, so every device gives the same words; a test compares
with the known answers of the authors' library, Random123.
"""

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words per counter.

    Args:
        counter: four int64 tensors of words below 2 ** 32 that broadcast together.
        key: two of the same.

    Returns:
        four int64 tensors of words.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(constant: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a product, by halves: it does not fit a signed 64-bit integer."""
    low = (words & 0xFFFF) * constant
    middle = (words >> 16) * constant + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def words_of_tokens(rows: Tensor, vocab: int) -> Tensor:
    """The random word of every token of every row.

    Tokens ``4 i .. 4 i + 3`` take the four words of counter ``(i, position, stream, domain)``.

    Args:
        rows: [R, 5] int64: two key words, then counter words 1 to 3.
        vocab: tokens.

    Returns:
        [R, vocab] int64 below 2 ** 32.
    """
    quad = torch.arange(-(-vocab // 4), device=rows.device)
    k0, k1, position, stream, domain = (rows[:, i : i + 1] & _WORD for i in range(5))
    words = philox((quad[None], position, stream, domain), (k0, k1))
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab]
