"""The fingerprint of an app: what changes it, what does not, and what its differences say."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from headrace import App
from headrace.model.fingerprint import Fingerprint, fingerprint, needs_migration

ROOT = Path(__file__).parent.parent.parent
BANK = '''
    """A bank."""
    from __future__ import annotations

    import dataclasses
    import enum
    import functools
    import msgspec
    from headrace import Abort, App

    FEE = 2
    PRICES = {"a": 1, "b": [2, 3]}
    SEEN = []
    RULES = (len, lambda x: x + 1, lambda x: x + 2)


    class Kind(enum.Enum):
        PLAIN = 1
        GOLD = 2


    class Rates:
        base = 3

        def rate(self, kind):
            return self.base * factor(kind)


    RATES = Rates()


    def factor(kind):
        return 2 if kind is Kind.GOLD else 1


    @functools.lru_cache
    def slowly(x):
        return x * 2


    @dataclasses.dataclass
    class Account:
        owner: str
        balance: int = 0

        def is_rich(self) -> bool:
            return self.balance > 1_000


    class Note(msgspec.Struct):
        text: str
        at: int | None = None


    app = App("bank")
    account = app.operator("account", state=Account)
    counter = app.operator("counter", combine=lambda a, b: a + b, partition_by=lambda key: key[:1])


    @account.register
    def deposit(ctx, amount: int, note: Note | None = None) -> int:
        """Pay in."""
        found = ctx.get(Account("nobody"))
        found.balance += amount - fee(amount)
        ctx.put(found)
        return found.balance


    def fee(amount):
        return min(FEE, limit(amount))


    def limit(amount, share=10):
        return amount // share if amount > 1 else fee(2)


    @account.register
    async def price(ctx, what: str) -> int:
        SEEN.append(what)
        await ctx.call(deposit, "bank", 1)
        return PRICES[what] + RATES.rate(Kind.PLAIN) + slowly(2) + RULES[1](3)


    @counter.register
    def count(ctx) -> None:
        ctx.merge(1)
'''


@pytest.fixture
def app_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., App]]:
    """Makes apps from source: each in a folder and a module of its own."""
    numbers, known = itertools.count(1), set(sys.modules)

    def make(source: str, name: str = "", **others: str) -> App:
        folder = tmp_path / f"version_{next(numbers)}"
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))
        name = name or f"app_{folder.name}"
        for module, text in {name: source, **others}.items():
            sys.modules.pop(module, None)
            path = folder / f"{module.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        app = importlib.import_module(name).app
        assert isinstance(app, App)
        return app

    yield make
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture
def changed(app_of: Callable[..., App]) -> Callable[..., list[str]]:
    """The differences that an edit of the bank makes."""

    def differences(*edits: tuple[str, str]) -> list[str]:
        source = BANK
        for old, new in edits:
            assert old in source
            source = source.replace(old, new)
        before, after = fingerprint(app_of(BANK)), fingerprint(app_of(source))
        assert (before.digest == after.digest) == (before == after)
        found = before.differences(after)
        assert bool(found) == (before != after)
        return found

    return differences


# --- what does not change it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    [
        ("FEE = 2", "\n\n\n    FEE = 2  # for us"),
        ('"""Pay in."""', '"""Pay money in: another docstring."""'),
        ('"""Pay in."""\n', "\n"),
        ("found.balance += amount - fee(amount)", "(found.balance) += (\n            amount - fee( amount))"),
        ('app = App("bank")', 'UNUSED = 7\n\n    def unused():\n        return UNUSED\n\n    app = App("bank")'),
        ("FEE = 2", "FEE = 1 + 1"),
        ('"""A bank."""', ""),
        ("int | None = None", "None | int = None"),
    ],
    ids=range(8),
)
def test_what_changes_no_result_changes_no_fingerprint(
    changed: Callable[..., list[str]], edit: tuple[str, str]
) -> None:
    assert changed(edit) == []


def test_a_fingerprint_is_the_same_in_every_process_and_under_every_hash_seed() -> None:
    script = (
        "from headrace.model.fingerprint import fingerprint;"
        "import examples.shopping_cart as c, headrace.cli.travel as b;"
        "print(fingerprint(c.app).digest, fingerprint(b.app).digest)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(said) == 1
    from examples import shopping_cart

    assert said.pop().split()[0] == fingerprint(shopping_cart.app).digest


def test_what_is_in_a_list_that_functions_change_does_not_count(app_of: Callable[..., App]) -> None:
    app = app_of(BANK, "with_a_list")
    before = fingerprint(app)
    sys.modules["with_a_list"].SEEN.append("more")
    sys.modules["with_a_list"].slowly(3)
    assert fingerprint(app) == before


def test_the_name_of_the_module_does_not_count(app_of: Callable[..., App], tmp_path: Path) -> None:
    app = fingerprint(app_of(BANK, "one_name"))
    assert fingerprint(app_of(BANK, "package.other_name")) == app
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(BANK) + "\nfrom headrace.model.fingerprint import fingerprint\nprint(fingerprint(app).digest)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == app.digest


def test_an_app_is_the_same_imported_and_run_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "common.py").write_text("def double(x): return 2 * x\nRATES = [1, 2]\n")
    (tmp_path / "shop" / "helpers.py").write_text("from common import double\ndef more(x): return double(x) + 1\n")
    (tmp_path / "shop" / "app.py").write_text(
        "from headrace import App\nfrom headrace.model.fingerprint import fingerprint\n"
        "from common import RATES, double\nfrom shop.helpers import more\n"
        "app = App('shop')\nop = app.operator('op')\n"
        "@op.register\ndef act(ctx, x: int) -> int:\n    return double(x) + more(x) + RATES[0]\n"
        "print(fingerprint(app).digest)\n"
    )
    said = {
        subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for words in (["-m", "shop.app"], ["-c", "import shop.app"])
    }
    assert len(said) == 1


def test_an_app_that_is_made_in_a_function_has_a_fingerprint_of_its_own() -> None:
    def make(step: int, seen: list[int]) -> App:
        app = App("inner")
        thing = app.operator("thing")

        def helper(x: int) -> int:
            return x + step

        @thing.register
        def act(ctx, amount: int) -> int:  # type: ignore[no-untyped-def]
            seen.append(amount)
            return helper(amount)

        return app

    assert fingerprint(make(1, [])) == fingerprint(make(1, [2]))
    assert fingerprint(make(1, [])).differences(fingerprint(make(2, []))) == ["function thing.act changed"]


def test_a_fingerprint_comes_back_from_json_and_msgpack(app_of: Callable[..., App]) -> None:
    found = fingerprint(app_of(BANK))
    assert Fingerprint.from_plain(json.loads(json.dumps(found.plain()))) == found
    assert Fingerprint.from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(found.plain()))) == found


# --- what does --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (("found.balance += amount", "found.balance += 2 * amount"), ["function account.deposit changed"]),
        (("FEE = 2", "FEE = 3"), ["function account.deposit changed"]),
        (("return min(FEE", "return max(FEE"), ["function account.deposit changed"]),
        (("share=10", "share=11"), ["function account.deposit changed"]),
        (("if amount > 1 else", "if amount > 2 else"), ["function account.deposit changed"]),
        (('"b": [2, 3]', '"b": [2, 4]'), ["function account.price changed"]),
        (("base = 3", "base = 4"), ["function account.price changed"]),
        (("return 2 if kind", "return 5 if kind"), ["function account.price changed"]),
        (("GOLD = 2", "GOLD = 9"), ["function account.price changed"]),
        (("return x * 2", "return x * 3"), ["function account.price changed"]),
        (("lambda x: x + 2)", "lambda x: x + 3)"), ["function account.price changed"]),
        (("lambda x: x + 1,", "lambda x: x + 9,"), ["function account.price changed"]),
        (("(len, ", "(abs, "), ["function account.price changed"]),
        (('"bank", 1)', '"bank", 2)'), ["function account.price changed"]),
        (("def deposit(ctx, amount: int,", "def deposit(ctx, amount: float,"), ["function account.deposit changed"]),
        (("def count(", "def tally("), ["function counter.count is gone", "function counter.tally is new"]),
        (("a + b", "a - b"), ["operator counter: combine changed"]),
        (("key[:1]", "key[:2]"), ["operator counter: partition_by changed"]),
        ((", partition_by=lambda key: key[:1]", ""), ["operator counter: partition_by is gone"]),
        (
            ("state=Account", "state=app.record(Account) and None"),
            ["operator account: state is not declared, it was Account"],
        ),
        (("owner: str\n", "owner: str\n        limit: int\n"), ["type Account: field limit is new and has no default"]),
        (
            ("owner: str\n        balance: int = 0", "owner: str\n        limit: int = 1\n        balance: int = 0"),
            ["type Account: field limit is new, and not after the fields that were there"],
        ),
        (("balance: int = 0\n", "balance: int = 0\n        limit: int = 1\n"), ["type Account: field limit is new"]),
        (("owner: str\n", "owner: bytes\n"), ["type Account: field owner is bytes, it was str"]),
        (
            ("text: str\n", "words: str\n"),
            ["type Note: field text is gone", "type Note: field words is new and has no default"],
        ),
        (("> 1_000", "> 2_000"), ["type Account: its code changed"]),
        (("balance: int = 0", "balance: int = 1"), ["type Account: field balance: its default changed"]),
        (("balance: int = 0", "balance: int"), ["type Account: field balance: its default changed"]),
        (("text: str\n", "text: str = ''\n"), ["type Note: field text: its default changed"]),
        (('App("bank")', 'App("shop")'), ["the app is shop, it was bank"]),
    ],
    ids=itertools.count(),
)
def test_a_change_is_found_and_named(
    changed: Callable[..., list[str]], edit: tuple[str, str], found: list[str]
) -> None:
    assert changed(edit) == found


def test_fields_in_another_order_are_another_type(changed: Callable[..., list[str]]) -> None:
    found = changed(("text: str\n        at: int | None = None", "at: int | None = None\n        text: str = 'x'"))
    assert "type Note: its fields are in another order" in found


def test_an_operator_that_is_gone_is_named(changed: Callable[..., list[str]]) -> None:
    found = changed(('app.operator("counter"', 'app.operator("number"'))
    assert found[:2] == ["operator counter is gone", "operator number is new"]
    assert "function counter.count is gone" in found


def test_helpers_in_other_modules_of_the_app_count_and_libraries_do_not(app_of: Callable[..., App]) -> None:
    source = """
        from headrace import App
        import json
        from {helpers} import double, LIMITS
        import {helpers} as h
        app = App("two")
        thing = app.operator("thing")
        @thing.register
        def act(ctx, x: int) -> int:
            return json.loads("1") + double(x) + LIMITS["x"] + h.triple(x)
    """
    helpers = """
        from {deeper} import LIMITS
        def double(x): return 2 * x
        def triple(x): return 3 * x
        def other(x): return 4 * x
    """
    numbers = itertools.count()

    def made(*edits: tuple[str, str]) -> Fingerprint:
        n = next(numbers)
        names = {"helpers": f"helpers_{n}", "deeper": f"deeper_{n}"}
        texts = [text.format(**names) for text in (source, helpers, "LIMITS = {{'x': 1}}\nOTHERS = []")]
        for old, new in edits:
            texts = [text.replace(old, new) for text in texts]
        return fingerprint(app_of(texts[0], f"two_{n}", **{names["helpers"]: texts[1], names["deeper"]: texts[2]}))

    # The names of the modules stand in the source of the imports only, not in that of the function.
    base = made()
    assert made(("4 * x", "5 * x"), ("OTHERS = []", "OTHERS = [1]")) == base
    for edit in (("2 * x", "2.5 * x"), ("'x': 1", "'x': 2"), ("3 * x", "3.5 * x")):
        assert base.differences(made(edit)) == ["function thing.act changed"], edit


def test_a_function_without_source_is_known_by_its_code() -> None:
    def made(text: str) -> Fingerprint:
        scope: dict[str, object] = {"__name__": "no_such_module"}
        exec(  # noqa: S102 the point: code that has no source
            "from headrace import App\napp = App('made')\nop = app.operator('op')\n"
            f"def helper(x): return {text}\n@op.register\ndef act(ctx, x: int) -> int:\n    return helper(x)",
            scope,
        )
        app = scope["app"]
        assert isinstance(app, App)
        return fingerprint(app)

    assert made("x in {1, 2, 'a', 'b'}") == made("x in {1, 2, 'a', 'b'}")
    assert made("x + 1").differences(made("x + 2")) == ["function op.act changed"]


def test_a_wrapper_around_a_function_counts(app_of: Callable[..., App]) -> None:
    source = """
        import functools
        from headrace import App
        app = App("wrapped")
        op = app.operator("op")
        def twice(function):
            @functools.wraps(function)
            def wrapper(ctx, x: int) -> int:
                return 2 * function(ctx, x)
            return wrapper
        @op.register
        @twice
        def act(ctx, x: int) -> int:
            return x
    """
    base = fingerprint(app_of(source))
    assert base == fingerprint(app_of(source))
    for edit in (("2 * function", "3 * function"), ("return x\n", "return x + 1\n")):
        assert base.differences(fingerprint(app_of(source.replace(*edit)))) == ["function op.act changed"], edit


# --- what the state can bear ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "operators"),
    [
        (("FEE = 2", "FEE = 3"), []),
        (
            (
                "def count(ctx) -> None:",
                "def more(ctx) -> None:\n        pass\n\n    @counter.register\n    def count(ctx) -> None:",
            ),
            [],
        ),
        (("a + b", "a - b"), []),
        (("> 1_000", "> 2_000"), []),
        (("owner: str\n", "owner: str\n        limit: int\n"), ["account", "counter"]),
        (("text: str\n", "words: str\n"), ["counter"]),  # its state is not declared: it may hold a Note
        (("state=Account", "state=dict[str, Account]"), ["account"]),
        (('app.operator("counter"', 'app.operator("number"'), ["counter"]),
        (("state=Account", "state=app.record(Account) and None"), []),
        (("state=Account", "state=Account, migrate=lambda key, old: old"), ["account"]),
        ((", state=Account", ""), ["account", "counter"]),
    ],
    ids=itertools.count(),
)
def test_what_needs_a_migration_is_said(
    app_of: Callable[..., App], edit: tuple[str, str], operators: list[str]
) -> None:
    old, new = fingerprint(app_of(BANK)), fingerprint(app_of(BANK.replace(*edit)))
    assert old != new
    assert needs_migration(old, new) == operators
    assert needs_migration(old, old) == []


def test_a_schedule_is_a_part_of_it() -> None:
    def made(*schedules: tuple[object, int]) -> Fingerprint:
        app = App("timed")
        op = app.operator("op")

        @op.register
        def act(ctx, n: int) -> None:  # type: ignore[no-untyped-def]
            pass

        for n, (when, amount) in enumerate(schedules):
            app.options(name=f"s{n}").every(when, act, "x", amount)  # type: ignore[arg-type]
        return fingerprint(app)

    base = made(("*/5 * * * *", 1))
    assert made(("*/5 * * * *", 1)) == base
    assert base.differences(made(("*/6 * * * *", 1))) == ["schedule s0 changed"]
    assert base.differences(made(("*/5 * * * *", 2))) == ["schedule s0 changed"]
    assert base.differences(made()) == ["schedule s0 is gone"]
    assert needs_migration(base, made()) == []


def test_a_time_to_live_is_a_part_of_it(changed: Callable[..., list[str]]) -> None:
    found = changed(('app.operator("counter", ', 'app.operator("counter", ttl=60, '))
    assert found == ["operator counter: ttl is 60000000 us, it was not declared"]


def test_a_migration_is_wanted_once(app_of: Callable[..., App]) -> None:
    def made(hook: str) -> Fingerprint:
        return fingerprint(app_of(BANK.replace("state=Account", f"state=Account{hook}")))

    without, first, second = made(""), made(", migrate=lambda key, old: old"), made(", migrate=lambda key, old: None")
    assert without.differences(first) == ["operator account: migrate is new"]
    assert needs_migration(without, first) == needs_migration(first, second) == ["account"]
    assert needs_migration(first, first) == needs_migration(first, without) == []
