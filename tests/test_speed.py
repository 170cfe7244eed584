"""README's table and chart of how fast Headrace is are what `benchmarks/results/` says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_and_the_chart_are_made_of_the_results() -> None:
    found = importlib.util.spec_from_file_location("speed", ROOT / "benchmarks" / "speed.py")
    assert found is not None
    assert found.loader is not None
    speed = importlib.util.module_from_spec(found)
    found.loader.exec_module(speed)
    rows = speed.rows()
    assert f"{speed.BEGIN}\n{speed.table(rows)}\n{speed.END}" in (ROOT / "README.md").read_text()
    assert speed.chart(rows) == (ROOT / "docs" / "speed.svg").read_text()
