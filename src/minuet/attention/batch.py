"""The step as attention sees it: ragged query tokens over page tables."""

from dataclasses import dataclass

from torch import Tensor

# T query tokens, S sequences


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
