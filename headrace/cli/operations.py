"""The commands for a store: its log, its snapshots, its state. Most only read, and can be used while the app runs; the
others say what they change."""

from __future__ import annotations

from typing import Annotated

import typer

log = typer.Typer(help="Show, check and repair the log of a store.", no_args_is_help=True)
snapshot = typer.Typer(help="Take and list snapshots.", no_args_is_help=True)
state = typer.Typer(help="Show the state in a store, present or past.", no_args_is_help=True)

Store = Annotated[str, typer.Option("--store", help="A folder, or s3://bucket/prefix.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="The app, as in examples.bank:app.")]
Epoch = Annotated[int | None, typer.Option(min=0, help="The state at the end of this epoch; by default the last one.")]
AppOption = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE:APP", help="The app's code: replays the log up to exactly the epoch."),
]
IntKey = Annotated[bool, typer.Option("--int-key", help="The key is a number.")]


@log.command("show")
def log_show(
    store: Store,
    first: Annotated[int | None, typer.Option(min=1, help="The first record; by default the oldest kept.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="The last record; by default the newest.")] = None,
    calls: Annotated[bool, typer.Option("--calls", help="Show every call, with its key and arguments.")] = False,
    replies: Annotated[bool, typer.Option("--replies", help="Show the replies instead.")] = False,
    as_json: Json = False,
) -> None:
    """Print the records of the log, one line each."""
    from headrace.cli.logs import show_log

    show_log(store, first, last, calls, replies, as_json)


@log.command("verify")
def log_verify(store: Store, as_json: Json = False) -> None:
    """Read all of the log and say whether it is sound. Exit code 1: it is not."""
    from headrace.cli.logs import verify_log

    raise typer.Exit(0 if verify_log(store, as_json) else 1)


@log.command("repair")
def log_repair(
    store: Store,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Cut a log before its first broken record. What follows is lost for the app; it is kept under broken/."""
    from headrace.cli.logs import repair_log

    raise typer.Exit(0 if repair_log(store, yes, as_json) else 1)


@snapshot.command("now")
def snapshot_now(
    url: Annotated[str, typer.Option(help="URL of the running app.")] = "http://127.0.0.1:8090",
) -> None:
    """Have a running app take a snapshot, and wait until it is durable. Exit code 2: it was refused."""
    import json

    from headrace.cli.serve import post

    status, answer = post(url, "/v1/snapshot", "{}")
    print(json.dumps(answer))
    raise typer.Exit(0 if status == "ok" else 2)


@snapshot.command("list")
def snapshot_list(store: Store, as_json: Json = False) -> None:
    """The snapshots in a store, oldest first."""
    from headrace.cli.state_commands import list_snapshots

    list_snapshots(store, as_json)


@snapshot.command("show")
def snapshot_show(
    store: Store,
    epoch: Annotated[int | None, typer.Option(help="The snapshot of this epoch, or the newest before it.")] = None,
    as_json: Json = False,
) -> None:
    """What a snapshot is made of. Reads and checks all of it."""
    from headrace.cli.state_commands import show_snapshot

    show_snapshot(store, epoch, as_json)


@state.command("get", context_settings={"ignore_unknown_options": True})
def state_get(
    operator: Annotated[str, typer.Argument(help="The operator.")],
    key: Annotated[str, typer.Argument(help="The key of the entity.")],
    store: Store,
    app: AppOption = None,
    epoch: Epoch = None,
    int_key: IntKey = False,
    as_json: Json = False,
) -> None:
    """Print the state of one entity. Exit code 1: it has none."""
    from headrace.cli.state_commands import get_state

    if int_key and not key.removeprefix("-").isdecimal():
        raise typer.BadParameter(f"{key!r} is not a number", param_hint="KEY")
    is_there = get_state(store, app, epoch, operator, int(key) if int_key else key, as_json)
    raise typer.Exit(0 if is_there else 1)


@state.command("scan")
def state_scan(
    operator: Annotated[str, typer.Argument(help="The operator.")],
    store: Store,
    app: AppOption = None,
    epoch: Epoch = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Show at most this many entities.")] = None,
    as_json: Json = False,
) -> None:
    """Print the state of all entities of an operator, by key."""
    from headrace.cli.state_commands import scan_state

    scan_state(store, app, epoch, operator, limit, as_json)


def restore(
    target: Target,
    store: Store,
    epoch: Annotated[int, typer.Option(min=0, help="The last epoch to include.")],
    into: Annotated[str, typer.Option(help="Where to make the new store: an empty or new folder, or s3://...")],
    as_json: Json = False,
) -> None:
    """Time travel: make a new store that goes on from the end of an epoch. The old one is left as it is."""
    from headrace.cli.replay import restore_into

    restore_into(target, store, epoch, into, as_json)


def verify(
    target: Target,
    store: Store,
    first: Annotated[
        int | None, typer.Option(min=1, help="The first epoch; by default after the newest snapshot.")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="The last epoch; by default the log's last.")] = None,
    twice: Annotated[bool, typer.Option("--twice", help="Also compare two replays with each other.")] = False,
    as_json: Json = False,
) -> None:
    """Run a stretch of the log again and compare with what was answered. Exit code 1: functions gave other results."""
    from headrace.cli.replay import verify_stretch

    raise typer.Exit(0 if verify_stretch(target, store, first, last, twice, as_json) else 1)


def upgrade(target: Target, store: Store, as_json: Json = False) -> None:
    """Before new code: with the old code, make a snapshot at the log's end. Stop the app first."""
    from headrace.cli.replay import upgrade_store

    upgrade_store(target, store, as_json)
