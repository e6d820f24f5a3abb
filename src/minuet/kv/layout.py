"""Where a cached value lies: lanes, strides, bytes and :meth:`KVLayout.address`. Integers only.

A **page** holds ``page_size`` tokens of every **lane** of one layer: K, V, their scales when the
cache is FP8, and the index key of a sparse layer. One page id addresses every lane, so a page that
is shared, moved or freed takes all its lanes along.

Two forms of the K and V lanes (``N`` pages, ``H`` KV heads, ``P`` page size, ``D`` head dim,
``x`` = 16 bytes / element):

===========  ========================  ========================
form         K                         V
===========  ========================  ========================
head-major   ``[N, H, P, D]``          ``[N, H, P, D]``
shuffle      ``[N, H, D/x, P, x]``     ``[N, H, P/x, D, x]``
===========  ========================  ========================

The scale planes are ``[N, H, P]`` FP32 and the index-key lane ``[N, P, Di]`` in both forms. The
shuffle form is what AMD matrix instructions want to load in 16-byte pieces: K addresses are
``((p*H+h)*(D/x) + d//x)*P*x + t*x + d%x``, V addresses
``((p*H+h)*(P/x) + t//x)*D*x + d*x + t%x``.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from minuet.dtypes import DType
from minuet.errors import ContractError

_CHUNK_BYTES = 16  # one vector load; fixes x of the shuffle form


class Form(Enum):
    """Arrangement of the K and V lanes inside a page."""

    HEAD_MAJOR = "head-major"
    SHUFFLE = "shuffle"


class LaneName(Enum):
    """The lanes a page can have. The value names the tensor in dumps and errors."""

    K = "k"
    V = "v"
    K_SCALE = "k_scale"
    V_SCALE = "v_scale"
    INDEX_K = "index_k"


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane of one layer.

    Attributes:
        name: which lane.
        dtype: storage type.
        shape: extent of one page, outermost first; the pool tensor is ``[num_pages, *shape]``.
    """

    name: LaneName
    dtype: DType
    shape: tuple[int, ...]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of :attr:`shape` in elements; a page is dense."""
        strides, step = [], 1
        for extent in reversed(self.shape):
            strides.append(step)
            step *= extent
        return tuple(reversed(strides))

    @property
    def page_elements(self) -> int:
        """Elements of one page: the stride between pages."""
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_elements * self.dtype.itemsize


@dataclass(frozen=True)
class KVLayout:
    """Layout of one layer's cache.

    Attributes:
        page_size: tokens per page.
        num_kv_heads: KV heads held by this rank.
        head_dim: channels of K and of V.
        kv_dtype: storage type of K and V; FP8 adds the two scale planes.
        index_dim: channels of the index key; 0 for a dense layer.
        index_dtype: storage type of the index key; stored without scale whatever the type.
        form: arrangement of K and V.

    Raises:
        ContractError: a non-positive extent, or a shuffle form whose chunks do not divide
            ``head_dim`` and ``page_size``.
    """

    page_size: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: DType
    index_dim: int = 0
    index_dtype: DType = DType.BF16
    form: Form = Form.HEAD_MAJOR

    def __post_init__(self) -> None:
        for name in ("page_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ContractError(f"KVLayout.{name}", got=getattr(self, name), expected=">= 1")
        if self.index_dim < 0:
            raise ContractError("KVLayout.index_dim", got=self.index_dim, expected=">= 0")
        if self.form is Form.SHUFFLE and (
            self.head_dim % self.chunk or self.page_size % self.chunk
        ):
            raise ContractError(
                "the shuffle form stores 16-byte chunks",
                got=f"head_dim {self.head_dim}, page_size {self.page_size}",
                expected=f"both multiples of {self.chunk} for {self.kv_dtype}",
            )

    @property
    def chunk(self) -> int:
        """Elements of K or V in 16 bytes: the ``x`` of the shuffle form."""
        return _CHUNK_BYTES // self.kv_dtype.itemsize

    @property
    def has_scales(self) -> bool:
        """Whether K and V carry one FP32 scale per (token, KV head)."""
        return self.kv_dtype.is_fp8

    @cached_property
    def lanes(self) -> dict[LaneName, Lane]:
        """Every lane of a page, in the order in which they are counted and dumped."""
        heads, page, dim, x = self.num_kv_heads, self.page_size, self.head_dim, self.chunk
        k_shape: tuple[int, ...] = (heads, page, dim)
        v_shape = k_shape
        if self.form is Form.SHUFFLE:
            k_shape = (heads, dim // x, page, x)
            v_shape = (heads, page // x, dim, x)
        lanes = [Lane(LaneName.K, self.kv_dtype, k_shape), Lane(LaneName.V, self.kv_dtype, v_shape)]
        if self.has_scales:
            lanes += [
                Lane(name, DType.FP32, (heads, page))
                for name in (LaneName.K_SCALE, LaneName.V_SCALE)
            ]
        if self.index_dim:
            lanes.append(Lane(LaneName.INDEX_K, self.index_dtype, (page, self.index_dim)))
        return {lane.name: lane for lane in lanes}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all lanes of this layer."""
        return sum(lane.page_bytes for lane in self.lanes.values())

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all lanes of this layer; exact, since every lane is per token."""
        return self.page_bytes // self.page_size

    def address(
        self, lane: LaneName, page: int, token: int, head: int = 0, channel: int = 0
    ) -> int:
        """Element offset of one value from the start of the lane's pool tensor.

        Args:
            lane: which lane; multiply by its ``dtype.itemsize`` for bytes.
            page: page id, any size: Python integers do not overflow, kernels use 64 bits.
            token: slot inside the page, ``0 .. page_size - 1``.
            head: KV head on this rank; 0 for the index key, which has one head.
            channel: ``0 .. head_dim - 1`` (``index_dim`` for the index key); 0 for a scale.

        Raises:
            ContractError: a coordinate outside the page, or a lane this layer does not have.
        """
        if lane not in self.lanes:
            raise ContractError(
                "no such lane", got=lane.value, expected=", ".join(n.value for n in self.lanes)
            )
        is_index, is_scale = lane is LaneName.INDEX_K, lane in (LaneName.K_SCALE, LaneName.V_SCALE)
        limits = {
            "page": (page, None),
            "token": (token, self.page_size),
            "head": (head, 1 if is_index else self.num_kv_heads),
            "channel": (channel, 1 if is_scale else self.index_dim if is_index else self.head_dim),
        }
        for name, (value, limit) in limits.items():
            if value < 0 or (limit is not None and value >= limit):
                raise ContractError(
                    f"address: {name} out of range", got=value, expected=f"0..{limit}"
                )
        x = self.chunk
        index: tuple[int, ...]
        if is_index:
            index = (token, channel)
        elif is_scale:
            index = (head, token)
        elif self.form is Form.HEAD_MAJOR:
            index = (head, token, channel)
        elif lane is LaneName.K:
            index = (head, channel // x, token, channel % x)
        else:
            index = (head, token // x, channel, token % x)
        spec = self.lanes[lane]
        return page * spec.page_elements + sum(
            i * s for i, s in zip(index, spec.strides, strict=True)
        )

    def query_heads(self, packed_width: int) -> int:
        """Query heads of a step's packed rows ``[q | k | v | index_q | index_k]``.

        Args:
            packed_width: ``(H + 2K) * D + (K + 1) * I``; no index part on a dense layer.

        Raises:
            ContractError: the width of no multiple of the KV heads.
        """
        heads, dim = self.num_kv_heads, self.head_dim
        found, rest = divmod(packed_width - 2 * heads * dim - (heads + 1) * self.index_dim, dim)
        if rest or found < heads or found % heads:
            raise ContractError(
                "packed q/k/v width",
                got=packed_width,
                expected=f"(H + 2K) * D + (K + 1) * I with K = {heads}, D = {dim}, "
                f"I = {self.index_dim}",
            )
        return found

    def slot(self, page: int, token: int) -> int:
        """Slot number of a token, the form in which a step names where to write."""
        return page * self.page_size + token
