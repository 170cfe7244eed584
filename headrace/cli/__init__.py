"""The `headrace` command."""

from __future__ import annotations

import enum
import json
import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import headrace
from headrace.cli import benches, operations
from headrace.config import Config
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Transactional stateful functions on live data. The log is the serial order.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(benches.bench, name="bench")
for group, name in ((operations.log, "log"), (operations.snapshot, "snapshot"), (operations.state, "state")):
    app.add_typer(group, name=name)

PORT = 8090


class Mode(enum.StrEnum):
    AUTO = "auto"
    SERIAL = "serial"
    ORDERED = "ordered"


def main() -> None:
    """The entry point of the `headrace` command. An error of ours is printed in one line."""
    if any(argument.partition("=")[0] == "--store" for argument in sys.orig_argv):
        fix_hashes()
    try:
        app()
    except HeadraceError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]{error.code}[/]: {escape(str(error))}")
        sys.exit(2)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"headrace {headrace.__version__}")


@app.command()
def demo(
    calls: Annotated[int, typer.Option(min=1_000, help="The least number of transfers and bookings to run.")] = 200_000,
) -> None:
    """See it work: a Spark stream of transfers and bookings, SQL over what they change. Takes about a minute."""
    from headrace.cli.demo import run_demo

    run_demo(calls)


@app.command()
def run(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The app, as in examples.bank:app.")],
    port: Annotated[int, typer.Option(help="Port to serve HTTP on; 0 takes a free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to bind. There is no authentication: keep it on loopback.")] = (
        "127.0.0.1"
    ),
    workers: Annotated[
        int, typer.Option(min=1, help="Number of worker processes; 1 runs the app in this process.")
    ] = 1,
    mode: Annotated[Mode, typer.Option(help="How several workers run transactions.")] = Mode.AUTO,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where to keep the log and snapshots: a folder, or s3://bucket/prefix. By default, in memory only."
        ),
    ] = None,
    kafka: Annotated[
        str | None, typer.Option(help="Also serve requests from these Kafka brokers, as in broker:9092.")
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(help="With --kafka: comma-separated topics to read requests from; by default requests."),
    ] = None,
    replies: Annotated[
        str | None, typer.Option(help="With --kafka: the topic to write replies to; by default replies.")
    ] = None,
    kafka_config: Annotated[
        str | None,
        typer.Option(help="With --kafka: a properties file for Kafka's clients, for security settings and the like."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="With --kafka: folder for Spark's checkpoint; by default in the store.")
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="A Spark cluster that hosts the workers, as in spark://host:7077.")
    ] = None,
    conf: Annotated[
        list[str] | None, typer.Option(help="A Spark setting, as in spark.cores.max=8; may be repeated.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run every transaction twice; those that are not deterministic abort and are named."
        ),
    ] = False,
    accept_logged: Annotated[
        bool,
        typer.Option(
            "--accept-logged",
            help="Start although functions give other replies than before the crash, if they write the same.",
        ),
    ] = False,
    wall_limit: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Seconds after which a function that has not returned is stopped.")
    ] = 10.0,
) -> None:
    """Run an app and serve it over HTTP; with --kafka also to Kafka's topics, with --master on a Spark cluster."""
    from headrace.cli.serve import FromKafka, OnSpark, serve

    if kafka is None and any(each is not None for each in (requests, replies, kafka_config, checkpoint)):
        raise typer.BadParameter(
            "--requests, --replies, --kafka-config and --checkpoint need --kafka", param_hint="--kafka"
        )
    source = None
    if kafka is not None:
        source = FromKafka(
            kafka,
            "requests" if requests is None else requests,
            "replies" if replies is None else replies,
            kafka_config,
            checkpoint,
        )
    if conf and master is None:
        raise typer.BadParameter("--conf needs --master", param_hint="--conf")
    on = None if master is None else OnSpark.parse(master, conf or [])
    if check and (workers > 1 or mode is Mode.ORDERED or master is not None):
        raise typer.BadParameter(
            "a check runs in one process: leave out --workers, --mode and --master. Whether a function is "
            "deterministic does not depend on the number of workers",
            param_hint="--check",
        )
    if accept_logged and store is None:
        raise typer.BadParameter("there are logged replies in a store only: add --store", param_hint="--accept-logged")
    config = Config(wall_limit_us=round(wall_limit * 1e6))
    serve(target, host, port, workers, mode.value, store, source, on, config, check=check, accept_logged=accept_logged)


def fix_hashes() -> None:
    """Start this process again with the hash seed of the workers, so that sets have the same order when a log is
    replayed."""
    if sys.flags.hash_randomization:
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONHASHSEED": "0"})


@app.command()
def rescale(
    workers: Annotated[int, typer.Argument(min=1, help="The new number of workers.")],
    url: Annotated[str, typer.Option(help="URL of the running app.")] = f"http://127.0.0.1:{PORT}",
) -> None:
    """Change the number of workers of a running app, without stopping it. Exit code 2: it was refused."""
    from headrace.cli.serve import post

    status, answer = post(url, "/v1/rescale", f'{{"workers": {workers}}}')
    print(json.dumps(answer))
    raise typer.Exit(0 if status == "ok" else 2)


@app.command(context_settings={"ignore_unknown_options": True})
def call(
    function: Annotated[str, typer.Argument(help="The function, as in account.transfer.")],
    key: Annotated[str, typer.Argument(help="The key of the entity.")],
    args: Annotated[
        list[str] | None,
        typer.Argument(help="The arguments, or name=argument: JSON, or plain text if it is not valid JSON."),
    ] = None,
    url: Annotated[str, typer.Option(help="URL of the running app.")] = f"http://127.0.0.1:{PORT}",
    request_id: Annotated[
        str | None, typer.Option(help="A call that is repeated with the same id runs only once.")
    ] = None,
    int_key: Annotated[bool, typer.Option("--int-key", help="The key is a number.")] = False,
) -> None:
    """Call a function of a running app, and print the result. Exit code 1: it aborted; 2: it was refused."""
    from headrace.cli.serve import call as call_at

    if int_key and not key.removeprefix("-").isdecimal():
        raise typer.BadParameter(f"{key!r} is not a number", param_hint="KEY")
    status, answer = call_at(url, function, int(key) if int_key else key, args or [], request_id)
    print(json.dumps(answer.get("result") if status == "ok" else answer))
    raise typer.Exit({"ok": 0, "aborted": 1}.get(status, 2))


@app.command()
def doctor(
    install_java: Annotated[bool, typer.Option("--install-java", help="Install a Java if there is none.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Do not start Spark.")] = False,
    port: Annotated[int, typer.Option(help="The port that `headrace run` will use.")] = PORT,
    install_kafka: Annotated[
        bool, typer.Option("--install-kafka", help="Install Spark's Kafka connector if it is missing.")
    ] = False,
    warm: Annotated[bool, typer.Option("--warm", help="Make Spark start in 60% of the time from now on.")] = False,
) -> None:
    """Check Java, Spark, Kafka's connector, ports and disk: what is wrong, and how to mend it."""
    from headrace.cli.doctor import examine

    raise typer.Exit(0 if examine(install_java, quick, port, install_kafka, warm) else 1)


@app.command()
def sim(
    seed: Annotated[int | None, typer.Option(help="Run only this seed, and show all details.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds to run.")] = 100,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Number of processes; 0 is one per core.")] = 0,
    programs: Annotated[
        bool, typer.Option("--programs", help="Run only large random programs on workers, without faults.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="With --programs: how long to run.")] = 60,
    trace: Annotated[bool, typer.Option("--trace", help="With --seed: print every effect.")] = False,
    shrink: Annotated[bool, typer.Option("--shrink", help="With --seed: find a smaller run that fails.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    app: Annotated[
        str | None, typer.Option(metavar="MODULE:APP", help="Run this app instead, with calls drawn from annotations.")
    ] = None,
    calls: Annotated[
        str | None,
        typer.Option(metavar="MODULE:STRATEGY", help="With --app: a Hypothesis strategy, or a function, of calls."),
    ] = None,
    invariant: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:FUNCTION", help="With --app: what must always hold; may be repeated."),
    ] = None,
) -> None:
    """Run the engine, or your app, in a simulated world of faults, from one number each, and check what must hold."""
    from headrace.cli.random_programs import programs_many, programs_one
    from headrace.cli.simulate import sim_many, sim_one

    if app is None and (calls is not None or invariant):
        raise typer.BadParameter("--calls and --invariant need --app", param_hint="--app")
    if app is not None:
        from headrace.cli.simulate_app import AppTargets, sim_app

        if programs or trace or shrink:
            raise typer.BadParameter("--app takes no --programs, --trace or --shrink: it always shrinks")
        targets = AppTargets(app, calls, invariant or [])
        raise typer.Exit(0 if sim_app(targets, seed, first, seeds, jobs, as_json) else 1)
    if programs:
        one, many = seed is not None, (first, seconds, jobs, as_json)
        raise typer.Exit(0 if (programs_one(seed or 0, as_json, shrink) if one else programs_many(*many)) else 1)
    is_clean = sim_many(first, seeds, jobs, as_json) if seed is None else sim_one(seed, as_json, trace, shrink)
    raise typer.Exit(0 if is_clean else 1)


@app.command()
def chaos(
    seconds: Annotated[float, typer.Option(min=1, help="How long to inject faults.")] = 60,
    seed: Annotated[int | None, typer.Option(help="Seed of the faults; their timing still varies.")] = None,
    workers: Annotated[int, typer.Option(min=2, help="Worker processes.")] = 2,
    store: Annotated[
        str | None, typer.Option(help="An empty folder or s3://...; by default a temporary folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Kill and pause the processes of a real Headrace while clients work, then check what they were told."""
    from headrace.cli.chaos import run_chaos

    raise typer.Exit(0 if run_chaos(seconds, seed, workers, store, as_json) else 1)


for command in (operations.restore, operations.verify, operations.upgrade):
    app.command()(command)
