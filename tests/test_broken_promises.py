"""The list of mistakes that break promises is whole: see `broken_promises.py`, which plants them."""

from __future__ import annotations

import pytest

from tests.broken_promises import MISTAKES, ROOT, Mistake, promises


def test_every_promise_is_broken_once() -> None:
    assert [mistake.promise for mistake in MISTAKES] == list(promises())


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.promise)
def test_what_a_mistake_replaces_stands_in_its_file_once(mistake: Mistake) -> None:
    text = (ROOT / mistake.file).read_text()
    assert [text.count(old) for old, _ in mistake.changes] == [1] * len(mistake.changes)
