"""`headrace bench`: each benchmark prints a table, or with --json one line with all figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

bench = typer.Typer(help="Measure the engine on published workloads.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
Save = Annotated[Path | None, typer.Option(help="Also write the JSON, with the machine, to this file.")]
Where = Annotated[Path | None, typer.Option(help="A folder for the store, on the disk to measure.")]


@bench.command("ycsb")
def bench_ycsb(
    keys: Annotated[int, typer.Option(min=2, help="Accounts.")] = 10_000,
    zipf: Annotated[float, typer.Option(min=0.0, max=0.9999, help="Skew of the creditor; 0 is uniform.")] = 0.0,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes; 1 is the engine in this process.")] = 1,
    transactions: Annotated[int, typer.Option(min=1, help="Transfers per repeat and form.")] = 200_000,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the figures are medians.")] = 5,
    durable: Annotated[bool, typer.Option("--durable", help="With a log on disk, compared with memory only.")] = False,
    changes: Annotated[
        bool, typer.Option("--changes", help="With --durable: also log the changes of accounts.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="With --durable and --through: how long latency is measured.")
    ] = 10,
    through: Annotated[
        str | None, typer.Option(help="'spark': send the calls as a stream, and read the replies as a stream.")
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="int, struct, dataclass, decimal or wide: that kind of state against ints.")
    ] = None,
    where: Where = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """YCSB-T: transfers between accounts. One worker against a bare loop over a dict with undo; several against one;
    with a log against memory; as a stream of Spark against a loop in foreachBatch; other states against ints."""
    from headrace.bench import harness, ycsb

    if state is not None:
        from headrace.bench import typed_states

        if state not in typed_states.SHAPES or through is not None or changes:
            raise typer.BadParameter(f"--state takes one of {', '.join(typed_states.SHAPES)}, without --through")
        with harness.progress(f"YCSB-T, {state}", total=transactions * repeats) as advance:
            result = typed_states.compare(state, workers, durable, keys, zipf, transactions, repeats, where, advance)
        finish(result, typed_states.summary(result), as_json, save)
        return
    if through is not None:
        from headrace.bench import through as streamed

        if through != "spark" or zipf or workers > 1:
            raise typer.BadParameter("--through takes only spark, with uniform keys and one worker")
        plan = streamed.Durations(seconds)
        with harness.progress("YCSB-T through Spark", total=plan.total()) as advance:
            result = streamed.through(keys, plan, where, advance)
        finish(result, streamed.summary(result), as_json, save)
        return
    if durable:
        from headrace.bench import durable as kept

        with harness.progress("YCSB-T, durable", total=kept.total(transactions, repeats, seconds)) as advance:
            result = kept.durable(workers, keys, zipf, transactions, repeats, seconds, where, advance, changes)
        finish(result, kept.summary(result), as_json, save)
        return
    if workers > 1:
        from headrace.bench import scaling as spread

        total = repeats * (transactions * len(spread.FORMS) + spread.COSTLY_TRANSFERS)
        with harness.progress("YCSB-T", total=total) as advance:
            result = spread.over_workers(workers, keys, zipf, transactions, repeats, advance)
        finish(result, spread.summary(result), as_json, save)
        return
    with harness.progress("YCSB-T", total=transactions * repeats * len(ycsb.FORMS)) as advance:
        result = ycsb.ycsb(keys, zipf, transactions, repeats, advance)
    finish(result, ycsb.summary(result), as_json, save)


@bench.command("epochs")
def bench_epochs(
    keys: Annotated[int, typer.Option(min=2, help="Accounts.")] = 10_000,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of 1,000 transfers per case.")] = 20,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Where an epoch's time and messages go when it is spread over workers."""
    from headrace.bench import breakdown as breakdown
    from headrace.bench import harness

    with harness.progress("epochs", total=breakdown.CASES) as advance:
        result = breakdown.breakdown(keys, epochs, advance)
    finish(result, breakdown.summary(result), as_json, save)


@bench.command("hot")
def bench_hot(
    workers: Annotated[int, typer.Option(min=2, help="Worker processes.")] = 2,
    calls: Annotated[int, typer.Option(min=1, help="Orders per repeat.")] = 10_000,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the figures are medians.")] = 5,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Orders that take from one hot counter, or a hundred, and abort by what they saw: several workers against one."""
    from headrace.bench import harness
    from headrace.bench import hot as contended

    with harness.progress("hot", total=len(contended.CASES) * (repeats + 1) * calls) as advance:
        result = contended.hot(workers, calls, repeats, advance)
    finish(result, contended.summary(result), as_json, save)


@bench.command("snapshots")
def bench_snapshots(
    entities: Annotated[int, typer.Option(min=2, help="Accounts.")] = 1_000_000,
    zipf: Annotated[float, typer.Option(min=0.0, max=0.9999, help="Skew of the creditor; 0 is uniform.")] = 0.0,
    transactions: Annotated[int, typer.Option(min=1, help="Transfers per repeat and side.")] = 400_000,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the figures are medians.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long latency is measured.")] = 10,
    where: Where = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """What a snapshot every second costs, in throughput and latency, against the same without."""
    from headrace.bench import harness
    from headrace.bench import snapshot_cost as taken

    with harness.progress("snapshots", total=taken.total(entities, transactions, repeats, seconds)) as advance:
        result = taken.measure(entities, zipf, transactions, repeats, seconds, where, advance)
    finish(result, taken.summary(result), as_json, save)


@bench.command("recovery")
def bench_recovery(
    entities: Annotated[int, typer.Option(min=2, help="Accounts, in a snapshot.")] = 1_000_000,
    transactions: Annotated[int, typer.Option(min=1, help="Transfers in the log after it.")] = 100_000,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the figures are medians.")] = 3,
    where: Where = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """How soon a killed app is back in service."""
    from headrace.bench import harness, recovery_time

    with harness.progress("recovery", total=repeats + 1) as advance:
        result = recovery_time.measure(entities, transactions, repeats, where, advance)
    finish(result, recovery_time.summary(result), as_json, save)


@bench.command("tables")
def bench_tables(
    entities: Annotated[int, typer.Option(min=2, help="Accounts.")] = 1_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the figures are medians.")] = 5,
    where: Where = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """How fast Spark loads state in bulk, and reads it as a table."""
    from headrace.bench import bulk_tables, harness

    with harness.progress("tables", total=bulk_tables.total(entities, repeats)) as advance:
        result = bulk_tables.measure(entities, repeats, where, advance)
    finish(result, bulk_tables.summary(result), as_json, save)


@bench.command("http")
def bench_http(
    keys: Annotated[int, typer.Option(min=2, help="Accounts.")] = 10_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each of the three steps takes.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the figures are medians.")] = 3,
    where: Where = None,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Calls over HTTP, to a durable app: rates, latency and the server's CPU time, one by one and in batches."""
    from headrace.bench import harness
    from headrace.bench import http as over_http

    with harness.progress("HTTP", total=repeats) as advance:
        result = over_http.measure(keys, seconds, repeats, where, advance)
    finish(result, over_http.summary(result), as_json, save)


@bench.command("starts")
def bench_starts(
    starts: Annotated[int, typer.Option(min=1, help="How many times to start a cluster.")] = 200,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 3,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """How soon a cluster that says it is up answers its first batch."""
    from headrace.bench import harness
    from headrace.bench import starts as started

    with harness.progress("starts", total=starts) as advance:
        result = started.measure(starts, workers, advance)
    finish(result, started.summary(result), as_json, save)


def finish(result: dict[str, Any], summary: Any, as_json: bool, save: Path | None) -> None:
    """Print the end of every benchmark."""
    from headrace.bench import harness

    if save is not None:
        save.write_text(json.dumps(result | {"machine": harness.machine()}, indent=2) + "\n")
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(summary)
