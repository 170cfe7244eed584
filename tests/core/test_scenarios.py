"""Scenarios are read as they are written: what comes out otherwise is told, and none lies there unplayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.scenario import FOLDER, check_scenario, play, played

STORY = """# Of two writes the later one counts.

cluster workers=2
submit
    put(a@1, 1)
    put(a@1, 2)
settle
state
----
batch 0: ok None (2 times)
a@1: 2
"""


def test_a_scenario_is_played_as_it_is_written() -> None:
    assert play(STORY) == (STORY, None)
    assert play(STORY.replace("a@1: 2", "a@1: 1")) == (STORY, None)


def test_what_a_scenario_cannot_do_ends_it_and_is_told() -> None:
    found, error = play(STORY.replace("settle", "settle down"))
    assert isinstance(error, TypeError)
    assert "TypeError" in found
    assert "a@1" not in found.partition("----")[2]


def test_another_outcome_is_told_line_by_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text(STORY.replace("a@1: 2", "a@1: 1"))
    monkeypatch.setattr("tests.core.scenario.FOLDER", tmp_path)
    monkeypatch.delenv("HEADRACE_REWRITE", raising=False)
    assert played("story") == STORY
    with pytest.raises(AssertionError, match=r"-a@1: 1\n\+a@1: 2"):
        check_scenario("story")


def test_every_scenario_is_checked_by_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    names = [path.stem for path in FOLDER.glob("*.txt")]
    assert names
    assert [name for name in names if f'check_scenario("{name}")' not in tests] == []
