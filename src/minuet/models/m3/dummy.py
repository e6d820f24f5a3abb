"""Random weights, for ``--load-format dummy`` and for generated checkpoints.

A value depends on the seed, the tensor's official name and the element's index in that tensor, and
on nothing else: integer hashing rounds the same on every device, so a rank, a layer or a slice can
be drawn alone, on CPU or GPU, and equals the same part of the whole.

The spreads keep a random model lively. Activations stay O(1), attention scores and block scores
differ enough that softmax and selection choose, the router's bias changes some choices, and logits
have a standard deviation near 2.
"""

import hashlib
import math

import torch
from torch import Tensor

from minuet.dtypes import DType, parse_compute_dtype
from minuet.models.m3.spec import M3Spec
from minuet.models.m3.weights import M3Weights, empty_weights, named_slices, stored_dtype
from minuet.platform.torch import to_torch

# Elements drawn at a time: the temporaries fit a CPU's second-level cache (2 x 256 KiB), which
# drew 270 M values/s on one core against 115 M for torch.randn; a GPU wants fewer, larger launches.
_CHUNK = {"cpu": 1 << 16}
_CHUNK_OTHER = 1 << 24

# Ending of the official name -> (mean, standard deviation). Matrices, not listed here, have
# standard deviation 1/sqrt(columns), which keeps the scale of what they are applied to.
_VECTORS = {
    "self_attn.q_norm.weight": (0.5, 0.2),  # gain 1.5: attention scores spread by about 2.3
    "self_attn.k_norm.weight": (0.5, 0.2),
    "self_attn.index_q_norm.weight": (0.0, 0.2),
    "self_attn.index_k_norm.weight": (0.0, 0.2),
    "norm.weight": (0.0, 0.1),  # after the four above: hidden norms
    "e_score_correction_bias": (0.0, 0.1),
    "embed_tokens.weight": (0.0, 1.0),
}
_GAINS = {"lm_head.weight": 2.0, "gate.weight": 1.5}


def dummy_weights(
    spec: M3Spec, dtype: DType, device: torch.device | str, seed: int = 0
) -> M3Weights:
    """Random weights, equal to loading a folder that ``make_checkpoint`` wrote with this seed.

    Args:
        spec: the model; ``spec.dtype`` is the type the checkpoint would have, and values are
            rounded to it first.
        dtype: compute dtype.
        device: where.
        seed: any integer.
    """
    weights = empty_weights(spec, dtype, device)
    checkpoint = parse_compute_dtype(spec.dtype)
    for name, view in named_slices(spec, weights).items():
        stored = stored_dtype(name, checkpoint)
        fill_dummy(view, name, seed, stored)
    return weights


def fill_dummy(out: Tensor, name: str, seed: int, stored: DType) -> None:
    """Draw one tensor.

    Args:
        out: written; contiguous, any floating dtype.
        name: official name without prefix; decides mean, spread and the random stream.
        seed: any integer.
        stored: values are rounded to this type before they are cast to ``out``'s.
    """
    mean, std = _distribution(name, out.shape)
    key_a, key_b = _keys(name, seed)
    flat = out.view(-1)
    chunk = _CHUNK.get(out.device.type, _CHUNK_OTHER)
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk]
        values = _uniform(start, part.numel(), key_a, key_b, out.device)
        # unit variance at first: a uniform variable on [-1, 1) has variance 1/3
        values.mul_(math.sqrt(3.0) * std).add_(mean)
        part.copy_(values.to(to_torch(stored)))


def _distribution(name: str, shape: torch.Size) -> tuple[float, float]:
    for ending, parameters in _VECTORS.items():
        if name.endswith(ending):
            return parameters
    gain = next((g for ending, g in _GAINS.items() if name.endswith(ending)), 1.0)
    return 0.0, gain / math.sqrt(shape[-1])


def _keys(name: str, seed: int) -> tuple[int, int]:
    """Two signed 32-bit keys."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return (
        int.from_bytes(digest[:4], "little", signed=True),
        int.from_bytes(digest[4:], "little", signed=True),
    )


def _uniform(start: int, count: int, key_a: int, key_b: int, device: torch.device) -> Tensor:
    """[count] FP32 in [-1, 1]: element ``start + i`` of the stream that the keys name.

    The mixing is the 32-bit finaliser "lowbias32" (Chris Wellons, hash-prospector, public domain)
    with a key added before each multiplication, in wrapping int32 arithmetic.
    """
    # The counter wraps at 2**32, where the stream would repeat: no tensor is that large.
    first = _wrapped(start + key_a)
    x = torch.arange(count, dtype=torch.int32, device=device).add_(first)
    shifted = torch.empty_like(x)

    def fold(bits: int) -> None:
        # a logical shift: torch's is arithmetic on signed integers
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))

    fold(16)
    x.mul_(0x21F0AAAD).add_(key_b)
    fold(15)
    x.mul_(0x735A2D97)
    fold(15)
    return x.to(torch.float32).mul_(2.0**-31)


def _wrapped(value: int) -> int:
    """The signed 32-bit integer congruent to ``value``."""
    return (value + 2**31) % 2**32 - 2**31
