"""New code that only adds: it replays what older code has logged. Everything else is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from headrace.durability.log.changelog import Changelog
from headrace.durability.log.log import read_log
from headrace.durability.reading.store_reader import StoreReader
from headrace.errors import AppChanged, ModelError
from headrace.model.fingerprint import Fingerprint, fingerprint, needs_migration
from headrace.wire.values import plain
from tests.durability.hand import Hand, memory
from tests.durability.versions import ADDS, BREAKS, BY_NAME, EDITS, Edit, draw_edits, kind_of, source_of, workshop

NAMES = ("ann", "bob", "cy", "dee")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    with workshop(tmp_path) as made:
        yield made


def orders(rng: random.Random, count: int) -> list[Any]:
    """What is asked for, without types: key, to, amount, size."""
    return [(rng.choice(NAMES), rng.choice(NAMES), rng.randint(1, 99), rng.randint(1, 5)) for _ in range(count)]


def calls(module: ModuleType, asked: list[Any]) -> list[Any]:
    return [("account.order", key, module.Order(to, amount), module.Part(size)) for key, to, amount, size in asked]


def in_types_of(module: ModuleType, value: Any, kind: str) -> Any:
    """A value of an older version in the types of this one: msgspec fills in what is new."""
    kinds = {"reply": module.Receipt | None, "account": module.Account, "notes": list[module.Note], "totals": int}
    return msgspec.convert(msgspec.to_builtins(value), kinds[kind], strict=False)


def told(module: ModuleType, replies: list[Any]) -> list[Any]:
    return [(each.tid, each.status, in_types_of(module, each.result, "reply")) for each in replies]


def states(module: ModuleType, state: dict[Any, Any]) -> dict[Any, Any]:
    return {(name, key): in_types_of(module, value, name) for (name, key), value in state.items()}


def reference(module: ModuleType, asked: list[Any], now: ModuleType) -> tuple[list[Any], dict[Any, Any]]:
    """What these orders give, one after the other, in one go and by one version; in the types of another."""
    hand = Hand(memory(), module.app)
    replies = hand.run("all", calls(module, asked))
    return [row[1:] for row in told(now, replies)], states(now, visible(hand))


def visible(hand: Hand) -> dict[Any, Any]:
    return {entity: state for entity, state in hand.state().items() if entity[0] != "headrace"}


class Story:
    """A store that an older version has written, until it crashes or stops."""

    def __init__(self, old: ModuleType, rng: random.Random, workers: int, count: int, is_clean: bool) -> None:
        self.old, self.rng, self.workers, self.store = old, rng, workers, memory()
        self.settings: dict[str, Any] = {"workers": workers, "epoch_transactions_max": rng.choice((1, 5, 50))}
        self.asked, self.replies = dict[str, Any](), dict[str, Any]()
        self.hand: Hand | None = None
        hand = self.start(old)
        for number in range(rng.randint(1, 6)):
            self.ask(hand, f"before {number}", max(1, count // 6))
            if rng.random() < 0.2:
                hand.take_snapshot()
        if is_clean:
            hand.settle()
            assert hand.take_snapshot() is not None

    def ask(self, hand: Hand, stem: str, count: int) -> None:
        """Send some orders; then anything may happen to them."""
        sent = {f"{stem}/{at}": each for at, each in enumerate(orders(self.rng, count))}
        token = hand.send(list(sent), calls(self.old, list(sent.values())))
        self.asked |= sent
        for _ in range(self.rng.choice((0, 3, 10, 1_000))):
            if not hand.happen(self.rng):
                break
        if token in hand.replies:
            self.replies |= dict(zip(sent, hand.replies[token], strict=True))

    def start(self, module: ModuleType) -> Hand:
        now_us = 0 if self.hand is None else self.hand.now_us
        self.hand = Hand(self.store, module.app, now_us=now_us, **self.settings)
        return self.hand

    def check(self, hand: Hand, module: ModuleType) -> None:
        """All that was asked for so far, asked again: what was told once is told again, and all together is what the
        old version gives in one go."""
        ids = list(self.asked)
        replies = hand.run(ids, calls(module, list(self.asked.values())))
        again = dict(zip(ids, replies, strict=True))
        assert told(module, [again[each] for each in self.replies]) == told(module, list(self.replies.values()))
        self.replies = again
        order = sorted(ids, key=lambda each: again[each].tid)
        outcomes, state = reference(self.old, [self.asked[each] for each in order], module)
        assert [row[1:] for row in told(module, [again[each] for each in order])] == outcomes
        assert visible(hand) == state

    def check_old(self) -> None:
        self.check(self.start(self.old), self.old)


@pytest.mark.parametrize("seed", range(60))
def test_what_happens_with_a_random_newer_version_is_what_the_rule_says(seed: int, make: Any) -> None:
    rng = random.Random(seed)
    play(draw_edits(rng), rng.random() < 0.4, rng, make)


@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_what_happens_with_one_change_is_what_the_rule_says(edit: Edit, is_clean: bool, make: Any) -> None:
    play((edit,), is_clean, random.Random(edit.name), make)


def play(edits: tuple[Edit, ...], is_clean: bool, rng: random.Random, make: Any) -> None:
    """An older version writes a store until it crashes or stops; then a newer one starts."""
    old, new = make(source_of(())), make(source_of(edits))
    story = Story(old, rng, rng.choice((0, 0, 2)), rng.choice((6, 30, 300)), is_clean)
    kind = kind_of(edits)
    if kind == ADDS:
        for number in range(rng.randint(1, 2)):
            hand = story.start(new)
            story.check(hand, new)
            story.old, more = new, story.old
            story.ask(hand, f"after {number}", 5)
            story.old = more
        story.check(story.start(new), new)
        return
    found = story.start(old)
    is_at_end = not found.core.backlog  # also after a crash, if it came at the right moment
    assert is_at_end or not is_clean
    before: dict[Any, Any] = {}
    if is_at_end:
        found.settle()  # timers may be due
        before = visible(found)
        found.take_snapshot()
    if is_at_end and (kind != BREAKS or not before):
        assert visible(story.start(new)) == states(new, before)
    else:
        with pytest.raises(AppChanged, match=r"migrate=" if is_at_end else "headrace upgrade"):
            story.start(new)
        story.check_old()


# --- one at a time ----------------------------------------------------------------------------------------------------


def version(make: Any, *names: str) -> ModuleType:
    made: ModuleType = make(source_of(tuple(BY_NAME[name] for name in names)))
    return made


def crashed(module: ModuleType, workers: int = 0, asked: list[Any] | None = None) -> tuple[Any, list[Any]]:
    """A store whose epochs wait to be replayed, with their replies."""
    store = memory()
    hand = Hand(store, module.app, workers, epoch_transactions_max=2)
    return store, hand.run("first", calls(module, asked or orders(random.Random(1), 5)))


WIDER = ("Order.urgent", "Part.colour", "Account.best", "Receipt.rest", "a function")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_repeated_request_is_the_same_if_a_new_field_is_at_its_default_and_another_one_if_it_is_not(
    workers: int, make: Any
) -> None:
    old, new = version(make), version(make, *WIDER)
    store, before = crashed(old, workers, [("ann", "bob", 5, 1)])
    hand = Hand(store, new.app, workers)
    (again,) = hand.run(["first/0"], calls(new, [("ann", "bob", 5, 1)]))
    assert (again.tid, again.result) == (before[0].tid, in_types_of(new, before[0].result, "reply"))
    assert again.result.order == new.Order("bob", 5, urgent=False)
    other = ("account.order", "ann", new.Order("bob", 5, urgent=True), new.Part(1))
    assert hand.run(["first/0"], [other])[0].status == "refused"


def test_a_reply_is_kept_as_it_was_given(make: Any) -> None:
    """Readers of the replies, and clients of the old version, see no field that was not there."""
    old, new = version(make), version(make, *WIDER)
    store, _ = crashed(old)
    given = [record.data for record in read_log(store, "replies")]
    hand = Hand(store, new.app)
    hand.settle()
    assert [record.data for record in read_log(store, "replies")][: len(given)] == given
    assert b"urgent" not in b"".join(map(bytes, hand.core.last.results))


@pytest.mark.parametrize("workers", [0, 2])
def test_new_code_that_gives_another_reply_is_refused_and_leaves_nothing_behind(workers: int, make: Any) -> None:
    """What it does follows from the fields of a type, which no source shows."""
    curious = "\n@totals.register\ndef width(ctx: Context) -> int:\n    return len(dataclasses.fields(Order))\n"
    old = make(source_of(()) + curious)
    new = make(source_of((BY_NAME["Order.urgent"],)) + curious)
    store = memory()
    hand = Hand(store, old.app, workers, epoch_transactions_max=1)
    before = hand.run("a", [("totals.width", "a"), *calls(old, [("ann", "bob", 5, 1)])])
    left = {name: store.get(name) for name in store.list("") if name.startswith(("log/0", "replies/0", "snapshots"))}
    later = Hand(store, new.app, workers)
    with pytest.raises(AppChanged, match=r"epoch 1, and this one gives another result.*headrace upgrade"):
        later.run("b", calls(new, [("cy", "bob", 7, 1)]))
    found = {name: store.get(name) for name in store.list("") if name.startswith(("log/0", "replies/0", "snapshots"))}
    assert {name: data for name, data in found.items() if name in left} == left
    assert later.core.journal.last == hand.core.journal.last, "it has logged nothing"
    hand = Hand(store, old.app, workers)
    assert hand.run("a", [("totals.width", "a"), *calls(old, [("ann", "bob", 5, 1)])]) == before
    assert hand.take_snapshot() is not None
    hand = Hand(store, new.app, workers)
    assert hand.run("c", [("totals.width", "a")])[0].result == 3


def test_requests_wait_until_the_older_versions_epochs_are_replayed_and_then_run(make: Any) -> None:
    old, new = version(make), version(make, *WIDER)
    store, _ = crashed(old, asked=[("ann", "bob", 5, 1)] * 5)
    hand = Hand(store, new.app)
    token = hand.send("new", [("account.owner", "ann")])
    assert hand.core.is_replaying()
    assert not hand.records
    hand.settle()
    assert not hand.core.is_replaying()
    assert hand.replies[token][0].result == "ann"


def test_a_default_that_changes_later_leaves_what_is_stored_as_it_is(make: Any) -> None:
    old, red = version(make), version(make, "Account.limit", "Part.colour")
    blue = make(source_of((BY_NAME["Account.limit"], BY_NAME["Part.colour"])).replace("'red'", "'blue'"))
    store, _ = crashed(old, asked=[("ann", "bob", 5, 1)])
    assert Hand(store, old.app).take_snapshot() is not None, "the state of ann is stored as the old version wrote it"
    hand = Hand(store, red.app)
    hand.settle()
    hand.run("more", calls(red, [("cy", "bob", 5, 1)]))
    with pytest.raises(AppChanged, match=r"field colour: its default changed.*headrace upgrade"):
        Hand(store, blue.app)
    assert Hand(store, red.app).take_snapshot() is not None
    hand = Hand(store, blue.app)
    assert hand.state()["account", "ann"].parts == [blue.Part(1, "red")]
    assert blue.Part().colour == "blue"


def test_a_new_schedule_starts_when_the_app_first_runs_with_it(make: Any) -> None:
    old, new = version(make), version(make, "a schedule")
    store, _ = crashed(old)
    hand = Hand(store, new.app, now_us=7_000_000_000)
    hand.settle()
    assert hand.state()["headrace", "every/hourly"] == 7_000_000_000


def test_a_new_field_with_a_default_does_not_change_a_schedule_whose_arguments_have_it(make: Any) -> None:
    call = "\napp.options(name='orders').every(3_600, later, 'late', Order('x', 1))\n"
    old, new = make(source_of(()) + call), make(source_of((BY_NAME["Order.urgent"],)) + call)
    other = make(source_of((BY_NAME["Order.urgent"],)) + call.replace("1)", "1, urgent=True)"))
    assert fingerprint(old.app).obstacles(fingerprint(new.app)) == []
    assert fingerprint(old.app).obstacles(fingerprint(other.app)) == ["schedule orders changed"]


def test_timers_of_an_older_version_fire_with_the_new_fields_at_their_defaults(make: Any) -> None:
    old, new = version(make), version(make, *WIDER)
    store = memory()
    hand = Hand(store, old.app)
    hand.send("a", calls(old, [("ann", "bob", 7, 1)]))
    hand.sync()
    hand.compute()
    assert ("account", "late ann") not in hand.core.state.select()
    hand = Hand(store, new.app)
    hand.settle()
    assert hand.state()["account", "late ann"] == new.Account("late ann", 7)


@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize(
    ("default", "words"),
    [
        ("stamp: int = field(default_factory=itertools.count().__next__)", "Account.stamp is another one each time"),
        ("stamp: int = None", "Account.stamp is None, which is no int"),
        ("stamp: Any = object()", "Account.stamp cannot be used"),
        ("text: str = 'x' * 980", "'ann' in operator 'account' does not fit with the new fields.*over the limit"),
    ],
)
def test_a_default_that_cannot_stand_in_what_is_stored_is_refused_at_start(
    default: str, words: str, is_clean: bool, make: Any
) -> None:
    old = version(make)
    made = source_of(()).replace("    # more of Account", f"    {default}\n    # more of Account")
    new = make(made.replace("import dataclasses\n", "import dataclasses\nimport itertools\nfrom typing import Any\n"))
    store = memory()
    hand = Hand(store, old.app, value_bytes_max=1_000)
    hand.run("first", calls(old, [("ann", "bob", 5, 1)]))
    hand.take_snapshot()
    if not is_clean:
        hand.run("second", calls(old, [("ann", "bob", 5, 1)]))
    with pytest.raises(AppChanged, match=words):
        Hand(store, new.app, value_bytes_max=1_000)
    assert Hand(store, old.app).state()["account", "ann"].balance == (4 if is_clean else 8)


SHARED = """
import dataclasses
from typing import Any
import msgspec
from headrace import App, Context

@dataclasses.dataclass(eq=False)
class Loose:
    n: int = 0

@dataclasses.dataclass(frozen=True)
class Tight:
    n: int = 0
    parts: Any = ()

class Free(msgspec.Struct):
    n: int = 0

{kind}
    shared: Any = {default}

app = App("shared")
op = app.operator("op", state=Held)
"""


@pytest.mark.parametrize("kind", ["@dataclasses.dataclass\nclass Held:", "class Held(msgspec.Struct):"])
@pytest.mark.parametrize(
    ("default", "is_refused"),
    [
        ("Loose()", True),
        ("(1, (Loose(),))", True),
        ("Tight(1, [])", True),
        ("Tight(1, (Loose(),))", True),
        ("Tight(1, (1, 2))", False),
        ("(1, 'a', None)", False),
    ],
)
def test_a_default_that_all_records_share_and_that_can_be_changed_is_refused_at_start(
    default: str, is_refused: bool, kind: str, make: Any
) -> None:
    app = make(SHARED.format(kind=kind, default=default)).app
    if is_refused:
        with pytest.raises(ModelError, match=r"the default of Held\.shared is one .*default_factory"):
            Hand(memory(), app)
    else:
        Hand(memory(), app)


def test_a_factory_is_called_for_each_value_that_is_decoded(make: Any) -> None:
    old, new = version(make), version(make, "Account.tags", "Note.seen")
    store, _ = crashed(old)
    hand = Hand(store, new.app)
    state = hand.state()
    made = [state["account", key].tags for key in NAMES if ("account", key) in state]
    assert all(tags == [] for tags in made)
    assert len({id(tags) for tags in made}) == len(made) > 1


def test_a_fingerprint_that_knows_of_no_defaults_is_compared_strictly(make: Any) -> None:
    """Older stores have such. The digest of a type's code covered its defaults then."""
    now = fingerprint(version(make).app)
    plain = now.plain()
    del plain["types"]["Part"]["defaults"]
    plain["types"]["Part"]["code"] = "with defaults"
    older = Fingerprint.from_plain(plain)
    assert older.obstacles(now) == ["type Part: field size: its default changed", "type Part: its code changed"]
    assert needs_migration(older, now) == []
    assert "defaults" not in plain["types"]["Order"], "a type without defaults has the same print as before"


def test_past_states_can_be_read_by_newer_code_that_only_adds(make: Any) -> None:
    old, new = version(make), version(make, *WIDER)
    store, _ = crashed(old, asked=[("ann", "bob", 5, 1)])
    replay = StoreReader(store, new.app).replay()
    state = replay.engine.program.values.unseal(replay.state()["account"]["ann"])
    assert state == new.Account("ann", 4, [new.Part(1)])
    Hand(store, new.app).run("more", calls(new, [("ann", "bob", 5, 1)]))
    with pytest.raises(AppChanged, match="field urgent is gone"):
        StoreReader(store, old.app).replay()


def test_the_changes_that_an_older_version_kept_stay_and_later_ones_have_the_new_fields(make: Any) -> None:
    old, new = version(make), version(make, *WIDER)
    store, _ = crashed(old, asked=[("ann", "bob", 5, 1)])
    hand = Hand(store, new.app)
    hand.run("more", calls(new, [("ann", "bob", 5, 1)]))
    first, *_, last = [each.of("account") for each in Changelog(store).read(1)]
    assert "best" not in plain(first.afters[0])
    assert plain(last.befores[0])["best"] == {"size": 7, "colour": "red"}
    assert Changelog(store).since("account") == 1, "nothing is broken for those who read on"
