from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minuet.engine.pages import DUMMY_PAGE, PagePool
from minuet.errors import ContractError, IntegrityError


def test_reserved_pages_are_never_handed_out():
    pool = PagePool(5, 4, num_reserved=2)
    assert pool.capacity == pool.usable == 3
    assert pool.allocate(3) == [2, 3, 4]
    assert DUMMY_PAGE == 0
    pool.integrity([[2, 3, 4]])


def test_allocation_is_all_or_nothing():
    pool = PagePool(4, 4)
    assert pool.allocate(4) is None
    assert pool.usable == 3
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_one_page_pool_hands_out_its_page():
    pool = PagePool(1, 4, num_reserved=0)
    assert pool.allocate(1) == [0]
    pool.release([0])
    assert pool.allocate(1) == [0]


@pytest.mark.parametrize(("num_pages", "page_size", "reserved"), [(1, 4, 1), (0, 4, 0), (4, 0, 1)])
def test_pool_without_a_page_to_hand_out_is_refused(num_pages, page_size, reserved):
    with pytest.raises(ContractError, match="num_reserved"):
        PagePool(num_pages, page_size, num_reserved=reserved)


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for_rounds_up_at_page_boundaries(num_tokens, pages):
    assert PagePool(9, 4).pages_for(num_tokens) == pages


def test_order_of_pages_depends_on_the_calls_alone():
    def play():
        pool = PagePool(6, 4)
        first, second = pool.allocate(2), pool.allocate(2)
        pool.release(second)
        pool.release(first)
        return pool.allocate(5)

    assert play() == play() == [5, 4, 3, 2, 1]


def test_released_page_rests_until_the_others_were_used():
    pool = PagePool(5, 4)
    pool.release(pool.allocate(1))
    assert pool.allocate(3) == [2, 3, 4]


def test_published_page_stays_cached_and_is_usable():
    pool = PagePool(3, 4)
    (page,) = pool.allocate(1)
    pool.publish(page)
    pool.release([page])
    assert pool.usable == 2
    assert pool.num_cached == 1
    pool.share([page])
    assert pool.usable == 1
    assert pool.num_holders(page) == 1
    pool.integrity([[page]])


def test_free_pages_are_used_before_cached_ones_are_evicted():
    pool = PagePool(4, 4)
    (page,) = pool.allocate(1)
    pool.publish(page)
    pool.release([page])
    assert pool.allocate(2) == [2, 3]
    assert pool.is_published(page)
    assert pool.allocate(1) == [page]
    assert not pool.is_published(page)


def test_least_recently_used_page_is_evicted_first():
    pool = PagePool(4, 4)
    pages = pool.allocate(3)
    for page in pages:
        pool.publish(page)
        pool.release([page])
    pool.share([1])
    pool.release([1])
    assert [pool.allocate(1) for _ in range(3)] == [[2], [3], [1]]


def test_tail_of_a_request_is_evicted_before_its_head():
    pool = PagePool(4, 4)
    pages = pool.allocate(3)
    for page in pages:
        pool.publish(page)
    pool.release(pages)
    assert [pool.allocate(1) for _ in range(3)] == [[3], [2], [1]]


def test_evicting_tells_the_prefix_cache():
    pool = PagePool(2, 4)
    told = []
    pool.on_evict = lambda page: (told.append(page), pool.unpublish(page))[0]
    (page,) = pool.allocate(1)
    pool.publish(page)
    pool.release([page])
    assert pool.allocate(1) == [page]
    assert told == [page]


def test_prefix_cache_that_keeps_an_evicted_page_is_named():
    pool = PagePool(2, 4)
    pool.on_evict = lambda page: None
    (page,) = pool.allocate(1)
    pool.publish(page)
    pool.release([page])
    with pytest.raises(IntegrityError, match="page 1: evicted"):
        pool.allocate(1)


def test_page_is_never_freed_twice():
    pool = PagePool(3, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(IntegrityError, match="page 1: released, but nobody holds it"):
        pool.release(pages)


def test_private_page_cannot_be_shared():
    pool = PagePool(3, 4)
    with pytest.raises(IntegrityError, match="page 1: shared, but not published"):
        pool.share(pool.allocate(1))


@pytest.mark.parametrize("state", ["free", "published", "shared and withdrawn"])
def test_only_a_private_page_can_be_published(state):
    pool = PagePool(3, 4)
    if state != "free":
        pool.publish(pool.allocate(1)[0])
    if state == "shared and withdrawn":
        pool.share([1])
        pool.unpublish(1)
    with pytest.raises(IntegrityError, match="page 1: published with"):
        pool.publish(1)


def test_withdrawn_page_goes_free_with_its_last_holder():
    pool = PagePool(2, 4)
    (page,) = pool.allocate(1)
    pool.publish(page)
    pool.share([page])
    pool.unpublish(page)
    pool.integrity([[page], [page]])
    with pytest.raises(IntegrityError, match="shared, but not published"):
        pool.share([page])
    pool.release([page])
    assert pool.usable == 0
    pool.release([page])
    assert pool.usable == 1
    assert pool.num_cached == 0


@pytest.mark.parametrize(
    ("damage", "page"),
    [
        (lambda pool: pool._free.append(1), 1),
        (lambda pool: pool._free.pop(), 3),
        (lambda pool: pool._num_holders.__setitem__(1, 0), 1),
        (lambda pool: pool._num_holders.__setitem__(2, 2), 2),
        (lambda pool: pool._published.add(3), 3),
        (lambda pool: pool._cached.__setitem__(3, None), 3),
        (lambda pool: pool._num_holders.__setitem__(0, 1), 0),
        (lambda pool: pool._withdrawn.add(3), 3),
    ],
)
def test_integrity_names_the_damaged_page(damage, page):
    pool = PagePool(4, 4)
    assert pool.allocate(2) == [1, 2]
    pool.integrity([[1, 2]])
    damage(pool)
    with pytest.raises(IntegrityError, match=f"page {page}: "):
        pool.integrity([[1, 2]])


@pytest.mark.parametrize("holders", [[[1]], [[1, 2], [2]], [[1, 2, 2]], [[1, 2, 3]]])
def test_integrity_compares_with_what_requests_hold(holders):
    pool = PagePool(4, 4)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match=r"page \d: "):
        pool.integrity(holders)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model of who holds what."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(6, 2)
        self.pool.on_evict = self._evict
        self.held: list[list[int]] = []
        self.published: set[int] = set()

    def _evict(self, page):
        assert not any(page in pages for pages in self.held), "evicted under a holder"
        self.published.discard(page)
        self.pool.unpublish(page)

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        taken = set().union(*self.held)
        fits = count <= 5 - len(taken)
        pages = self.pool.allocate(count)
        assert (pages is not None) == fits
        if pages is not None:
            assert len(set(pages)) == count
            assert not taken & set(pages), "handed out twice"
            assert not self.published & set(pages)
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.published)), unique=True))
        self.pool.share(pages)
        self.held.append(pages)

    @rule(data=st.data())
    def publish(self, data):
        counts = Counter(page for pages in self.held for page in pages)
        once = [p for p, n in counts.items() if n == 1 and p not in self.published]
        fresh = [p for p in once if p not in self.pool._withdrawn]
        if fresh:
            page = data.draw(st.sampled_from(sorted(fresh)))
            self.pool.publish(page)
            self.published.add(page)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def unpublish(self, data):
        page = data.draw(st.sampled_from(sorted(self.published)))
        self.pool.unpublish(page)
        self.published.remove(page)

    @invariant()
    def books_agree(self):
        self.pool.integrity(self.held)
        assert {p for p in range(6) if self.pool.is_published(p)} == self.published
        assert self.pool.usable == 5 - len(set().union(*self.held))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
