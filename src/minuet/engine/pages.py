"""Who holds which page. Page ids are integers; what lies in a page is the KV layout's business.

Every page that is not reserved is in exactly one of three states::

    free ──allocate──> held ──release, unpublished──> free
                       held ──release, published────> cached
    cached ──share───> held
    cached ──evicted inside allocate──> free

``held``
    at least one request counts on it. More than one holder only through the prefix cache: the page
    is, or was when they came, published there.
``cached``
    nobody holds it, but the prefix cache can still hand it out. The least recently used one is
    evicted when the free ones do not suffice, so cached pages count as **usable**.
``free``
    its content means nothing.

All operations are O(pages named), none is O(pool) but :meth:`PagePool.integrity`.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from minuet.errors import ContractError, IntegrityError

DUMMY_PAGE = 0
"""The page that absorbs the writes of padded rows, when the pool reserves any."""


class PagePool:
    """Reference counts, the free list, and the order in which cached pages are given up.

    Args:
        num_pages: page ids are ``0 .. num_pages - 1``.
        page_size: tokens per page.
        num_reserved: pages ``0 .. num_reserved - 1`` are never handed out; :data:`DUMMY_PAGE` is
            the first of them.
        on_evict: called with a cached page that must go; it calls :meth:`unpublish`. The prefix
            cache sets this.

    Raises:
        ContractError: a size that leaves nothing to hand out.
    """

    def __init__(self, num_pages: int, page_size: int, *, num_reserved: int = 1):
        if page_size < 1 or not 0 <= num_reserved < num_pages:
            raise ContractError(
                "a page pool needs a page to hand out",
                got=f"num_pages {num_pages}, num_reserved {num_reserved}, page_size {page_size}",
                expected="page_size >= 1 and 0 <= num_reserved < num_pages",
            )
        self.num_pages, self.page_size, self.num_reserved = num_pages, page_size, num_reserved
        self.on_evict: Callable[[int], None] = self.unpublish
        self._num_holders = [0] * num_pages
        # first in, first out: the order depends on the calls alone, and a page rests before reuse
        self._free = deque(range(num_reserved, num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._published: set[int] = set()
        self._withdrawn: set[int] = set()  # unpublished while held: may keep several holders

    @property
    def capacity(self) -> int:
        """Pages that can ever be handed out."""
        return self.num_pages - self.num_reserved

    @property
    def usable(self) -> int:
        """Pages that :meth:`allocate` could hand out now: free, or cached and held by nobody."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages held by nobody that the prefix cache can still hand out."""
        return len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.page_size)

    def num_holders(self, page_id: int) -> int:
        """How many requests hold the page."""
        return self._num_holders[page_id]

    def is_published(self, page_id: int) -> bool:
        """Whether the prefix cache can hand the page out."""
        return page_id in self._published

    # --- held by requests ------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Hand out ``count`` pages with one holder each, evicting cached ones as needed.

        Returns:
            The pages, or None with nothing changed when fewer are usable.
        """
        if count > self.usable:
            return None
        while len(self._free) < count:
            oldest = next(iter(self._cached))
            self.on_evict(oldest)
            if oldest in self._cached:
                raise IntegrityError(f"page {oldest}: evicted, but still published")
        pages = [self._free.popleft() for _ in range(count)]
        for page_id in pages:
            self._num_holders[page_id] = 1
        return pages

    def share(self, page_ids: Iterable[int]) -> None:
        """Add a holder to each of these published pages.

        Raises:
            IntegrityError: a page that is not published.
        """
        for page_id in page_ids:
            if page_id not in self._published:
                raise IntegrityError(f"page {page_id}: shared, but not published")
            self._num_holders[page_id] += 1
            self._cached.pop(page_id, None)

    def release(self, page_ids: Sequence[int]) -> None:
        """Take one holder away from each page of one request, given in position order.

        They become unused last position first: a page is found only through the ones before it, so
        those must be evicted later.

        Raises:
            IntegrityError: a page nobody holds.
        """
        for page_id in reversed(page_ids):
            if self._num_holders[page_id] < 1:
                raise IntegrityError(f"page {page_id}: released, but nobody holds it")
            self._num_holders[page_id] -= 1
            if self._num_holders[page_id]:
                continue
            self._withdrawn.discard(page_id)
            if page_id in self._published:
                self._cached[page_id] = None
            else:
                self._free.append(page_id)

    # --- called by the prefix cache --------------------------------------------------------------

    def publish(self, page_id: int) -> None:
        """Keep this held page after its last holder has gone, until it is evicted.

        Raises:
            IntegrityError: a page without exactly one holder, or one that was published before.
        """
        count = self._num_holders[page_id]
        before = page_id in self._published or page_id in self._withdrawn
        if count != 1 or before:
            raise IntegrityError(
                f"page {page_id}: published with {count} holders, published before: {before}"
            )
        self._published.add(page_id)

    def unpublish(self, page_id: int) -> None:
        """Do not hand this page out any more; its present holders keep it.

        Raises:
            IntegrityError: a page that is not published.
        """
        if page_id not in self._published:
            raise IntegrityError(f"page {page_id}: unpublished, but not published")
        self._published.remove(page_id)
        if self._num_holders[page_id]:
            self._withdrawn.add(page_id)
        else:
            del self._cached[page_id]
            self._free.append(page_id)

    # --- book-keeping ----------------------------------------------------------------------------

    def integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Check every page: one state each, counts that agree, no owner twice.

        Args:
            holders: the pages of each request; None leaves the comparison with them out.

        Raises:
            IntegrityError: names the page and the contradiction.
        """
        free = Counter(self._free)
        for page_id, count in enumerate(self._num_holders):
            places = (free[page_id], int(page_id in self._cached), int(count > 0))
            expected = 0 if page_id < self.num_reserved else 1
            if sum(places) != expected or count < 0:
                raise IntegrityError(
                    f"page {page_id}: free {places[0]} times, cached {places[1]} times, "
                    f"{count} holders; expected one state, none if reserved"
                )
            published, withdrawn = page_id in self._published, page_id in self._withdrawn
            if (page_id in self._cached and not published) or (free[page_id] and published):
                raise IntegrityError(f"page {page_id}: state contradicts published={published}")
            if withdrawn and (published or not count):
                raise IntegrityError(f"page {page_id}: withdrawn, but published or not held")
            if count > 1 and not (published or withdrawn):
                raise IntegrityError(f"page {page_id}: private, but has {count} holders")
        if holders is not None:
            self._check_holders(holders)

    def _check_holders(self, holders: Iterable[Sequence[int]]) -> None:
        claims: Counter[int] = Counter()
        for page_ids in holders:
            for page_id, times in Counter(page_ids).items():
                if times > 1:
                    raise IntegrityError(f"page {page_id}: {times} times in one request")
            claims.update(page_ids)
        for page_id, count in enumerate(self._num_holders):
            if claims[page_id] != count:
                raise IntegrityError(
                    f"page {page_id}: {count} holders counted, {claims[page_id]} requests hold it"
                )
