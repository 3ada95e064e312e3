"""Copies of pages in columns are a sequence of page copies."""

from array import array

from jinfercept.kv.page import PageCopies, PageCopy


def test_columns_read_as_the_copies_that_they_were_made_of() -> None:
    copies = PageCopies()
    copies.add(array("i", [5, 6]), array("i", [1, 2]), context=3)
    copies.add(array("i", [7]), array("i", [0]))
    expected = (PageCopy(5, 1, 3), PageCopy(6, 2, 3), PageCopy(7, 0))
    assert copies == expected == tuple(copies)
    assert (copies[-1], copies[:2], len(copies), repr(copies)) == (expected[-1], expected[:2], 3, repr(expected))
    assert PageCopies.of(copies) is copies
    assert PageCopies.of(expected) == copies
    assert hash(PageCopies(expected)) == hash(copies)
