"""Changed code starts after an upgrade, and a changed state type after a migration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import App, Runtime
from headrace.errors import AppChanged
from tests.operations.stores import Said, crash, refused, unchanged

SHOP = """
    import dataclasses
    from headrace import App

    FEE = 1

    @dataclasses.dataclass
    class Wallet:
        money: int = 0

    app = App("shop")
    wallet = app.operator("wallet", state=Wallet)

    @wallet.register
    def pay_in(ctx, amount: int) -> int:
        found = ctx.get(Wallet())
        found.money += amount - FEE
        ctx.put(found)
        return found.money
"""


@pytest.fixture
def shop(app_of: Callable[[str], tuple[str, App]], tmp_path: Path) -> tuple[str, Path]:
    """The name of the old code, and its store; it crashed after two epochs."""
    target, app = app_of(SHOP)
    runtime = Runtime(app, store=tmp_path / "shop")
    for _ in range(2):
        runtime.client.call("wallet.pay_in", "ada", 11)
    crash(runtime)
    return target, tmp_path / "shop"


def test_changed_code_starts_only_after_an_upgrade(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    target, app = app_of(SHOP.replace("FEE = 1", "FEE = 2"))
    with unchanged(store):
        refused(store, AppChanged, str(store), "function wallet.pay_in changed", "`headrace upgrade`", app=app)
        code, _, complaints = headrace("upgrade", target, "--store", store)  # with the new code: no
        assert code == 2
        assert "with the old code" in complaints
        assert headrace("state", "get", "wallet", "ada", "--store", store, "--app", target)[0] == 2
    code, said, _ = headrace("upgrade", old, "--store", store, "--json")
    assert (code, json.loads(said)) == (0, {"epoch": 2, "is_new": True})
    code, said, _ = headrace("upgrade", old, "--store", store, "--json")
    assert (code, json.loads(said)) == (0, {"epoch": 2, "is_new": False})
    with Runtime(app, store=store) as runtime:
        assert runtime.client.call("wallet.pay_in", "ada", 12) == 30
    with Runtime(app, store=store) as runtime:
        assert runtime.client.call("wallet.pay_in", "ada", 12) == 40


def test_code_that_was_closed_in_peace_may_be_changed_at_once(
    app_of: Callable[[str], tuple[str, App]], tmp_path: Path
) -> None:
    with Runtime(app_of(SHOP)[1], store=tmp_path / "shop") as runtime:
        runtime.client.call("wallet.pay_in", "ada", 11)
    with Runtime(app_of(SHOP.replace("FEE = 1", "FEE = 2"))[1], store=tmp_path / "shop") as runtime:
        assert runtime.client.call("wallet.pay_in", "ada", 12) == 20


WIDER = SHOP.replace("money: int = 0", "money: int = 0\n        owner: str = dataclasses.field(kw_only=True)")
WIDER = WIDER.replace("Wallet()", 'Wallet(owner="nobody")')


def test_a_changed_state_type_needs_a_migration(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    assert headrace("upgrade", old, "--store", store)[0] == 0
    _, wider = app_of(WIDER)
    with unchanged(store):
        refused(store, AppChanged, "'wallet'", "field owner is new and has no default", "migrate=function", app=wider)
    hooked = WIDER.replace(
        "state=Wallet", "state=Wallet, migrate=lambda key, old: Wallet(old['money'] * 100, owner=key)"
    )
    _, with_migration = app_of(hooked)
    for money in (2010, 2020):
        with Runtime(with_migration, store=store) as runtime:
            assert runtime.client.call("wallet.pay_in", "ada", 11) == money
            assert runtime.get("wallet", "ada").owner == "ada"


LARGER = SHOP.replace("money: int = 0", 'money: int = 0\n        owner: str = "nobody"')
LARGER += "    @wallet.register\n    def owner_of(ctx) -> str:\n        return ctx.get().owner\n"
LARGER += "    app.operator('shelf')\n    app.every(3_600, owner_of, 'ada')\n"


def test_what_only_adds_starts_at_once_after_a_crash(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    _, store = shop
    target, larger = app_of(LARGER)
    code, said, _ = headrace("verify", target, "--store", store, "--json")
    assert (code, json.loads(said)["differences"]) == (0, [])
    runtime = Runtime(larger, store=store)
    assert runtime.client.call("wallet.owner_of", "ada") == "nobody"
    assert runtime.client.call("wallet.pay_in", "ada", 11) == 30
    crash(runtime)
    with Runtime(larger, store=store) as runtime:
        assert runtime.get("wallet", "ada").money == 30
    refused(store, AppChanged, "field owner is gone", "migrate=function", app=app_of(SHOP)[1])


def test_a_renamed_field_is_refused_and_the_refusal_says_what_to_write(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    assert headrace("upgrade", old, "--store", store)[0] == 0
    with unchanged(store):
        renamed = app_of(SHOP.replace("money", "cents"))[1]
        refused(store, AppChanged, "field money is gone", "field cents is new", "migrate=function", app=renamed)


def test_an_operator_that_is_gone_needs_a_word(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    assert headrace("upgrade", old, "--store", store)[0] == 0
    _, renamed = app_of(SHOP.replace('operator("wallet"', 'operator("purse"'))
    with unchanged(store):
        refused(store, AppChanged, "1 entities of operator 'wallet'", "migrate", app=renamed)
    _, emptied = app_of(SHOP.replace("state=Wallet", "state=Wallet, migrate=lambda key, old: None"))
    for _ in range(2):
        with Runtime(emptied, store=store) as runtime:
            assert runtime.state("wallet") == {}
    Runtime(renamed, store=store).close()


def test_a_migration_runs_once_also_where_the_type_stays_the_same(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    assert headrace("upgrade", old, "--store", store)[0] == 0
    _, in_cents = app_of(
        SHOP.replace("state=Wallet", "state=Wallet, migrate=lambda key, old: Wallet(old['money'] * 100)")
    )
    for _ in range(2):
        with Runtime(in_cents, store=store) as runtime:
            assert runtime.get("wallet", "ada").money == 2000


def test_time_travel_over_a_migration_needs_the_code_of_its_epoch(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    old, store = shop
    assert headrace("upgrade", old, "--store", store)[0] == 0
    source = WIDER.replace(
        "state=Wallet", "state=Wallet, migrate=lambda key, old: Wallet(old['money'] * 100, owner=key)"
    )
    new, app = app_of(source + "    @wallet.register\n    def look(ctx) -> int:\n        return ctx.get().money\n")
    runtime = Runtime(app, store=store)
    runtime.client.call("wallet.pay_in", "ada", 11)
    runtime.client.call("wallet.look", "ada")
    crash(runtime)

    def money(target: str, epoch: int) -> Any:
        code, said, _ = headrace(
            "state", "get", "wallet", "ada", "--store", store, "--app", target, "--epoch", epoch, "--json"
        )
        return json.loads(said)["state"]["money"] if code == 0 else code

    assert [money(old, epoch) for epoch in (2, 3)] == [2_000, 2]  # refused: other code has logged it
    assert [money(new, epoch) for epoch in (2, 3, 4)] == [2_000, 2_010, 2_010]  # 2 is what 3 began with
    assert headrace("verify", new, "--store", store)[0] == 0
    assert headrace("restore", new, "--store", store, "--epoch", 3, "--into", store.parent / "three")[0] == 0
    with Runtime(app, store=store.parent / "three") as runtime:
        assert runtime.client.call("wallet.look", "ada") == 2010


def test_new_code_can_be_verified_against_the_old_log(
    headrace: Callable[..., Said], app_of: Callable[[str], tuple[str, App]], shop: tuple[str, Path]
) -> None:
    _, store = shop
    same, _ = app_of(SHOP.replace("amount - FEE", "amount - FEE * 1"))
    other, _ = app_of(SHOP.replace("FEE = 1", "FEE = 2"))
    code, said, _ = headrace("verify", same, "--store", store, "--json")
    assert (code, json.loads(said)["other_code"]) == (0, ["function wallet.pay_in changed"])
    code, said, _ = headrace("verify", other, "--store", store, "--json")
    (found,) = json.loads(said)["differences"]
    assert (code, found["function"], found["tid"], found["was"], found["now"]) == (1, "wallet.pay_in", 1, "10", "9")
