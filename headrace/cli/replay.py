"""`headrace restore`, `headrace verify` and `headrace upgrade`: what an app's code makes of a store's log."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
from rich.console import Console

from headrace.cli.logs import in_json
from headrace.config import Config
from headrace.core.digests import is_comparable
from headrace.core.epoch import Epoch
from headrace.durability.reading.store_reader import Replay, StoreReader
from headrace.errors import Stopped
from headrace.model.app import App
from headrace.model.fingerprint import fingerprint
from headrace.runtime.inprocess import Runtime
from headrace.runtime.loading import load
from headrace.wire.messages import Failure
from headrace.wire.renewal import UNREADABLE, renew
from headrace.wire.values import Values, shown

OTHER_SEED = "1"  # of hashes, for the second replay; workers have 0
SHOWN_MAX = 20
encode = msgspec.msgpack.Encoder().encode


def restore_into(target: str, store: str, epoch: int, into: str, as_json: bool) -> None:
    past = StoreReader(store, load(target))
    made = past.write_new_store(past.replay(epoch), into)
    if as_json:
        print(in_json(made))
        return
    Console(highlight=False, soft_wrap=True).print(
        f"{made['store']} continues from the end of epoch {made['epoch']}, with {made['entities']:,} entities: "
        f"headrace run {target} --store {into}",
        markup=False,
    )


# --- verify -----------------------------------------------------------------------------------------------------------


class Difference(msgspec.Struct):
    """The first row of a function that gave another result, and how many there were."""

    function: str
    tid: int
    epoch: int
    key: str
    was: str
    now: str
    count: int = 1


def verify_stretch(target: str, store: str, first: int | None, last: int | None, twice: bool, as_json: bool) -> bool:
    app = load(target)
    past = StoreReader(store, app)
    replay = past.replay(last, None if first is None else first - 1, is_strict=False, has_digests=True)
    begin = max(first or 1, replay.began + 1)
    stretch = [epoch for epoch in replay.epochs if epoch.number >= begin]
    recorded = past.recorded(begin, replay.epoch)
    found: dict[str, Difference] = {}
    for epoch in stretch:
        if epoch.number in recorded:
            compare(epoch, renewed_outcomes(recorded[epoch.number], replay.engine.program.values), found)
    same_code = replay.codes <= {fingerprint(app).digest}  # other code may write a state in another form
    rewritten = [each.number for each in stretch if same_code and wrote_otherwise(each, recorded.get(each.number))]
    unrecorded = [epoch for epoch in stretch if twice or epoch.number not in recorded]
    if unrecorded:
        again = dict(replay_elsewhere(target, store, first, last))
        for epoch in unrecorded:
            compare(epoch, again.get(epoch.number, []), found)
    result = {
        "epochs": [begin, replay.epoch] if stretch else [],
        "transactions": sum(map(len, stretch)),
        "compared_with_replies": sum(epoch.number in recorded for epoch in stretch),
        "compared_with_a_second_replay": len(unrecorded),
        "other_code": other_code(past, app, replay) if stretch else [],
        "differences": [msgspec.to_builtins(each) for each in found.values()],
        "other_writes": rewritten,
    }
    if as_json:
        print(in_json(result))
    else:
        tell(result, past)
    return not found and not rewritten


def wrote_otherwise(epoch: Epoch, recorded: Epoch | None) -> bool:
    """Did an epoch write something else than what was recorded, as far as that is known?"""
    before = None if recorded is None else recorded.digest
    return is_comparable(before, epoch.digest) and before != epoch.digest


Outcomes = list[tuple[str, str]]  # of an epoch's rows: a digest, and its text


def outcomes_of(epoch: Epoch) -> Outcomes:
    return [outcome_of(epoch.results[row], epoch.failures.get(row)) for row in range(len(epoch))]


def renewed_outcomes(epoch: Epoch, values: Values) -> Outcomes:
    """The same for replies that an older version of the app may have given: fields that they lack are at their
    defaults."""
    found = []
    for row, result in enumerate(epoch.results):
        with suppress(*UNREADABLE):
            result = renew(result, values)
        found.append(outcome_of(result, epoch.failures.get(row)))
    return found


def outcome_of(result: Any, failure: Failure | None) -> tuple[str, str]:
    """The message of a failure is not compared: it may show an object's address."""
    data = encode([result, None if failure is None else (failure.code, failure.type, failure.function, failure.key)])
    text = shown(result) if failure is None else f"an abort ({failure.type}: {failure.message})"
    return hashlib.blake2b(data, digest_size=12).hexdigest(), text


def compare(epoch: Epoch, before: Outcomes, found: dict[str, Difference]) -> None:
    """Keep the first difference of each function, and count them."""
    now = outcomes_of(epoch)
    before = [*before, *[("", "nothing")] * (len(now) - len(before))]
    for row, ((digest, text), (other, was)) in enumerate(zip(now, before, strict=True)):
        if digest == other or row in epoch.decreed or row in epoch.accepted:
            continue
        name = epoch.entries[row].name
        if name in found:
            found[name].count += 1
        else:
            found[name] = Difference(name, epoch.tids[row], epoch.number, shown(epoch.keys[row]), was, text)


def other_code(past: StoreReader, app: App, replay: Replay) -> list[str]:
    """How the code that logged these epochs differs from the code that runs them now."""
    mine, found = fingerprint(app), []
    for digest in sorted(replay.codes - {mine.digest}):
        known = past.known_fingerprint(digest)
        found += [f"code {digest} is not known"] if known is None else known.differences(mine)
    return found


def replay_elsewhere(target: str, store: str, first: int | None, last: int | None) -> Iterator[tuple[int, Outcomes]]:
    """A second replay, in another process with another hash seed: results that depend on either differ."""
    script = f"from headrace.cli.replay import tell_outcomes; tell_outcomes({target!r}, {store!r}, {first!r}, {last!r})"
    seed = OTHER_SEED if os.environ.get("PYTHONHASHSEED") != OTHER_SEED else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            number, outcomes = msgspec.json.decode(line, type=tuple[int, Outcomes])
            yield number, outcomes
    if process.returncode:
        raise Stopped(f"the second replay failed with exit code {process.returncode}")


def tell_outcomes(target: str, store: str, first: int | None, last: int | None) -> None:
    """The body of the second process: prints a line for each epoch."""
    replay = StoreReader(store, load(target)).replay(last, None if first is None else first - 1, is_strict=False)
    for epoch in replay.epochs:
        sys.stdout.buffer.write(msgspec.json.encode((epoch.number, outcomes_of(epoch))) + b"\n")
    sys.stdout.buffer.flush()


def tell(result: dict[str, Any], past: StoreReader) -> None:
    out = Console(highlight=False, soft_wrap=True)
    if not result["epochs"]:
        out.print(f"{past.store.url} has no epoch to replay after its snapshot", markup=False)
        return
    first, last = result["epochs"]
    out.print(
        f"epochs {first} to {last} were replayed: {result['transactions']:,} transactions; "
        f"{result['compared_with_replies']} epochs compared with what was answered, "
        f"{result['compared_with_a_second_replay']} with a second replay",
        markup=False,
    )
    for text in result["other_code"][:SHOWN_MAX]:
        out.print(f"logged by other code: {text}", markup=False, style="yellow")
    for each in result["differences"]:
        out.print(
            f"{each['function']} of {each['key']} (TID {each['tid']}, epoch {each['epoch']}) gave {each['was']}, and "
            f"now gives {each['now']}; {each['count']} such calls in all",
            markup=False,
            style="red",
        )
    for number in result["other_writes"][:SHOWN_MAX]:
        out.print(f"epoch {number} wrote something else than it did", markup=False, style="red")
    good = "every result is the same"
    bad = "some functions depend on more than the log: use ctx.random, ctx.now, ctx.uuid or ctx.call_external in them"
    is_bad = bool(result["differences"] or result["other_writes"])
    out.print(bad if is_bad else good, style="red" if is_bad else "green")


# --- upgrade ----------------------------------------------------------------------------------------------------------


def upgrade_store(target: str, store: str, as_json: bool) -> None:
    """Make a snapshot at the log's end, with the code that wrote the log."""
    app = load(target)
    past = StoreReader(store, app)
    newest = max(
        (each for each in past.snapshots.manifests() if each.is_complete), key=lambda m: m.snapshot_id, default=None
    )
    if newest is not None and newest.epoch == past.last_epoch():
        epoch, is_new = newest.epoch, False
    else:
        with Runtime(app, Config(shards=past.config.shards), store=store) as runtime:
            epoch, is_new = runtime.snapshot()["epoch"], True
    if as_json:
        print(in_json({"epoch": epoch, "is_new": is_new}))
        return
    made = "is a snapshot now" if is_new else "is a snapshot already"
    Console(highlight=False, soft_wrap=True).print(
        f"the end of the log, epoch {epoch}, {made}: start the new code with headrace run ... --store {store}",
        markup=False,
    )
