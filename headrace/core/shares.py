"""Shares: exact parts of one, by which a lone transaction's end is known (Styx 5.3).

A share is 2^-k and is written as k. What somebody holds is a set of them, like the digits of a binary number: two of
one kind are one of the next larger kind. So all of it is back exactly when the set is {0}, however often it was split.
"""

from __future__ import annotations


def add_share(shares: set[int], share: int) -> None:
    while share in shares:
        shares.remove(share)
        share -= 1
    assert share >= 0, "more shares came back than were given"
    shares.add(share)


def is_whole(shares: set[int]) -> bool:
    return shares == {0}


def split_share(shares: set[int]) -> int:
    """Halve the largest share that is held; returns the half that leaves."""
    share = min(shares)
    shares.remove(share)
    add_share(shares, share + 1)
    return share + 1
