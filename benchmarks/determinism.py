"""What the digest of writes costs with a store, and a check without one: transfers, in laps that alternate.

    python benchmarks/determinism.py --laps 12

Both runtimes of a pair get the same batches. `digest` is a durable runtime against one that takes no digests; `check`
is `Runtime(app, check=True)` against a plain one. Figures are ratios of processor time, of all threads, medians over
the laps. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

from headrace import Runtime
from headrace.bench import ycsb
from headrace.bench.senders import AT_ONCE_DURABLE, BATCH, cut, send
from headrace.bench.stores import wait_until_kept
from headrace.core.state import State

KEYS = 10_000


def pair(kind: str, folder: Path) -> tuple[Runtime, Runtime]:
    """Without, and with."""
    if kind == "check":
        return Runtime(ycsb.app), Runtime(ycsb.app, check=True)
    with patch.object(State, "keep_digests", lambda self: None):
        without = Runtime(ycsb.app, store=folder / "without")
    return without, Runtime(ycsb.app, store=folder / "with")


def ratio(kind: str, laps: int, count: int) -> float:
    with TemporaryDirectory(dir=Path.cwd()) as folder:
        sides = pair(kind, Path(folder))
        for runtime in sides:
            runtime.client.map(ycsb.open_account, list(range(KEYS)), [(ycsb.BALANCE,)] * KEYS)
        ratios = []
        for lap in range(laps):
            parts = cut(ycsb.transfers(KEYS, 0.0, count, lap), BATCH)
            took_s = {}
            for side in (0, 1) if lap % 2 else (1, 0):
                began_s = time.process_time()
                send(sides[side], ycsb.transfer, parts, AT_ONCE_DURABLE)
                if kind == "digest":
                    wait_until_kept(sides[side])
                took_s[side] = time.process_time() - began_s
            ratios.append(took_s[1] / took_s[0])
        for runtime in sides:
            runtime.close()
        return median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laps", type=int, default=12)
    parser.add_argument("--transactions", type=int, default=50_000)
    given = parser.parse_args()
    found = {kind: round(ratio(kind, given.laps, given.transactions), 3) for kind in ("digest", "check")}
    print(json.dumps({"time_with_digest_of_without": found["digest"], "time_with_check_of_without": found["check"]}))


if __name__ == "__main__":
    main()
