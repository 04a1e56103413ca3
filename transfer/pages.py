"""Who owns each page: counted references over a fixed set of page ids."""

from collections.abc import Collection


class PagePool:
    """Hands out pages 0 .. num_pages-1. A page is free, or held by one or more references.

    Invariant: free pages have count 0 and are in the free list once; all others have a
    count above 0; num_free + num_held == num_pages. All counts sum up to num_references.
    num_kept_alone of the held pages have a single reference, which is a cache's.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._count = [0] * num_pages
        self._is_kept = bytearray(num_pages)  # a cache has one of the references
        self.num_kept_alone = 0
        self.num_references = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def num_to_have(self) -> int:
        """Pages that are free, or would be if the cache gave up all that nobody else holds."""
        return self.num_free + self.num_kept_alone

    def refcount(self, page: int) -> int:
        return self._count[page]

    def reserve(self, num_pages: int) -> tuple[int, ...] | None:
        """Take pages with one reference each; None, with none taken, when too few are free."""
        assert num_pages >= 0
        if num_pages > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(num_pages))
        for page in taken:
            self._count[page] = 1
        self.num_references += num_pages
        return taken

    def share(self, pages: Collection[int]) -> None:
        """Add one reference to pages that are held."""
        self.num_references += len(pages)
        for page in pages:
            assert self._count[page] > 0, f"page {page} is free"
            self._count[page] += 1
            if self._count[page] == 2:
                self.num_kept_alone -= self._is_kept[page]

    def keep(self, pages: Collection[int]) -> None:
        """Add a cache's reference to pages that are held; a page has one of them at most."""
        self.share(pages)
        for page in pages:
            assert not self._is_kept[page], f"page {page} is kept already"
            self._is_kept[page] = True

    def let_go(self, pages: Collection[int]) -> None:
        """Drop a cache's reference to each of these pages."""
        for page in pages:
            assert self._is_kept[page], f"page {page} is not kept"
            if self._count[page] == 1:
                self.num_kept_alone -= 1
            self._is_kept[page] = False
        self.release(pages)

    def release(self, pages: Collection[int]) -> None:
        """Drop one reference; the last one frees the page."""
        self.num_references -= len(pages)
        for page in pages:
            assert self._count[page] > 0, f"page {page} is free already"
            self._count[page] -= 1
            if self._count[page] == 0:
                self._free.append(page)
            elif self._count[page] == 1:
                self.num_kept_alone += self._is_kept[page]

    def check(self) -> None:
        """Check the whole invariant."""
        assert len(set(self._free)) == len(self._free)
        assert all(self._count[page] == 0 for page in self._free)
        assert sum(count > 0 for count in self._count) == self.num_held
        assert sum(self._count) == self.num_references
        kept = [page for page, is_kept in enumerate(self._is_kept) if is_kept]
        assert sum(self._count[page] == 1 for page in kept) == self.num_kept_alone
        assert not any(self._is_kept[page] for page in self._free)
