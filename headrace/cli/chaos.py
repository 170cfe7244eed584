"""`headrace chaos`: kills and pauses real processes while clients are working, and checks the replies that they got."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.chaos.campaign import chaos


def run_chaos(seconds: float, seed: int | None, workers: int, store: str | None, as_json: bool) -> bool:
    """Returns True if nothing is wrong. Otherwise the files of the servers are kept, and their place is printed."""
    seed = random.randrange(1 << 31) if seed is None else seed
    told = Console(stderr=True, highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    is_clean = is_over = False
    try:
        with told.status(f"seed {seed}: starting") as status:
            figures, verdict = chaos(
                seconds,
                seed,
                workers,
                store or str(folder / "store"),
                folder,
                lambda text: status.update(f"seed {seed}: {text}"),
            )
        is_clean, is_over = verdict.is_clean, True
    finally:
        if is_clean or not is_over:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            told.print(f"the servers' files and output are in {folder}", markup=False)
    if as_json:
        print(json.dumps(figures))
    else:
        show(figures)
    return is_clean


def show(figures: dict[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    trouble = ("worker_kills", "coordinator_kills", "pauses", "takeovers", "snapshots")
    out.print(f"seed        {figures['seed']}")
    counted = ", ".join(f"{figures[name]} {name}" for name in trouble).replace("_", " ")
    out.print(f"faults      {counted}")
    out.print(f"answers     {figures['acknowledged']:,} acknowledged, after {figures['retries']:,} retries")
    if figures["recovery_ms_median"] is not None:
        median, most = figures["recovery_ms_median"], figures["recovery_ms_max"]
        out.print(f"recovery    {median:,.0f} ms from a coordinator's death to the next answer (at most {most:,.0f})")
    for text in figures["found"]:
        out.print(f"wrong       {text}", markup=False, style="red")
    counts = ", ".join(f"{name} {figures[name]}" for name in ("lost", "duplicated", "violations"))
    is_clean = not any(figures[name] for name in ("lost", "duplicated", "violations"))
    out.print(f"verdict     {counts}, in {figures['seconds']:.1f} s", style="green" if is_clean else "red")
