"""What a migration returns is a value of the declared type, or nothing starts."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import random
import typing
import uuid
from typing import Annotated, Any, Literal

import msgspec
import pytest

from headrace import App, Context
from headrace.core.signature import conforms
from headrace.durability.conversion import checked
from headrace.errors import AppChanged, BadValue
from tests.durability.hand import Hand, memory


@dataclasses.dataclass
class Street:
    name: str
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Address:
    street: Street
    since: datetime.date
    codes: tuple[int, ...] = ()


class Pet(msgspec.Struct):
    kind: Literal["cat", "dog"]
    weight: decimal.Decimal


@dataclasses.dataclass
class Person:
    name: str
    home: Address | None = None
    pets: list[Pet] = dataclasses.field(default_factory=list)
    others: dict[str, Street] = dataclasses.field(default_factory=dict)
    score: float = 0.0


HOME = {"street": {"name": "Elm", "number": 3}, "since": "2020-02-29", "codes": [1, 2]}


@pytest.mark.parametrize(
    ("given", "hint", "wanted"),
    [
        ({"name": "Elm"}, Street, Street("Elm")),
        (
            Person("a", typing.cast(Any, HOME)),
            Person,
            Person("a", Address(Street("Elm", 3), datetime.date(2020, 2, 29), (1, 2))),
        ),
        (
            {"name": "a", "pets": [{"kind": "cat", "weight": "4.50"}]},
            Person,
            Person("a", pets=[Pet("cat", decimal.Decimal("4.50"))]),
        ),
        ({"name": "a", "others": {"x": {"name": "Elm"}}}, Person, Person("a", others={"x": Street("Elm")})),
        ([{"name": "Elm"}], list[Street], [Street("Elm")]),
        ([["a", {"name": "Elm"}]], tuple[tuple[str, Street], ...], (("a", Street("Elm")),)),
        ("2020-02-29", datetime.date | None, datetime.date(2020, 2, 29)),
        (None, datetime.date | None, None),
        ("12345678-1234-5678-1234-567812345678", uuid.UUID, uuid.UUID("12345678-1234-5678-1234-567812345678")),
        ({"name": "Elm"}, Street | Pet, Street("Elm")),
        ({"name": "Elm"}, Any, {"name": "Elm"}),
        (5, Annotated[int, msgspec.Meta(ge=1)], 5),
        (3, float, 3),
        (Street("Elm"), Street | Address | None, Street("Elm")),
        (HOME, Street | Address | None, Address(Street("Elm", 3), datetime.date(2020, 2, 29), (1, 2))),
        ([{"x": object}], list[object], [{"x": object}]),
    ],
)
def test_what_can_be_converted_without_loss_is(given: Any, hint: Any, wanted: Any) -> None:
    made = checked(given, hint)
    assert (made, type(made)) == (wanted, type(wanted))
    assert checked(made, hint) is made, "what is right stays as it is"


@pytest.mark.parametrize(
    ("given", "hint", "words"),
    [
        ({"name": 5}, Street, r"name must be str, but is 5 \(int\)"),
        (Person("a", typing.cast(Any, {**HOME, "since": 7})), Person, r"home must be .*Address"),
        (
            Address(typing.cast(Any, {"name": "x", "number": "7"}), datetime.date(2020, 1, 1)),
            Address,
            r"street\.number must be int, but is '7' \(str\)",
        ),
        (
            Person("a", pets=typing.cast(Any, [{"kind": "cow", "weight": "1"}])),
            Person,
            r"pets\[0\]\.kind must be .*'cow'",
        ),
        ({"name": "x", "house": 7}, Street, "the state has the field 'house', which Street does not have"),
        ({"number": 7}, Street, "the state lacks the field 'name' of Street"),
        ({"name": "a", "others": {"x": {}}}, Person, r"others\['x'\] lacks the field 'name'"),
        ("Elm", Street, r"the state must be Street, but is 'Elm' \(str\)"),
        (None, Street, r"the state must be Street, but is None"),
        (True, int, r"the state must be int, but is True \(bool\)"),
        (1.0, int, "the state must be int"),
        ((1, 2, 3), tuple[int, int], "must have 2 parts, but has 3"),
        (0, Annotated[int, msgspec.Meta(ge=1)], "the state must be"),
        ({}, Street | Pet, "the state must be"),
    ],
)
def test_what_cannot_is_refused_by_name(given: Any, hint: Any, words: str) -> None:
    with pytest.raises(BadValue, match=words):
        checked(given, hint)


SCALARS = (int, float, str, bool, bytes, datetime.date, decimal.Decimal, uuid.UUID)


def draw(rng: random.Random, hint: Any) -> Any:
    """A value of this type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return typing.cast(Any, hint)(*(draw(rng, hints[each.name]) for each in dataclasses.fields(hint)))
    if origin is list:
        return [draw(rng, parts[0]) for _ in range(rng.randint(0, 3))]
    if origin is tuple:
        return tuple(draw(rng, part) for part in parts)
    if origin is dict:
        return {f"k{at}": draw(rng, parts[1]) for at in range(rng.randint(0, 3))}
    if origin is not None:
        return None if rng.random() < 0.3 else draw(rng, parts[0])
    n = rng.randint(-9, 9)
    return {
        int: n,
        float: n / 4,
        str: f"s{n}",
        bool: n > 0,
        bytes: bytes([n + 9]),
        datetime.date: datetime.date(2020, 1, 10 + n),
        decimal.Decimal: decimal.Decimal(n) / 8,
        uuid.UUID: uuid.UUID(int=n + 9),
    }[hint]


def draw_hint(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6) if depth < 4 else 5
    if kind == 0:
        fields = [(f"f{at}", draw_hint(rng, depth + 1)) for at in range(rng.randint(1, 3))]
        return dataclasses.make_dataclass(f"R{rng.randrange(1 << 30)}", fields)
    if kind == 1:
        return list[draw_hint(rng, depth + 1)]  # type: ignore[misc]
    if kind == 2:
        return tuple[draw_hint(rng, depth + 1), draw_hint(rng, depth + 1)]  # type: ignore[misc]
    if kind == 3:
        return dict[str, draw_hint(rng, depth + 1)]  # type: ignore[misc]
    if kind == 4:
        return typing.Optional[draw_hint(rng, depth + 1)]  # noqa: UP045
    return rng.choice(SCALARS)


def test_whatever_loses_its_types_gets_them_back_and_is_never_something_else() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        hint = draw_hint(rng)
        value = draw(rng, hint)
        assert checked(value, hint) is value
        loose = msgspec.to_builtins(value, builtin_types=(bytes,))
        found = checked(loose, hint)
        assert found == value, (seed, hint, value, found)
        assert type(found) is type(value)
        other = draw(rng, draw_hint(rng))
        try:
            made = checked(other, hint)
        except BadValue:
            continue
        assert conforms(made, hint), (seed, hint, other, made)


# --- in a migration ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class OldPerson:
    name: str
    street: Street


def people(state: Any, migrate: Any = None) -> App:
    app = App("people")
    person = app.operator("person", state=state, migrate=migrate)

    if state is OldPerson:

        @person.register
        def move(ctx: Context, street: str) -> None:
            ctx.put(OldPerson(str(ctx.key), Street(street, 1)))

    else:

        @person.register
        def street(ctx: Context) -> str | None:
            return ctx.get().home.street.name if ctx.get().home else None

    return app


def settled(key: Any, old: dict[str, Any]) -> Any:
    """Of the old state, a nested record that is passed on as it came."""
    return Person(old["name"], Address(old["street"], datetime.date(2020, 1, 1)))


def as_dict(key: Any, old: dict[str, Any]) -> Any:
    return {"name": old["name"], "home": {"street": old["street"], "since": "2020-01-01"}}


def wrong(key: Any, old: dict[str, Any]) -> Any:
    return Person(old["name"], typing.cast(Any, old["street"]))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("migrate", [settled, as_dict])
def test_nested_records_come_back_from_a_migration_as_records(migrate: Any, workers: int) -> None:
    store = memory()
    hand = Hand(store, people(OldPerson), workers)
    hand.run("a", [("person.move", "ann", "Elm"), ("person.move", "bob", "Oak")])
    hand.take_snapshot()
    for _ in range(2):
        hand = Hand(store, people(Person, migrate), workers)
        expected = Person("ann", Address(Street("Elm", 1), datetime.date(2020, 1, 1)))
        assert hand.state()["person", "ann"] == expected
        assert hand.run("b", [("person.street", "bob")])[0].result == "Oak"
        hand.take_snapshot()


def test_a_migration_that_returns_something_else_is_refused_and_the_store_stays_as_it_was() -> None:
    store = memory()
    hand = Hand(store, people(OldPerson))
    hand.run("a", [("person.move", "ann", "Elm")])
    hand.take_snapshot()
    with pytest.raises(AppChanged, match=r"operator 'person' gives a wrong state for 'ann': home must be .*Address"):
        Hand(store, people(Person, wrong))
    assert Hand(store, people(OldPerson)).state() == {("person", "ann"): OldPerson("ann", Street("Elm", 1))}
