"""What an attention call is: :class:`Problem`, and the checks nobody may catch.

Three operations make a layer's attention, all over pages:

* ``write``: normalise and rotate this step's q, k and index vectors, quantise, store every lane.
* ``select`` (sparse layers): index queries x index keys -> page list ``[rows, top_blocks]``.
* ``attend``: queries x the pages of a list (sparse) or of the whole page table (dense) -> output.

A **row** is one query token x one KV head. A sparse block is a page, so sparse decode is paged
decode over a shorter page list, and dense, sparse, verification with several query tokens and
prefill by rows are one family. docs/contract.md states the operations in full.
"""

from dataclasses import dataclass
from enum import Enum

from minuet.dtypes import DType
from minuet.errors import ContractError
from minuet.kv.layout import Form


class LayerKind(Enum):
    """How a layer attends: to everything, or to its selected blocks."""

    DENSE = "dense"
    SPARSE = "sparse"


class Phase(Enum):
    """What kind of step runs: many tokens of few requests, or few tokens of many."""

    PREFILL = "prefill"
    DECODE = "decode"


class Op(Enum):
    """The three operations of a layer's attention."""

    WRITE = "write"
    SELECT = "select"
    ATTEND = "attend"


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention demand, complete enough to choose a kernel for: no sizes that change per step.

    Heads are those of one rank. Batch size and context length are run-time values and absent on
    purpose: a kernel whose choice depended on them would be chosen after start-up.

    Attributes:
        op: the operation.
        layer_kind: dense or sparse.
        phase: prefill or decode.
        num_q_heads: query heads on this rank.
        num_kv_heads: KV heads on this rank; divides ``num_q_heads``.
        head_dim: channels of q, k and v.
        page_size: tokens per page; equals the sparse block where there is one.
        q_dtype: type of queries and outputs.
        kv_dtype: storage type of K and V. FP8 means one FP32 scale per (token, KV head).
        query_len: query tokens per request of a decode step (verification: > 1); 1 in prefill,
            where every token is a row of its own.
        form: arrangement of the pages.
        index_dim: channels of the index key; 0 where the layer has none.
        index_heads: index query heads on this rank; equals ``num_kv_heads`` on a sparse layer.
        index_dtype: storage type of the index key.
        top_blocks: blocks a sparse row attends to, forced ones included.
        window: sliding window in tokens, 0 for none.
        sinks: whether attention sink logits enter the softmax.
    """

    op: Op
    layer_kind: LayerKind
    phase: Phase
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: DType
    kv_dtype: DType
    query_len: int = 1
    form: Form = Form.HEAD_MAJOR
    index_dim: int = 0
    index_heads: int = 0
    index_dtype: DType = DType.BF16
    top_blocks: int = 0
    window: int = 0
    sinks: bool = False

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "page_size", "query_len"):
            if getattr(self, name) < 1:
                raise ContractError(f"Problem.{name}", got=getattr(self, name), expected=">= 1")
        if self.num_q_heads % self.num_kv_heads:
            raise ContractError(
                "Problem.num_q_heads",
                got=self.num_q_heads,
                expected=f"a multiple of num_kv_heads {self.num_kv_heads}",
            )
        if self.layer_kind is LayerKind.SPARSE:
            if self.index_heads != self.num_kv_heads:
                raise ContractError(
                    "Problem.index_heads of a sparse layer",
                    got=self.index_heads,
                    expected=f"num_kv_heads {self.num_kv_heads}: a selection per KV head",
                )
            if self.index_dim < 1 or self.top_blocks < 1:
                raise ContractError(
                    "a sparse Problem needs index_dim and top_blocks",
                    got=(self.index_dim, self.top_blocks),
                    expected=">= 1 each",
                )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads


def recover_num_seqs(rows: int, query_len: int) -> int:
    """Sequences in a rectangle of query rows, however either axis was padded.

    Args:
        rows: query tokens in the call.
        query_len: query tokens per sequence.

    Raises:
        ContractError: a non-positive ``query_len``, or rows that do not fill the rectangle.
    """
    if query_len < 1:
        raise ContractError("query_len", got=query_len, expected=">= 1")
    if rows < 0 or rows % query_len:
        raise ContractError(
            "query rows do not fill a rectangle",
            got=rows,
            expected=f"a multiple of query_len {query_len}",
        )
    return rows // query_len
