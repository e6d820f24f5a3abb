"""A cache as a long service leaves it: every slot holds a finite random value.

A step is measured at a context that nobody computed: its pages are filled with random keys, values
and index keys instead. Kernels read as many bytes and select as many blocks as they would; what the
blocks mean, and therefore which are selected, is random.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from minuet.kv.cache import KVCache
from minuet.kv.layout import LaneName
from minuet.platform.torch import from_torch

_SPREAD = 4.0  # normal values are cut here
_PATTERN_PAGES = 64  # different ones; they repeat over the pool, at other places
_SCALES = (LaneName.K_SCALE, LaneName.V_SCALE)


def fill(cache: KVCache, seed: int = 0) -> None:
    """Fill every page of every lane with normal values; drawn on the host, so nothing is allocated.

    Args:
        cache: written.
        seed: of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    patterns: dict[tuple[LaneName, torch.dtype, tuple[int, ...]], Tensor] = {}
    for layer in cache.layers:
        for name, lane in layer.lanes.items():
            key = (name, lane.dtype, tuple(lane.shape[1:]))
            if key not in patterns:
                patterns[key] = _pattern(name, lane, layer.lanes, generator)
            pattern = patterns[key]
            for first in range(0, lane.shape[0], len(pattern)):
                part = lane[first : first + len(pattern)]
                part.copy_(pattern[: len(part)])


def _pattern(
    name: LaneName, lane: Tensor, lanes: Mapping[LaneName, Tensor], generator: torch.Generator
) -> Tensor:
    """Some pages of a lane, on the host."""
    shape = (min(_PATTERN_PAGES, lane.shape[0]), *lane.shape[1:])
    if name in _SCALES:
        owner = LaneName.K if name is LaneName.K_SCALE else LaneName.V
        return torch.full(shape, _SPREAD / from_torch(lanes[owner].dtype).max_value)
    values = torch.randn(shape, generator=generator).clamp_(-_SPREAD, _SPREAD)
    dtype = from_torch(lane.dtype)
    if dtype.is_fp8 and name is not LaneName.INDEX_K:  # index keys have no scale
        values *= dtype.max_value / _SPREAD
    return values.to(lane.dtype)
