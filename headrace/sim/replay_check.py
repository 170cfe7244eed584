"""Replays the whole log from its first record, in a new engine with other limits: the state must be the same, and what
each epoch wrote, as its digest says.

A recovery begins with a snapshot, which may hide that the log lacks something. This replay hides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from headrace.config import Config
from headrace.core.digests import NET
from headrace.core.engine import Engine
from headrace.core.epoch import Batch, Epoch
from headrace.core.events import Tick
from headrace.core.restore import Restored, restore
from headrace.core.snapshot_metadata import INITIAL
from headrace.durability.log.records import Records
from headrace.errors import HeadraceError
from headrace.model.app import App
from headrace.sim.check import ReferenceState, canonical
from headrace.sim.promises import Promised

LIMITS = {"calls_max": 3, "depth_max": 1}  # of the engine: it must use those in the log instead


def check_replay(
    app: App,
    config: Config,
    seed: int,
    records: dict[int, Promised],
    last: ReferenceState,
    digests: Iterable[tuple[int, bytes]],
) -> list[str]:
    """`digests` are those of epochs, of any kind."""
    wanted: dict[int, bytes] = {}
    for number, digest in digests:  # if there are two, that of several workers
        if digest.startswith(NET) or number not in wanted:
            wanted[number] = digest
    engine = Engine(app, dataclasses.replace(config, **LIMITS), seed=seed, has_digests=True)
    decode, batches = Records(engine.program).decode, dict[int, Batch]()
    logged = [decode(number, promised.data, batches) for number, promised in sorted(records.items())]
    try:
        restore(engine, Restored(0, {}, INITIAL, [], logged, len(logged)))
        epochs = [item for item in engine.backlog if isinstance(item, Epoch)]
        for epoch in epochs:
            epoch.digest = wanted.get(epoch.number)  # which says what kind of digest is taken
        engine.start(last.time_us)
        engine.step(last.time_us, Tick())
    except HeadraceError as error:
        return [f"the log cannot be run again from its beginning: {error!r}"]
    if engine.backlog:
        return [f"the log does not run to its end from its beginning: {len(engine.backlog)} are left"]
    other = [each.number for each in epochs if each.digest != wanted.get(each.number, each.digest)]
    if other:
        return [f"the log, run again from its beginning, writes something else in epochs {other[:4]}"]
    values = engine.program.values
    found = {(name, key): canonical(sealed, values) for name, key, sealed in engine.state.select()}
    expected = last.encoded(values)
    differing = sorted((e for e in {*found, *expected} if found.get(e) != expected.get(e)), key=repr)
    texts = [f"{e}: {found.get(e)!r}, not {expected.get(e)!r}" for e in differing[:4]]
    return [f"the log, run again from its beginning, gives another state: {'; '.join(texts)}"] if texts else []
