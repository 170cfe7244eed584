"""The notebook runs from its first cell to its last, and its comments are true."""

from __future__ import annotations

import json
import linecache
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs import ROOT, execute

pytestmark = pytest.mark.spark
NOTEBOOK = ROOT / "examples" / "pipeline.ipynb"


def test_the_notebook_runs_and_every_claim_in_a_comment_holds(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        assert not cell["outputs"], "the notebook is kept without outputs: comments say what comes out"
        source = "".join(cell["source"]).replace('"pipeline-', f'"{tmp_path}/pipeline-')
        name = f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # as a notebook does
        execute(source, module.__dict__, name)
    assert "hotel-" in capsys.readouterr().out
