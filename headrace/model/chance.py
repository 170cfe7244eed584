"""What a call draws: random numbers and ids. Nothing here is left to chance: everything follows from the app's seed,
the TID, the path of the call in its transaction, and how often it drew before. So it is the same whenever and wherever
the call is run again.

(Only the class is imported from `random`, and every instance is seeded.)
"""

from __future__ import annotations

import hashlib
import re
import uuid
from random import Random as Random

ID = re.compile(r"[1-9][0-9]{0,18}-[0-9a-f]{32}\Z")


class Chance:
    """The random numbers and ids of one call."""

    __slots__ = ("_counts", "_origin", "_random", "tid")

    def __init__(self, seed: int, tid: int, path: bytes) -> None:
        self.tid, self._origin = tid, f"{seed}/{tid}/{path.hex()}"
        self._random: Random | None = None
        self._counts: dict[str, int] = {}

    @property
    def random(self) -> Random:
        if self._random is None:
            self._random = Random(self._digest("random"))
        return self._random

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(bytes=self._digest("uuid"), version=4)

    def id(self, kind: str) -> str:
        """The id of something that this call creates: a timer, a message, an external call."""
        return f"{self.tid}-{self._digest(kind).hex()}"

    def _digest(self, kind: str) -> bytes:
        n = self._counts[kind] = self._counts.get(kind, 0) + 1
        return hashlib.blake2b(f"{self._origin}/{kind}/{n}".encode(), digest_size=16).digest()


def is_id(text: object) -> bool:
    return type(text) is str and ID.match(text) is not None
