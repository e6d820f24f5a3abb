"""Which pages already hold the beginning of a prompt.

A page can be found by what it holds: its own tokens and every token before them. The key of page
``i`` is ``digest(key of page i - 1, tokens of page i)``; the key before page 0 is the digest of the
**salt**, which names everything else that changes the content of a page's lanes.

A wrong hit is silent garbage, so a key is only a hint. Every published page keeps its tokens and
its parent, and a hit is one whose tokens are equal and whose parent is the page hit just before. By
induction the whole prefix is equal, whatever the digest does; a key that leads elsewhere is a miss
and is counted as a **collision**.

For this the published pages form a forest: *the parent of a published page is published*. A page
that is unpublished takes its descendants along. Nobody could find those anyway.

What is published: complete pages, whose tokens were computed and are final (no drafts). One page id
addresses all lanes, so a hit brings K, V, their scales and the index keys together.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from minuet.engine.pages import PagePool
from minuet.engine.types import Request
from minuet.errors import IntegrityError


def lane_salt(*, model_fingerprint: str, lane_dtypes: Mapping[str, str], page_size: int) -> bytes:
    """The salt of a cache: two caches with equal salts hold equal lanes for equal tokens.

    Args:
        model_fingerprint: weights and configuration.
        lane_dtypes: storage type by lane name, for all lanes.
        page_size: tokens per page.
    """
    facts = [model_fingerprint, sorted(lane_dtypes.items()), page_size]
    return json.dumps(facts).encode()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(slots=True)
class PrefixStats:
    """Counters since the cache was made.

    Attributes:
        queries: tokens of requests at their first admission.
        hits: tokens of those that were found.
        evictions: published pages given up to make room, with their descendants.
        collisions: keys that led to a page with other tokens, or behind another prefix.
        published: pages published.
        withdrawn: pages unpublished because a request that read or wrote them failed.
    """

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    collisions: int = 0
    published: int = 0
    withdrawn: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A published page. Identity is equality: an entry that was removed never comes back."""

    key: bytes
    parent: "_Entry | None"
    tokens: tuple[int, ...]
    page_id: int
    publisher: int  # arrival of the request
    children: dict[bytes, "_Entry"] = field(default_factory=dict)


@dataclass(slots=True)
class _Chain:
    """Where one request stands.

    Attributes:
        keys: of its complete pages, as far as they were needed; tokens never change, so neither
            do keys, and they outlive a preemption.
        num_done: pages that need no publishing any more.
        tail: the published page that stands for page ``num_done - 1``, its own or an equal one.
        open: whether it still publishes. It stops for good when the page it would build on is no
            longer the one it was: what it would publish could be found behind another prefix.
    """

    keys: list[bytes] = field(default_factory=list)
    num_done: int = 0
    tail: _Entry | None = None
    open: bool = False


class PrefixCache:
    """Finds, publishes and forgets pages by the tokens up to their end.

    Args:
        pool: whose pages; its evictions are reported here from now on.
        salt: see :func:`lane_salt`.
        digest: a hash of bytes; tests put a bad one here.
    """

    def __init__(
        self, pool: PagePool, salt: bytes, *, digest: Callable[[bytes], bytes] = _sha256
    ) -> None:
        self.stats = PrefixStats()
        self._pool, self._digest = pool, digest
        self._root = digest(salt)
        self._entries: dict[bytes, _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        self._chains: dict[int, _Chain] = {}  # by arrival
        pool.on_evict = self._evict

    def __len__(self) -> int:
        """Published pages."""
        return len(self._entries)

    def tokens_of(self, page_id: int) -> tuple[int, ...]:
        """All tokens a published page stands for: its own, and those of the pages before it.

        Raises:
            KeyError: the page is not published.
        """
        entry: _Entry | None = self._by_page[page_id]
        parts: list[tuple[int, ...]] = []
        while entry is not None:
            parts.append(entry.tokens)
            entry = entry.parent
        return tuple(token for part in reversed(parts) for token in part)

    # --- finding ---------------------------------------------------------------------------------

    def match(self, request: Request) -> list[int]:
        """Pages that hold the beginning of this request; nothing changes but the collision count.

        The last known token is never covered: at least one must be computed to draw the next. A
        request that wants log-probabilities of its prompt finds nothing, as those come from
        computing it.
        """
        if request.params.prompt_logprobs is not None:
            return []
        chain = self._chains.setdefault(request.arrival, _Chain())
        pages: list[int] = []
        parent: _Entry | None = None
        for index in range(self._max_hit_pages(request)):
            tokens = self._page_tokens(request, index)
            entry = self._entries.get(self._key(chain, index, tokens))
            if entry is None:
                break
            if not self._stands_for(entry, parent, tokens):
                self.stats.collisions += 1
                break
            pages.append(entry.page_id)
            parent = entry
        return pages

    def share(self, request: Request, page_ids: list[int]) -> None:
        """Make an admitted request a holder of the pages :meth:`match` found, perhaps none.

        It may publish from here on, the page after these first.
        """
        self._pool.share(page_ids)
        chain = self._chains.setdefault(request.arrival, _Chain())
        chain.num_done, chain.open = len(page_ids), True
        chain.tail = self._by_page[page_ids[-1]] if page_ids else None
        if request.num_preemptions == 0:  # a second look would count the same tokens twice
            self.stats.queries += request.num_tokens
            self.stats.hits += len(page_ids) * self._pool.page_size

    # --- publishing ------------------------------------------------------------------------------

    def publish(self, request: Request) -> None:
        """Publish the complete pages of a running request that are computed by now.

        Call it after ``num_computed`` was advanced and rejected drafts were rolled back. The first
        publisher of a content wins; equal pages of others stay private.
        """
        chain = self._chains[request.arrival]
        num_complete = self._num_complete(request)
        while chain.open and chain.num_done < num_complete:
            chain.open = self._publish_next(request, chain)

    def num_published(self, request: Request) -> int:
        """Leading pages of a running request that are settled: others may read them."""
        return self._chains[request.arrival].num_done

    def withdraw(self, request: Request) -> None:
        """Unpublish what a failed request published since it began, and what it read.

        Non-finite logits come from its own pages or from one it found here, and no one can say
        which. Keeping the second kind would fail every later request with this prefix. Descendants
        were computed from these pages and go too. Present holders keep theirs, and publish nothing
        more that builds on them.
        """
        chain = self._chains.setdefault(request.arrival, _Chain())
        chain.open = False
        held = request.page_ids
        for index, key in enumerate(chain.keys):
            entry = self._entries.get(key)
            if entry is None:
                continue
            reads = index < len(held) and entry.page_id == held[index]
            if reads or entry.publisher == request.arrival:
                self.stats.withdrawn += self._remove(entry)

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that ended; its published pages stay."""
        self._chains.pop(request.arrival, None)

    def reset(self) -> None:
        """Unpublish everything, and let nothing computed so far be published later."""
        for entry in list(self._entries.values()):
            if entry.parent is None:
                self._remove(entry)
        for chain in self._chains.values():
            chain.open = False

    # --- below -----------------------------------------------------------------------------------

    def _max_hit_pages(self, request: Request) -> int:
        return (request.num_tokens - 1) // self._pool.page_size

    def _num_complete(self, request: Request) -> int:
        return min(request.num_computed, request.num_tokens) // self._pool.page_size

    def _page_tokens(self, request: Request, index: int) -> tuple[int, ...]:
        size = self._pool.page_size
        return tuple(request.tokens(index * size, (index + 1) * size))

    def _key(self, chain: _Chain, index: int, tokens: tuple[int, ...]) -> bytes:
        if index == len(chain.keys):  # pages are always asked for in order
            parent = chain.keys[-1] if chain.keys else self._root
            chain.keys.append(self._digest(parent + array("q", tokens).tobytes()))
        return chain.keys[index]

    def _stands_for(self, entry: _Entry, parent: _Entry | None, tokens: tuple[int, ...]) -> bool:
        return entry.parent is parent and entry.tokens == tokens

    def _publish_next(self, request: Request, chain: _Chain) -> bool:
        """Publish one page, or find it published; False when this request must stop."""
        parent, index = chain.tail, chain.num_done
        if parent is not None and self._entries.get(parent.key) is not parent:
            return False  # evicted or withdrawn
        tokens = self._page_tokens(request, index)
        key = self._key(chain, index, tokens)
        entry = self._entries.get(key)
        if entry is None:
            page_id = request.page_ids[index]
            entry = _Entry(key, parent, tokens, page_id, request.arrival)
            self._pool.publish(page_id)
            self._entries[key] = self._by_page[page_id] = entry
            if parent is not None:
                parent.children[key] = entry
            self.stats.published += 1
        elif not self._stands_for(entry, parent, tokens):
            self.stats.collisions += 1
            return False
        chain.tail, chain.num_done = entry, index + 1
        return True

    def _evict(self, page_id: int) -> None:
        self.stats.evictions += self._remove(self._by_page[page_id])

    def _remove(self, entry: _Entry) -> int:
        """Unpublish a page and its descendants; how many."""
        if entry.parent is not None:
            del entry.parent.children[entry.key]
        pending, count = [entry], 0
        while pending:
            gone = pending.pop()
            pending += gone.children.values()
            del self._entries[gone.key], self._by_page[gone.page_id]
            self._pool.unpublish(gone.page_id)
            count += 1
        return count

    def integrity(self, requests: Iterable[Request]) -> None:
        """Check that index, forest, pool and requests agree.

        Args:
            requests: every live request, waiting ones included.

        Raises:
            IntegrityError: names the page or the request.
        """
        live = {request.arrival: request for request in requests}
        for arrival in self._chains.keys() - live.keys():
            raise IntegrityError(f"arrival {arrival}: ended, but its prefix keys are kept")
        if len(self._by_page) != len(self._entries):
            raise IntegrityError(f"{len(self._entries)} keys for {len(self._by_page)} pages")
        for key, entry in self._entries.items():
            page = f"page {entry.page_id}"
            if entry.key != key or self._by_page.get(entry.page_id) is not entry:
                raise IntegrityError(f"{page}: published under another key or page")
            if not self._pool.is_published(entry.page_id):
                raise IntegrityError(f"{page}: in the prefix cache, but not published in the pool")
            if len(entry.tokens) != self._pool.page_size:
                raise IntegrityError(f"{page}: published with {len(entry.tokens)} tokens")
            parent = entry.parent
            if parent is not None and self._entries.get(parent.key) is not parent:
                raise IntegrityError(f"{page}: published, but its parent {parent.page_id} is not")
            if parent is not None and parent.children.get(key) is not entry:
                raise IntegrityError(f"{page}: unknown to its parent {parent.page_id}")
        for page_id in range(self._pool.num_pages):
            if self._pool.is_published(page_id) and page_id not in self._by_page:
                raise IntegrityError(f"page {page_id}: published in the pool, but cannot be found")
        for held in live.values():
            chain = self._chains.get(held.arrival)
            if held.page_ids and (chain is None or chain.num_done > self._num_complete(held)):
                raise IntegrityError(f"request {held.request_id}: keys missing or too many settled")
