"""A function that overran, in a replay: whoever may have been answered is not undone lightly."""

from __future__ import annotations

import pytest

from headrace import App, Config, Context
from headrace.core.admission import Admission
from headrace.core.coordinator import REPLAY_CHANCES, Coordinator, on_workers
from headrace.core.events import Append, Overran, Submit
from headrace.core.log_records import Decree

app = App("slow")
item = app.operator("item")


@item.register
def dawdle(ctx: Context) -> int:
    return 1


@pytest.mark.parametrize("is_replayed", [False, True])
def test_it_takes_more_overruns_to_abort_what_an_earlier_coordinator_may_have_answered(is_replayed: bool) -> None:
    engine = on_workers(app, Config(), 1, "serial", is_durable=True)
    engine.start(0)
    batch = Admission(engine.program).admit("x", [(dawdle, "k")])
    engine.step(1, Submit([(0, batch)]))
    assert isinstance(engine.backend, Coordinator)
    (epoch,) = engine.backend.log
    epoch.is_replayed = is_replayed
    overruns, decrees = 0, []
    while not decrees:
        overruns += 1
        effects = engine.step(1 + overruns, Overran(1, epoch.tids[0]))
        decrees = [each for each in effects if isinstance(each, Append) and isinstance(each.record, Decree)]
    assert overruns == (REPLAY_CHANCES if is_replayed else 1)
