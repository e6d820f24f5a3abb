"""The pool: a layer's lanes as tensors, allocated once from a layout."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minuet.errors import ContractError
from minuet.kv.layout import KVLayout, LaneName
from minuet.platform.torch import to_torch


@dataclass(frozen=True)
class LayerCache:
    """One layer's lanes.

    Attributes:
        layout: how they are arranged.
        lanes: ``[num_pages, *lane.shape]`` each, contiguous.
    """

    layout: KVLayout
    lanes: dict[LaneName, Tensor]

    @property
    def k(self) -> Tensor:
        """The K lane."""
        return self.lanes[LaneName.K]

    @property
    def v(self) -> Tensor:
        """The V lane."""
        return self.lanes[LaneName.V]

    @property
    def index_k(self) -> Tensor:
        """The index-key lane ``[num_pages, page_size, index_dim]``; sparse layers only."""
        return self.lanes[LaneName.INDEX_K]

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.k.shape[0]


class KVCache:
    """All layers of one rank. A page id names the same page in every layer.

    Args:
        layouts: one per layer.
        num_pages: pages, the dummy page included.
        device: where.
        fill: value of unwritten memory: zero in service, NaN in tests, as nothing may read it.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        num_pages: int,
        device: torch.device | str = "cpu",
        fill: float = 0.0,
    ):
        if num_pages < 1:
            raise ContractError("KVCache.num_pages", got=num_pages, expected=">= 1")
        self.layers = tuple(
            LayerCache(layout, _allocate(layout, num_pages, device)) for layout in layouts
        )
        self.num_pages = num_pages
        if fill != 0.0:
            for layer in self.layers:
                for lane in layer.lanes.values():
                    lane.copy_(torch.full((), fill).to(lane.dtype).expand(lane.shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of every lane of every layer; equals the plan's arithmetic."""
        return sum(
            lane.numel() * lane.element_size()
            for layer in self.layers
            for lane in layer.lanes.values()
        )


def _allocate(
    layout: KVLayout, num_pages: int, device: torch.device | str
) -> dict[LaneName, Tensor]:
    return {
        name: torch.zeros((num_pages, *lane.shape), dtype=to_torch(lane.dtype), device=device)
        for name, lane in layout.lanes.items()
    }
