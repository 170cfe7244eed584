"""`headrace verify`: functions whose results depend on more than the log are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from headrace import App, Runtime
from tests.operations.stores import BANK, Said, crash, unchanged
from tests.waiting import eventually


def test_functions_that_depend_on_the_log_alone_are_verified(headrace: Callable[..., Said], store: Path) -> None:
    with unchanged(store):
        code, said, _ = headrace("verify", BANK, "--store", store, "--first", 1, "--json")
    found = json.loads(said)
    assert (code, found["differences"], found["epochs"]) == (0, [], [1, 10])
    assert (found["compared_with_replies"], found["compared_with_a_second_replay"]) == (10, 0)
    code, said, _ = headrace("verify", BANK, "--store", store, "--first", 7, "--last", 8, "--twice", "--json")
    found = json.loads(said)
    assert (code, found["epochs"], found["compared_with_a_second_replay"]) == (0, [7, 8], 2)


FICKLE = """
    import itertools
    from headrace import App
    app = App("fickle")
    thing = app.operator("thing")
    counter = itertools.count()

    @thing.register
    def count(ctx) -> int:
        return next(counter)

    @thing.register
    def first_of(ctx) -> str:
        return next(iter({"a", "b", "c", "d", "e", "f", "g", "h"}))

    @thing.register
    def write(ctx) -> None:
        ctx.put(next(counter))

    @thing.register
    def same(ctx) -> int:
        ctx.put(ctx.get(0) + 1)
        return ctx.get()
"""


def test_an_epoch_that_writes_something_else_is_named_though_its_replies_are_the_same(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], tmp_path: Path
) -> None:
    target, app = app_of(FICKLE)
    runtime = Runtime(app, store=tmp_path / "store")
    for name in ("thing.same", "thing.write", "thing.write"):
        runtime.client.call(name, name)
    runtime.client.call("thing.count", "x")
    crash(runtime)
    code, said, _ = headrace("verify", target, "--store", tmp_path / "store", "--json")
    found = json.loads(said)
    assert code == 1
    assert found["other_writes"] == [2, 3]
    assert "epoch 2 wrote something else than it did" in headrace("verify", target, "--store", tmp_path / "store")[1]


def test_a_function_whose_results_differ_from_what_was_answered_is_named(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], tmp_path: Path
) -> None:
    target, app = app_of(FICKLE)
    runtime = Runtime(app, store=tmp_path / "store")
    for _ in range(3):
        runtime.client.call("thing.same", "x")
        runtime.client.call("thing.count", "x")
    crash(runtime)
    code, said, _ = headrace("verify", target, "--store", tmp_path / "store", "--json")
    (found,) = json.loads(said)["differences"]
    assert (code, found["function"], found["tid"], found["count"], found["was"]) == (1, "thing.count", 2, 3, "0")
    assert "thing.count of 'x' (TID 2" in headrace("verify", target, "--store", tmp_path / "store")[1]


OUTSIDE = """
    import itertools
    from headrace import App
    app = App("outside")
    thing = app.operator("thing")
    numbers = itertools.count(100)
    app.external("ask", lambda key, word: [word, next(numbers)])

    @thing.register
    def draw(ctx) -> list:
        ctx.put([ctx.random.random(), ctx.now.isoformat(), str(ctx.uuid())])
        return ctx.get()

    @thing.register
    async def ask(ctx, word: str) -> list:
        ctx.put(await ctx.call_external("ask", word))
        return ctx.get()

    @thing.register
    def later(ctx) -> str:
        return ctx.call_later(0.001, draw, f"{ctx.key} later")
"""


def test_what_comes_from_chance_time_and_outside_is_the_same_in_a_replay(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], tmp_path: Path
) -> None:
    target, app = app_of(OUTSIDE)
    runtime = Runtime(app, store=tmp_path / "store")
    for n in range(5):
        runtime.client.call("thing.draw", f"draw {n}")
        runtime.client.call("thing.ask", f"ask {n}", "word")
        runtime.client.call("thing.later", f"later {n}")
        eventually(lambda n=n: f"later {n} later" in runtime.state("thing"))
    there = runtime.state("thing")
    crash(runtime)
    code, said, _ = headrace("verify", target, "--store", tmp_path / "store", "--first", 1, "--twice", "--json")
    found = json.loads(said)
    assert (code, found["differences"]) == (0, [])
    assert found["compared_with_replies"] == found["compared_with_a_second_replay"] == found["epochs"][1] >= 20
    _, said, _ = headrace("state", "scan", "thing", "--store", tmp_path / "store", "--app", target, "--json")
    rows = [json.loads(line) for line in said.splitlines()]
    assert {row["key"]: row["state"] for row in rows} == there
    assert len(rows) == 15
    code, _, _ = headrace("restore", target, "--store", tmp_path / "store", "--epoch", 9, "--into", tmp_path / "new")
    assert code == 0
    with Runtime(app, store=tmp_path / "new") as runtime:
        assert runtime.get("thing", "ask 0") == there["ask 0"]
        assert runtime.get("thing", "ask 4") is None


def test_where_no_replies_are_kept_two_replays_are_compared(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], tmp_path: Path
) -> None:
    target, app = app_of(FICKLE)
    runtime = Runtime(app, store=tmp_path / "store")
    runtime.client.call("thing.same", "x")
    runtime.client.call("thing.first_of", "x")
    crash(runtime)
    for file in (tmp_path / "store" / "replies").glob("*.seg"):
        file.unlink()
    names = set()
    for _ in range(6):  # the order of a set depends on the hash seed, which is ours by chance
        code, said, _ = headrace("verify", target, "--store", tmp_path / "store", "--json")
        found = json.loads(said)
        assert found["compared_with_a_second_replay"] == 2
        names |= {each["function"] for each in found["differences"]}
        assert code == bool(found["differences"])
    assert names <= {"thing.first_of"}
