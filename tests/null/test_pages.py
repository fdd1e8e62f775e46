"""The page pool: free + used == total whatever is taken and given back, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.engine.pages import PageError, PagePool


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_every_page_is_free_or_held_once(num_pages: int, moves: list[tuple[bool, int]]) -> None:
    """Takes and gives in any order, beside an account of the simplest kind: the list of what is held."""
    pool = PagePool(num_pages)
    held: list[tuple[int, ...]] = []
    for takes, number in moves:
        if takes and number <= pool.num_free:
            pages = pool.take(number)
            assert len(set(pages)) == number
            held.append(pages)
        elif takes:
            with pytest.raises(PageError, match=f"{number} pages asked for, {pool.num_free} are free"):
                pool.take(number)
        elif held:
            pool.give(held.pop(number % len(held)))
        flat = [page for pages in held for page in pages]
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(range(num_pages))
        assert pool.num_free + len(flat) == num_pages
        pool.check(flat)


def test_pages_just_freed_are_taken_first() -> None:
    pool = PagePool(10)
    assert pool.take(3) == (0, 1, 2)
    second = pool.take(2)
    pool.give(second)
    assert set(pool.take(2)) == set(second)


@pytest.mark.parametrize("pages", [(1, 1), (3,), (-1,), (5,)], ids=["twice", "free", "negative", "beyond"])
def test_a_page_that_is_not_used_cannot_be_freed(pages: tuple[int, ...]) -> None:
    pool = PagePool(5)
    assert pool.take(3) == (0, 1, 2)
    with pytest.raises(PageError, match=f"page {pages[-1]} is not in use"):
        pool.give(pages)


def test_a_negative_number_of_pages_is_refused() -> None:
    with pytest.raises(PageError, match="-1 pages asked for"):
        PagePool(5).take(-1)


@pytest.mark.parametrize("held", [(), (0,), (0, 1, 2), (0, 0, 1), (0, 2)])
def test_the_audit_finds_pages_that_nobody_holds_or_two_do(held: tuple[int, ...]) -> None:
    pool = PagePool(5)
    pool.take(2)
    pool.check([1, 0])
    with pytest.raises(PageError):
        pool.check(held)


def test_the_audit_finds_lost_and_doubled_pages() -> None:
    pool = PagePool(5)
    pool.take(2)
    pool._free.pop()
    with pytest.raises(PageError, match="2 free and 2 used pages are not the 5"):
        pool.check([0, 1])
    pool._free += [4, 4]
    with pytest.raises(PageError):
        pool.check([0, 1])
