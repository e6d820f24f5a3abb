"""The parameters of a row as one line of int32; floats stand there by their bits. No torch.

One array goes to the device for all rows of a step, so that a step costs one copy.
"""

MODE = 0
"""How the row's token is found: one of the four below."""
INVERSE_TEMPERATURE = 1  # FP32
KEY_LOW, KEY_HIGH = 2, 3  # the generator's key
POSITION, STREAM, DOMAIN = 4, 5, 6  # words 1, 2 and 3 of its counter; word 0 comes from the token
TOP_K = 7  # 0: all
TOP_P = 8  # in units of 2 ** -20, see ``top_p_units``; TOP_P_OFF: no limit
MIN_P = 9  # FP32
REPETITION, PRESENCE, FREQUENCY = 10, 11, 12  # FP32
WIDTH = 16

KEEP = 0
"""The most likely token of the raw logits: nothing to do."""
LARGEST = 1
"""The most likely token of the shaped logits."""
DRAW = 2
"""A draw from the tempered distribution."""
FILTERED = 3
"""A draw from what the filters leave of it."""

TOP_P_BITS = 20
TOP_P_OFF = 1 << TOP_P_BITS
WEIGHT_BITS = 40
"""Weights ``exp((x - max) / temperature)`` are counted in units of 2 ** -40, so sums are exact."""
DOMAIN_REQUEST, DOMAIN_ENGINE = 0, 1
"""Seeds that a request brought, and the engine's with the request's number."""


def top_p_units(top_p: float) -> int:
    """Top-p in whole units, the largest number of them below it; 1.0 is no limit."""
    if top_p >= 1.0:
        return TOP_P_OFF
    scaled = top_p * (1 << TOP_P_BITS)
    return max(0, -int(-scaled // 1) - 1)
