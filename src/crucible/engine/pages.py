"""Which pages of the key/value cache are free: plain integers, no device."""

from __future__ import annotations

from collections.abc import Iterable


class PageError(RuntimeError):
    """Pages were freed twice, lost or held by two requests: a bug, never a user's mistake."""


class PagePool:
    """Pages 0 to `num_pages` - 1, each free or used.

    Args:
        num_pages: at least 0.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Taken from the end, so that the lowest pages go first and the last ones freed are used again soonest.
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """`count` pages that were free. Raises PageError, taking none, if there are not so many."""
        if not 0 <= count <= len(self._free):
            raise PageError(f"{count} pages asked for, {len(self._free)} are free")
        pages = tuple(self._free.pop() for _ in range(count))
        self._used.update(pages)
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Free pages. Raises PageError at one that is not used: it does not exist or was freed before."""
        for page in pages:
            if page not in self._used:
                raise PageError(f"page {page} is not in use")
            self._used.remove(page)
            self._free.append(page)

    def check(self, held: Iterable[int]) -> None:
        """Audit: every page is free or used, none both, and the used ones are those in `held`, each held once.

        Raises:
            PageError: the account is wrong.
        """
        held = sorted(held)
        if held != sorted(self._used):
            raise PageError(f"{len(held)} pages are held, {len(self._used)} in use, or not the same ones")
        if sorted([*self._free, *self._used]) != list(range(self.num_pages)):
            raise PageError(f"{len(self._free)} free and {len(self._used)} used pages are not the {self.num_pages}")
