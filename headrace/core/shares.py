"""Shares: exact parts of one, which show when a lone transaction has ended (Styx 5.3).

A share is 2^-k, written as k. A node holds a set of shares, like the digits of a binary number: two equal shares make
one share of twice the size. So everything is back exactly when the set is {0}, however often it was split.
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
    """Halve the largest share; returns the half to send."""
    share = min(shares)
    shares.remove(share)
    add_share(shares, share + 1)
    return share + 1
