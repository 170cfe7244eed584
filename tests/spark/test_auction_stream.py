"""The auction house, fed by a Spark stream: every bid has its reply, and a plain loop comes to the same leaders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]


def test_the_stream_of_bids_is_answered_and_money_is_conserved() -> None:
    command = [sys.executable, "-m", "examples.auction_stream"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "3,000 bids have a reply" in done.stdout
    assert "a plain loop gives the same leaders: yes" in done.stdout
    assert " held = 40,000" in done.stdout
