"""What a call draws: numbers, ids. Nothing here is drawn by chance: all of it follows from the app's seed, the TID, the
path of the call in its transaction, and how often it drew before. So it is the same whenever and wherever the call is
run again.

(`random` is imported for the class alone, and every instance is seeded.)
"""

from __future__ import annotations

import hashlib
import re
import uuid
from random import Random as Random

ID = re.compile(r"[1-9][0-9]{0,18}-[0-9a-f]{32}\Z")


class Chance:
    """One call's."""

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
        """Of something that this call brings about: a timer, a message, an external call."""
        return f"{self.tid}-{self._digest(kind).hex()}"

    def _digest(self, kind: str) -> bytes:
        n = self._counts[kind] = self._counts.get(kind, 0) + 1
        return hashlib.blake2b(f"{self._origin}/{kind}/{n}".encode(), digest_size=16).digest()


def is_id(text: object) -> bool:
    return type(text) is str and ID.match(text) is not None
