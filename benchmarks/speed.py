"""README's table and chart of how fast Headrace is, made of `benchmarks/results/`.

    python benchmarks/speed.py

`make bench` measures first and then runs this. Nothing in the table or the chart is written by hand.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
README, CHART, RESULTS = HERE.parent / "README.md", HERE.parent / "docs" / "speed.svg", HERE / "results"
BEGIN, END = "<!-- made by benchmarks/speed.py -->", "<!-- until here -->"

STATES = {
    "int": "`int`",
    "struct": "struct of two ints",
    "dataclass": "dataclass of two ints",
    "decimal": "dataclass of two Decimals",
    "wide": "ten fields, two nested",
}
WAYS = {"": "one process, in memory", "_durable": "one process, with a store", "_2_workers": "two workers, in memory"}

Row = tuple[str, dict[str, float | None]]  # a way in, and transfers per second by state


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def rows() -> list[Row]:
    """Transfers per second: for each way in, by state. None where it is not measured."""
    found: list[Row] = []
    for suffix, way in WAYS.items():
        runs = {state: read(f"state_{state}{suffix}") for state in STATES if state != "int"}
        per_s: dict[str, float | None] = {"int": median(run["int_per_s"] for run in runs.values())}
        found.append((way, per_s | {state: run["committed_per_s"] for state, run in runs.items()}))
    spark, http = read("ycsb_through_spark"), read("http")
    found.append(("Spark, in and out, with a store", {"int": spark["committed_per_s"]}))
    found.append(("HTTP, 100 calls in a request, with a store", {"int": http["batched_per_s"]}))
    found.append(("HTTP, one call in a request, with a store", {"int": http["calls_per_s"]}))
    loop = read("ycsb_serial")["reference_per_s"]
    return [("a bare loop over a dict with undo", {"int": loop}), *found]


def shown(per_s: float | None) -> str:
    """With three digits."""
    if per_s is None:
        return ""
    unit = 10 ** max(0, math.floor(math.log10(per_s)) - 2)
    return f"{round(per_s / unit) * unit:,}"


def table(found: list[Row]) -> str:
    lines = [f"| transfers per second | {' | '.join(STATES.values())} |", f"|---{'|---:' * len(STATES)}|"]
    lines += [f"| {way} | {' | '.join(shown(per_s.get(state)) for state in STATES)} |" for way, per_s in found]
    return "\n".join(lines)


# --- the chart --------------------------------------------------------------------------------------------------------

LEFT, WIDTH, BAR, GAP = 330, 470, 20, 8
LEAST = 1_000  # where the bars begin


def chart(found: list[Row]) -> str:
    """Horizontal bars over a logarithmic scale: the ways in with an int, then the other states in one process."""
    bars = [(way, per_s["int"], "#2f6f9f") for way, per_s in found]
    states = dict(found)[WAYS[""]]
    bars += [(f"{title}, in memory", states[state], "#5c9f6f") for state, title in STATES.items() if state != "int"]
    top = 44
    height = top + len(bars) * (BAR + GAP) + 30
    most = max(per_s for _, per_s, _ in bars if per_s is not None)
    scale = WIDTH / math.log10(most / LEAST)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 90} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{LEFT + WIDTH + 90}" height="{height}" fill="white"/>',
        '<text x="12" y="24" font-size="16">Transfers per second, two cores (logarithmic scale)</text>',
    ]
    for power in range(3, math.floor(math.log10(most)) + 1):
        x = LEFT + scale * math.log10(10**power / LEAST)
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{top - 8}" y2="{height - 26}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.0f}" y="{height - 10}" text-anchor="middle" fill="#555">{10**power:,}</text>')
    for at, (title, per_s, color) in enumerate(bars):
        assert per_s is not None
        y = top + at * (BAR + GAP)
        length = max(1.0, scale * math.log10(per_s / LEAST))
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(title)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.0f}" height="{BAR}" fill="{color}"/>')
        parts.append(f'<text x="{LEFT + length + 6:.0f}" y="{y + 15}">{shown(per_s)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    found = rows()
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")
    CHART.write_text(chart(found))
    print(table(found))


if __name__ == "__main__":
    main()
