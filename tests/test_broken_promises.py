"""The list of mistakes that break promises is whole: see `broken_promises.py`, which plants them."""

from __future__ import annotations

import pytest

from tests.broken_promises import ROOT, mistakes_of, promises
from tests.planted import Mistake

SECTIONS = promises()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_promise_is_broken_once(section: str) -> None:
    assert [mistake.promise for mistake in mistakes_of(section)] == list(SECTIONS[section])


@pytest.mark.parametrize(
    "mistake",
    [mistake for section in SECTIONS for mistake in mistakes_of(section)],
    ids=lambda mistake: mistake.promise,
)
def test_what_a_mistake_replaces_stands_in_its_file_once(mistake: Mistake) -> None:
    for file, old, _ in mistake.changes:
        assert (ROOT / file).read_text().count(old) == 1, f"{file}: {old}"
