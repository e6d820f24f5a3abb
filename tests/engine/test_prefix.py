import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minuet.engine.pages import PagePool
from minuet.engine.prefix import PrefixCache, lane_salt
from minuet.engine.types import Request, SamplingParams
from minuet.errors import IntegrityError
from tests.engine.scheduler_sim import two_bit_digest

PAGE = 4
SALT = {"model_fingerprint": "m", "lane_dtypes": {"k": "bfloat16", "v": "bfloat16"}, "page_size": 4}


class Shelf:
    """Requests over a pool and a cache, advanced by hand."""

    def __init__(self, num_pages=12, page_size=PAGE, **options):
        self.pool = PagePool(num_pages, page_size)
        self.cache = PrefixCache(self.pool, lane_salt(**SALT), **options)
        self.arrivals = 0
        self.open: list[Request] = []

    def request(self, tokens, **params) -> Request:
        self.arrivals += 1
        return Request(
            f"r{self.arrivals}", tuple(tokens), SamplingParams(**params), arrival=self.arrivals
        )

    def admit(self, tokens, **params) -> Request:
        request = self.request(tokens, **params)
        hits = self.cache.match(request)
        self.cache.share(request, hits)
        request.page_ids, request.num_computed = hits, len(hits) * self.pool.page_size
        self.open.append(request)
        return request

    def compute(self, request, num_computed) -> bool:
        pages = self.pool.allocate(self.pool.pages_for(num_computed) - len(request.page_ids))
        if pages is None:
            return False
        request.page_ids += pages
        request.num_computed = num_computed
        self.cache.publish(request)
        return True

    def end(self, request, *, failed=False):
        if failed:
            self.cache.withdraw(request)
        self.cache.forget(request)
        self.pool.release(request.page_ids)
        request.page_ids = []
        self.open = [other for other in self.open if other is not request]

    def run(self, tokens) -> list[int]:
        """Pages of a request that computed all its tokens and ended."""
        request = self.admit(tokens)
        assert self.compute(request, len(tokens))
        pages = list(request.page_ids)
        self.end(request)
        return pages

    def hits(self, tokens, **params) -> list[int]:
        request = self.request(tokens, **params)
        pages = self.cache.match(request)
        self.cache.forget(request)
        return pages

    def check(self):
        self.pool.integrity(request.page_ids for request in self.open)
        self.cache.integrity(self.open)


@pytest.mark.parametrize(
    ("num_tokens", "num_hits"),
    [(1, 0), (PAGE - 1, 0), (PAGE, 0), (PAGE + 1, 1), (2 * PAGE, 1), (2 * PAGE + 1, 2)],
)
def test_hit_never_covers_the_last_prompt_token(num_tokens, num_hits):
    shelf = Shelf()
    pages = shelf.run(range(20))
    assert shelf.hits(range(num_tokens)) == pages[:num_hits]


@pytest.mark.parametrize(
    ("num_computed", "num_published"), [(PAGE - 1, 0), (PAGE, 1), (PAGE + 1, 1), (2 * PAGE, 2)]
)
def test_only_complete_computed_pages_are_published(num_computed, num_published):
    shelf = Shelf()
    request = shelf.admit(range(20))
    shelf.compute(request, num_computed)
    assert len(shelf.cache) == num_published
    assert shelf.hits(range(20)) == request.page_ids[:num_published]


def test_tokens_not_known_to_be_final_are_not_published():
    shelf = Shelf()
    request = shelf.admit(range(6))
    request.draft_token_ids[:] = [6, 7]
    shelf.compute(request, 8)  # drafts among them, none accepted yet
    assert shelf.hits(range(20)) == request.page_ids[:1]


def test_pages_of_the_output_are_published():
    shelf = Shelf()
    request = shelf.admit(range(3))
    request.output_token_ids += [3, 4]
    shelf.compute(request, 4)
    assert shelf.hits(range(9)) == request.page_ids


def test_hit_ends_at_the_first_page_that_differs():
    shelf = Shelf()
    pages = shelf.run(range(16))
    assert shelf.hits([0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11, 12]) == pages[:1]
    assert shelf.hits([99, *range(1, 13)]) == []


def test_same_tokens_behind_another_prefix_are_no_hit():
    shelf = Shelf()
    shelf.run([1, 1, 1, 1, 7, 7, 7, 7])
    other = shelf.run([2, 2, 2, 2, 7, 7, 7, 7])
    assert shelf.hits([2, 2, 2, 2, 7, 7, 7, 7, 0]) == other
    assert shelf.hits([7, 7, 7, 7, 0]) == []


def test_prompt_logprobs_find_nothing():
    shelf = Shelf()
    shelf.run(range(16))
    assert shelf.hits(range(16), prompt_logprobs=1) == []


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "n"},
        {"lane_dtypes": {"k": "bfloat16", "v": "float8_e4m3"}},
        {"lane_dtypes": {**SALT["lane_dtypes"], "index_k": "bfloat16"}},
        {"page_size": 8},
    ],
)
def test_salt_names_everything_that_changes_the_lanes(change):
    assert lane_salt(**SALT) == lane_salt(**SALT)
    assert lane_salt(**(SALT | change)) != lane_salt(**SALT)


def test_salt_enters_every_key():
    keys = []
    for salt in (b"a", b"b"):
        shelf = Shelf()
        shelf.cache = PrefixCache(shelf.pool, salt)
        shelf.run(range(8))
        keys.append(set(shelf.cache._entries))
    assert not keys[0] & keys[1]


def test_first_publisher_wins_and_duplicates_stay_private():
    shelf = Shelf()
    first, second = shelf.admit(range(9)), shelf.admit(range(9))
    shelf.compute(first, 8)
    shelf.compute(second, 8)
    assert shelf.hits(range(9)) == first.page_ids
    assert shelf.cache.stats.published == 2
    assert not set(first.page_ids) & set(second.page_ids)
    assert not any(map(shelf.pool.is_published, second.page_ids))
    shelf.check()


def test_duplicate_goes_on_publishing_behind_the_first():
    shelf = Shelf()
    first, second = shelf.admit(range(4)), shelf.admit(range(12))
    shelf.compute(first, 4)
    shelf.compute(second, 12)
    assert shelf.hits(range(13)) == first.page_ids + second.page_ids[1:]
    shelf.check()


def test_duplicate_whose_double_was_evicted_publishes_no_more():
    shelf = Shelf(num_pages=5)
    shelf.run(range(4))
    double = shelf.admit(range(4))  # too short to hit
    shelf.compute(double, 4)
    shelf.run(range(100, 112))  # takes all other pages
    assert shelf.hits(range(5)) == []
    double.output_token_ids += range(4, 12)
    shelf.compute(double, 12)
    assert not any(map(shelf.pool.is_published, double.page_ids))
    shelf.check()


def test_duplicate_does_not_build_on_a_page_that_took_the_key_of_its_double():
    shelf = Shelf(num_pages=6, digest=lambda data: bytes(sorted(data)))  # blind to order
    shelf.run([1, 1, 1, 2])
    double = shelf.admit([1, 1, 1, 2])  # too short to hit
    shelf.compute(double, 4)
    shelf.run(range(100, 116))  # evicts the first
    taker = shelf.admit([2, 1, 1, 1])
    shelf.compute(taker, 4)
    assert shelf.hits([2, 1, 1, 1, 9]) == taker.page_ids
    double.output_token_ids += [7, 7, 7, 7]
    shelf.compute(double, 8)
    assert shelf.hits([2, 1, 1, 1, 7, 7, 7, 7, 9]) == taker.page_ids
    shelf.check()


def test_collision_is_a_counted_miss():
    shelf = Shelf(digest=lambda data: b"")
    pages = shelf.run([1, 1, 1, 1])
    assert shelf.hits([1, 1, 1, 1, 0]) == pages
    assert shelf.cache.stats.collisions == 0
    assert shelf.hits([2, 2, 2, 2, 0]) == []
    assert shelf.cache.stats.collisions == 1


def test_request_that_collided_publishes_no_more():
    shelf = Shelf(digest=two_bit_digest)
    shelf.run([1, 1, 1, 1])
    other = shelf.admit([0, 2, 1, 1, 7, 7, 7, 7])  # the same digest
    shelf.compute(other, 8)
    assert shelf.cache.stats.collisions == 2  # when looked up, and when published
    # its second page would be found behind the page it collided with
    assert len(shelf.hits([1, 1, 1, 1, 7, 7, 7, 7, 0])) == 1


def test_eviction_takes_descendants_along():
    shelf = Shelf(num_pages=4)
    shelf.run(range(4))
    pages = shelf.run(range(12))
    assert len(shelf.cache) == 3
    request = shelf.admit(range(100, 104))
    shelf.pool._cached.move_to_end(pages[0], last=False)  # a parent older than its children
    shelf.compute(request, 3)
    assert len(shelf.cache) == 0
    assert shelf.cache.stats.evictions == 3
    assert shelf.pool.usable == 2
    shelf.check()


def test_statistics_count_tokens_once_per_request():
    shelf = Shelf()
    shelf.run(range(10))
    request = shelf.admit(range(10))
    assert (shelf.cache.stats.queries, shelf.cache.stats.hits) == (20, 8)
    request.num_preemptions = 1
    shelf.end(request)
    shelf.cache.share(request, [])
    assert (shelf.cache.stats.queries, shelf.cache.stats.hits) == (20, 8)


def test_failed_request_withdraws_what_it_published():
    shelf = Shelf()
    request = shelf.admit(range(10))
    shelf.compute(request, 8)
    shelf.end(request, failed=True)
    assert shelf.hits(range(10)) == []
    assert shelf.cache.stats.withdrawn == 2
    assert shelf.pool.num_cached == 0
    shelf.check()


def test_failed_request_withdraws_what_it_read():
    shelf = Shelf()
    shelf.run(range(4))
    request = shelf.admit(range(10))
    assert request.num_computed == 4
    shelf.end(request, failed=True)
    assert len(shelf.cache) == 0


def test_failed_request_withdraws_what_it_published_before_a_preemption():
    shelf = Shelf()
    request = shelf.admit(range(10), prompt_logprobs=0)
    shelf.compute(request, 8)
    shelf.pool.release(request.page_ids)
    request.page_ids, request.num_computed, request.num_preemptions = [], 0, 1
    shelf.cache.share(request, [])
    shelf.end(request, failed=True)
    assert len(shelf.cache) == 0
    shelf.check()


def test_failure_leaves_other_prefixes_alone():
    shelf = Shelf()
    other = shelf.run(range(50, 58))
    shelf.end(shelf.admit(range(10)), failed=True)
    assert shelf.hits(range(50, 60)) == other


def test_sharers_of_a_withdrawn_page_keep_it_and_publish_nothing_on_it():
    shelf = Shelf()
    sick = shelf.admit(range(10))
    shelf.compute(sick, 4)
    sharer = shelf.admit(range(12))
    shelf.compute(sharer, 8)
    shared = sharer.page_ids[0]
    assert shared == sick.page_ids[0]
    shelf.end(sick, failed=True)
    assert shelf.pool.num_holders(shared) == 1
    assert len(shelf.cache) == 0  # what the sharer computed from it went too
    healthy = shelf.admit(range(9))
    shelf.compute(healthy, 8)
    shelf.compute(sharer, 12)
    assert shelf.hits(range(12)) == healthy.page_ids
    assert not shelf.pool.is_published(sharer.page_ids[2])
    shelf.check()


def test_reset_forgets_everything_and_what_is_being_computed():
    shelf = Shelf()
    shelf.run(range(50, 60))
    running = shelf.admit(range(12))
    shelf.compute(running, 5)
    shelf.cache.reset()
    assert len(shelf.cache) == 0
    shelf.compute(running, 12)
    assert len(shelf.cache) == 0
    shelf.end(running)
    assert shelf.pool.usable == shelf.pool.capacity
    assert shelf.pool.num_cached == 0
    assert shelf.run(range(12))[:2] == shelf.hits(range(12))
    shelf.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda shelf: shelf.cache._entries.popitem(),
        lambda shelf: shelf.cache._by_page.popitem(),
        lambda shelf: shelf.pool.unpublish(2),
        lambda shelf: setattr(shelf.cache._by_page[2], "tokens", (1,)),
        lambda shelf: shelf.cache._by_page[1].children.clear(),
        lambda shelf: shelf.pool.publish(3),
        lambda shelf: setattr(shelf.open[0], "num_computed", 7),
        lambda shelf: setattr(shelf.open[0], "arrival", 77),
    ],
)
def test_integrity_finds_damage(damage):
    shelf = Shelf()
    shelf.compute(shelf.admit(range(12)), 9)
    shelf.check()
    damage(shelf)
    with pytest.raises(IntegrityError, match=r"page|arrival|settled"):
        shelf.cache.integrity(shelf.open)


class CacheMachine(RuleBasedStateMachine):
    """What a hit returns is exactly the published pages whose tokens, from the first on, are equal.

    The model is what was written: for each page, all tokens up to its end.
    """

    digest = None

    def __init__(self):
        super().__init__()
        options = {"digest": self.digest} if self.digest else {}
        self.shelf = Shelf(num_pages=8, page_size=2, **options)
        self.written: dict[int, tuple[int, ...]] = {}

    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=11)

    @rule(tokens=prompts, logprobs=st.sampled_from([None, None, None, 0]))
    def admit(self, tokens, logprobs):
        request = self.shelf.admit(tokens, prompt_logprobs=logprobs)
        assert len(request.page_ids) <= (len(tokens) - 1) // 2
        self._check_hits(request.prompt_token_ids, request.page_ids, found=logprobs is None)

    @precondition(lambda self: self.shelf.open)
    @rule(data=st.data(), num_tokens=st.integers(1, 11))
    def compute(self, data, num_tokens):
        request = data.draw(st.sampled_from(self.shelf.open), label="request")
        before = list(request.page_ids)
        target = min(request.num_computed + num_tokens, request.num_tokens)
        if self.shelf.compute(request, target):
            for index in range(len(before) - (1 if before else 0), len(request.page_ids)):
                tokens = tuple(request.tokens(0, min(target, 2 * index + 2)))
                if request.page_ids[index] not in self._shared():
                    self.written[request.page_ids[index]] = tokens

    def _shared(self):
        held = [page for request in self.shelf.open for page in request.page_ids]
        return {page for page in held if held.count(page) > 1}

    @precondition(lambda self: self.shelf.open)
    @rule(data=st.data(), failed=st.booleans())
    def end(self, data, failed):
        request = data.draw(st.sampled_from(self.shelf.open), label="request")
        published = [p for p in request.page_ids if self.shelf.pool.is_published(p)]
        self.shelf.end(request, failed=failed)
        if failed:
            assert not any(map(self.shelf.pool.is_published, published))

    @rule()
    def reset(self):
        self.shelf.cache.reset()
        assert self.shelf.pool.num_cached == 0

    @rule(tokens=prompts)
    def look(self, tokens):
        self._check_hits(tuple(tokens), self.shelf.hits(tokens), found=True)

    def _check_hits(self, tokens, hits, *, found):
        expected = []
        for stop in range(2, len(tokens), 2):
            same = [
                page
                for page, held in self.written.items()
                if held == tokens[:stop] and self.shelf.pool.is_published(page)
            ]
            assert len(same) <= 1, "two pages published for the same tokens"
            if not same:
                break
            expected += same
        if self.digest:  # collisions may hide pages, but not show wrong ones
            assert hits == expected[: len(hits)]
        else:
            assert hits == (expected if found else [])

    @invariant()
    def books_agree(self):
        self.shelf.check()
        for page in range(8):
            if self.shelf.pool.is_published(page):
                assert self.written[page] == self.shelf.cache.tokens_of(page)


class CollidingCacheMachine(CacheMachine):
    digest = staticmethod(two_bit_digest)


TestCacheMachine = CacheMachine.TestCase
TestCollidingCacheMachine = CollidingCacheMachine.TestCase
TestCacheMachine.settings = TestCollidingCacheMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
