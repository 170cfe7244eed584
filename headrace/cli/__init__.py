"""The `headrace` command."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import headrace
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Transactional stateful functions on live data. The log is the serial order.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure the engine on published workloads.", no_args_is_help=True)
app.add_typer(bench, name="bench")

PORT = 8090


class Mode(enum.StrEnum):
    AUTO = "auto"
    SERIAL = "serial"
    ORDERED = "ordered"


def main() -> None:
    try:
        app()
    except HeadraceError as error:
        Console(stderr=True).print(f"[red]{error.code}[/]: {error}", highlight=False)
        sys.exit(2)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"headrace {headrace.__version__}")


@app.command()
def demo(
    transfers: Annotated[int, typer.Option(min=1_000, help="How many transfers to run.")] = 200_000,
) -> None:
    """See it work: a small bank, and a Spark stream of transfers through it. Takes about half a minute."""
    from headrace.cli.demo import run_demo

    run_demo(transfers)


@app.command()
def run(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the app is, as in examples.bank:app.")],
    port: Annotated[int, typer.Option(help="Port to serve HTTP on; 0 takes a free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to bind. There is no authentication: keep it on loopback.")] = (
        "127.0.0.1"
    ),
    workers: Annotated[int, typer.Option(min=1, help="Processes to run it on; 1 runs it in this one.")] = 1,
    mode: Annotated[Mode, typer.Option(help="How several workers run transactions.")] = Mode.AUTO,
) -> None:
    """Run an app and serve it over HTTP."""
    from headrace.cli.serve import serve

    serve(target, host, port, workers, mode.value)


@app.command()
def rescale(
    workers: Annotated[int, typer.Argument(min=1, help="How many there shall be.")],
    url: Annotated[str, typer.Option(help="Where `headrace run` serves.")] = f"http://127.0.0.1:{PORT}",
) -> None:
    """Change the number of workers of a running app, without stopping it. Exit code 2: it was refused."""
    from headrace.cli.serve import post

    status, answer = post(url, "/v1/rescale", {"workers": workers})
    print(json.dumps(answer))
    raise typer.Exit(0 if status == "ok" else 2)


@app.command(context_settings={"ignore_unknown_options": True})
def call(
    function: Annotated[str, typer.Argument(help="Which function, as in account.transfer.")],
    key: Annotated[str, typer.Argument(help="Of which entity.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments: JSON, or text where it is no JSON.")] = None,
    url: Annotated[str, typer.Option(help="Where `headrace run` serves.")] = f"http://127.0.0.1:{PORT}",
    request_id: Annotated[str | None, typer.Option(help="Asked again with the same id, it runs only once.")] = None,
    int_key: Annotated[bool, typer.Option("--int-key", help="The key is a number.")] = False,
) -> None:
    """Call a function of a running app, and print the result. Exit code 1: it aborted; 2: it was refused."""
    from headrace.cli.serve import call as call_at

    if int_key and not key.removeprefix("-").isdecimal():
        raise typer.BadParameter(f"{key!r} is no number", param_hint="KEY")
    status, answer = call_at(url, function, int(key) if int_key else key, args or [], request_id)
    print(json.dumps(answer.get("result") if status == "ok" else answer))
    raise typer.Exit({"ok": 0, "aborted": 1}.get(status, 2))


@app.command()
def doctor(
    install_java: Annotated[bool, typer.Option("--install-java", help="Get a Java if there is none.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Do not start Spark.")] = False,
    port: Annotated[int, typer.Option(help="The port that `headrace run` shall have.")] = PORT,
) -> None:
    """Check Java, Spark, ports and disk: what is wrong, and how to mend it."""
    from headrace.cli.doctor import examine

    raise typer.Exit(0 if examine(install_java, quick, port) else 1)


@app.command()
def sim(
    seed: Annotated[int | None, typer.Option(help="Repeat this one, and tell all about it.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many to run.")] = 100,
    first: Annotated[int, typer.Option(help="The first of them.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0 is one per core.")] = 0,
    trace: Annotated[bool, typer.Option("--trace", help="With --seed: print every effect.")] = False,
    shrink: Annotated[bool, typer.Option("--shrink", help="With --seed: find a smaller run that fails.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Run the engine in a simulated world of faults, from one number each, and check what must hold."""
    from headrace.cli.simulate import sim_many, sim_one

    is_clean = sim_many(first, seeds, jobs, as_json) if seed is None else sim_one(seed, as_json, trace, shrink)
    raise typer.Exit(0 if is_clean else 1)


@bench.command("ycsb")
def bench_ycsb(
    keys: Annotated[int, typer.Option(min=2, help="Accounts.")] = 10_000,
    zipf: Annotated[float, typer.Option(min=0.0, max=0.9999, help="Skew of the creditor; 0 is uniform.")] = 0.0,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes; 1 is the engine in this process.")] = 1,
    transactions: Annotated[int, typer.Option(min=1, help="Transfers per repeat and form.")] = 200_000,
    repeats: Annotated[int, typer.Option(min=1, help="The figures are medians of so many runs.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    save: Annotated[Path | None, typer.Option(help="Also write the JSON, with the machine, to this file.")] = None,
) -> None:
    """YCSB-T: transfers between accounts. One worker against a bare loop over a dict with undo; several against one."""
    from headrace.bench import harness, ycsb

    if workers > 1:
        from headrace.bench import workers as spread

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
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    save: Annotated[Path | None, typer.Option(help="Also write the JSON, with the machine, to this file.")] = None,
) -> None:
    """Where an epoch's time and messages go when it is spread over workers."""
    from headrace.bench import epochs as breakdown
    from headrace.bench import harness

    with harness.progress("epochs", total=breakdown.CASES) as advance:
        result = breakdown.breakdown(keys, epochs, advance)
    finish(result, breakdown.summary(result), as_json, save)


def finish(result: dict[str, Any], summary: Any, as_json: bool, save: Path | None) -> None:
    """What every benchmark prints at its end."""
    from headrace.bench import harness

    if save is not None:
        save.write_text(json.dumps(result | {"machine": harness.machine()}, indent=2) + "\n")
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(summary)
