"""What the table ``triton`` covers. Plain data; Triton is imported by ``launch.py`` only."""

from minuet.dtypes import DType
from minuet.errors import Refusal

NAME = "triton"

DTYPES = (DType.BF16, DType.FP16)
MAX_HIDDEN = 16384  # a program holds a row
MAX_EXPERTS = 256  # a program holds the scores of 64 tokens
MAX_TOP_K = 16


def covers(dtype: DType, hidden: int, experts: int, top_k: int) -> tuple[Refusal, ...]:
    """Every reason why these operations cannot run a model's layers.

    Args:
        dtype: compute dtype.
        hidden: width of the residual stream.
        experts: routed experts per layer; 0 without.
        top_k: experts a token visits.
    """
    kernel = f"{NAME}.ops"
    found = []
    if dtype not in DTYPES:
        names = " or ".join(str(d) for d in DTYPES)
        found.append(Refusal(kernel, "dtype", str(dtype), names))
    for field, got, most in (
        ("hidden_size", hidden, MAX_HIDDEN),
        ("num_local_experts", experts, MAX_EXPERTS),
        ("num_experts_per_tok", top_k, MAX_TOP_K),
    ):
        if got > most:
            found.append(Refusal(kernel, field, str(got), f"<= {most}"))
    return tuple(found)
