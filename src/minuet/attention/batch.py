"""The step as attention sees it: ragged query tokens over page tables, and its largest sizes."""

from dataclasses import dataclass

from torch import Tensor

# T query tokens, S sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSizes:
    """Sizes of a prepared step: all that its planner is made from.

    Attributes:
        page_size: tokens per page.
        num_kv_heads: KV heads of this rank.
        group: query heads per KV head.
        max_seqs: sequences of the padded batch.
        max_tokens: query tokens of the padded batch.
        max_length: longest context in tokens.
        query_len: query tokens of every sequence of a decode step; 0 for ragged (prefill) steps.
        compute_units: of the device.
        score_bytes: budget of the block-score buffer.
        kv_fp8: K and V are FP8.
        batch_invariant: divide work by a request's own length only.
    """

    page_size: int
    num_kv_heads: int
    group: int
    max_seqs: int
    max_tokens: int
    max_length: int
    query_len: int
    compute_units: int
    score_bytes: int
    kv_fp8: bool
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Query tokens of a step, sequence by sequence, and where their contexts lie.

    Attributes:
        query_lens: [S] host integers; query tokens of each sequence, > 0.
        seq_lens: [S] host integers; tokens in the cache including this step's.
        positions: [T] int64; absolute position of each query token.
        slots: [T] int64; where each query token is stored, -1 to skip.
        page_table: [S, max_pages] int32; page of each block, padded with -1.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    positions: Tensor
    slots: Tensor
    page_table: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.seq_lens)
