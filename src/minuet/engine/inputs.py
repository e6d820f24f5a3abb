"""The inputs of prepared steps: tensors with fixed addresses, filled through pinned memory.

A prepared step reads the first values of the same tensors at every run, so a captured graph stays
valid; filling them neither allocates nor stops the host. Padding: token 0 at position 0 that is
stored nowhere (slot -1) and belongs to no sequence, or to one of length 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minuet.engine.pages import DUMMY_PAGE
from minuet.engine.types import ScheduledRequest
from minuet.errors import ContractError
from minuet.platform.device import Event, Facility

# T query tokens (padded), S sequences (padded), P pages of the longest request

_STAGINGS = 2  # one is filled while the other may still be on its way to the device


@dataclass(frozen=True, slots=True)
class Views:
    """The tensors of one shape.

    Attributes:
        token_ids: [T] int64; of tokens that the host knows.
        positions: [T] int64.
        slots: [T] int64; -1: not stored.
        follows: [T] int64; where in the tokens drawn before the input token is; -1: the host knew.
        sample_rows: [max_rows] int64; query tokens whose logits are wanted, then zeros.
        page_table: [S, P] int32.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    follows: Tensor
    sample_rows: Tensor
    page_table: Tensor


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a step's planner needs on the host.

    Attributes:
        query_lens: query tokens of each sequence, padding left out.
        seq_lens: tokens in the cache of each, this step's included.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


class Inputs:
    """Static inputs of every prepared shape of one phase.

    Args:
        facility: the device.
        max_tokens: query tokens of the largest shape.
        max_seqs: sequences of the largest shape.
        max_rows: query tokens whose logits may be wanted at once.
        max_length: longest context in tokens.
        page_size: tokens per page.
    """

    def __init__(
        self,
        facility: Facility,
        *,
        max_tokens: int,
        max_seqs: int,
        max_rows: int,
        max_length: int,
        page_size: int,
    ):
        self._page_size, self._width = page_size, -(-max_length // page_size)
        self._max_seqs, self._max_rows = max_seqs, max_rows
        numbers = 4 * max_tokens + max_rows
        self._tokens = torch.zeros(numbers, dtype=torch.int64, device=facility.device)
        table = (max_seqs, self._width)
        self._table = torch.zeros(table, dtype=torch.int32, device=facility.device)
        self._stagings = [_Staging(facility, self._tokens, self._table) for _ in range(_STAGINGS)]
        self._turn = 0
        # what the device's table holds: rows are sent again only when they changed
        self._held: list[object] = [None] * max_seqs
        self._rows = np.full(table, DUMMY_PAGE, np.int32)

    def views(self, num_tokens: int, num_seqs: int) -> Views:
        """The tensors of a shape."""
        ids, positions, slots, follows = self._tokens[: 4 * num_tokens].view(4, num_tokens)
        rows = self._tokens[4 * num_tokens : 4 * num_tokens + self._max_rows]
        return Views(ids, positions, slots, follows, rows, self._table[:num_seqs])

    def fill(
        self,
        shares: Sequence[ScheduledRequest],
        drawn_at: Sequence[int],
        num_tokens: int,
        query_len: int = 0,
    ) -> Lengths:
        """Queue the copies that put a step's inputs in place.

        Args:
            shares: requests of the step; they are read before this returns.
            drawn_at: for each, where its input token stands among the tokens drawn by the step
                before; -1: the host knows it.
            num_tokens: T of the shape.
            query_len: query tokens of every sequence; a share with fewer asks again for the tokens
                before its own, which are not stored again. 0: as many as each share has.

        Raises:
            ContractError: a step that the shape does not hold.
        """
        if len(shares) > self._max_seqs:
            raise ContractError("sequences", got=len(shares), expected=f"<= {self._max_seqs}")
        self._turn = (self._turn + 1) % _STAGINGS
        staging = self._stagings[self._turn]
        staging.wait()
        numbers = staging.numbers(4 * num_tokens + self._max_rows)
        host, rows = numbers[: 4 * num_tokens].reshape(4, num_tokens), numbers[4 * num_tokens :]
        lengths = self._fill_tokens(host, shares, drawn_at, query_len)
        wanted = (
            np.arange(len(shares)) if query_len == 1 else _sample_rows(shares, lengths.query_lens)
        )
        rows[: len(wanted)], rows[len(wanted) :] = wanted, 0
        staging.send_numbers(len(numbers))
        self._fill_table(staging, shares)
        staging.sent()
        return lengths

    def blank(self, num_tokens: int) -> None:
        """Padding everywhere, on the device: the inputs of a rehearsal, once the device is idle."""
        count = 2 * num_tokens
        self._tokens[:count], self._tokens[count:] = 0, -1
        self._tokens[4 * num_tokens :] = 0

    def _fill_tokens(
        self,
        host: np.ndarray,
        shares: Sequence[ScheduledRequest],
        drawn_at: Sequence[int],
        query_len: int,
    ) -> Lengths:
        """``host`` is [4, T]: ids, positions, slots, follows."""
        host[:2], host[2:] = 0, -1
        if query_len == 1:
            return self._fill_single(host, shares, drawn_at)
        at, query_lens, seq_lens = 0, [], []
        for share, place in zip(shares, drawn_at, strict=True):
            stop, count = share.start + share.num_tokens, share.num_tokens
            width = query_len or count
            start, end = stop - width, at + width
            if start < 0 or count > width or end > host.shape[1]:
                raise ContractError(
                    "query tokens", got=(start, count, end), expected=f"<= {(width, host.shape[1])}"
                )
            if place >= 0:
                host[3, at] = place
            else:
                host[0, at:end] = share.request.tokens(start, stop)
            host[1, at:end] = np.arange(start, stop)
            host[2, end - count : end] = self._slots(share.request.page_ids, share.start, stop)
            at = end
            query_lens.append(width)
            seq_lens.append(stop)
        return Lengths(tuple(query_lens), tuple(seq_lens))

    def _fill_single(
        self, host: np.ndarray, shares: Sequence[ScheduledRequest], drawn_at: Sequence[int]
    ) -> Lengths:
        """One token per share: the common step, and one whose host time is felt."""
        count, page = len(shares), self._page_size
        starts = [share.start for share in shares]
        host[0, :count] = [
            0 if place >= 0 else share.request.tokens(share.start, share.start + 1)[0]
            for share, place in zip(shares, drawn_at, strict=True)
        ]
        host[1, :count] = starts
        host[2, :count] = [
            share.request.page_ids[start // page] * page + start % page
            for share, start in zip(shares, starts, strict=True)
        ]
        host[3, :count] = drawn_at
        return Lengths((1,) * count, tuple(start + 1 for start in starts))

    def _slots(self, pages: Sequence[int], start: int, stop: int) -> np.ndarray:
        page, positions = self._page_size, np.arange(start, stop)
        first, end = start // page, (stop - 1) // page + 1
        return np.array(pages[first:end])[positions // page - first] * page + positions % page

    def _fill_table(self, staging: "_Staging", shares: Sequence[ScheduledRequest]) -> None:
        changed = []
        for row, share in enumerate(shares):
            request, pages = share.request, share.request.page_ids
            # pages are appended, and a rollback of drafts takes back the last: these tell
            key = (request.arrival, request.num_preemptions, len(pages), *pages[-2:])
            if self._held[row] != key:
                self._held[row] = key
                self._rows[row, : len(pages)] = pages
                self._rows[row, len(pages) :] = DUMMY_PAGE
                changed.append(row)
        if changed:
            first, end = changed[0], changed[-1] + 1
            staging.send_rows(self._rows, first, end)


def _sample_rows(shares: Sequence[ScheduledRequest], query_lens: Sequence[int]) -> np.ndarray:
    """Per share that samples, the row of its last known token and one per draft."""
    ends = np.cumsum(query_lens)
    rows = [
        np.arange(end - 1 - len(share.request.draft_token_ids), end)
        for share, end in zip(shares, ends, strict=True)
        if share.samples
    ]
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)


class _Staging:
    """Pinned copies of the inputs, on their way to the device."""

    def __init__(self, facility: Facility, tokens: Tensor, table: Tensor):
        self._device_tokens, self._device_table = tokens, table
        self._tokens = facility.staging(tokens.numel(), torch.int64)
        self._table = facility.staging(table.numel(), torch.int32).view(table.shape)
        self._event: Event = facility.event()
        self._host_tokens, self._host_table = self._tokens.numpy(), self._table.numpy()

    def wait(self) -> None:
        """Until the device has what was sent last."""
        self._event.synchronize()

    def numbers(self, count: int) -> np.ndarray:
        """The first int64 values of the host's copy."""
        return self._host_tokens[:count]

    def send_numbers(self, count: int) -> None:
        """Queue the copy of that many."""
        self._device_tokens[:count].copy_(self._tokens[:count], non_blocking=True)

    def send_rows(self, rows: np.ndarray, first: int, end: int) -> None:
        """Queue the copy of rows of the page table."""
        self._host_table[first:end] = rows[first:end]
        self._device_table[first:end].copy_(self._table[first:end], non_blocking=True)

    def sent(self) -> None:
        """Everything is queued."""
        self._event.record()
