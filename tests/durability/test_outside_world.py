"""Timers, messages, external calls and leases across crashes: each timer fires once, each message comes back once, what
the outside world has answered is not asked again, and what expired once is not there when it is replayed."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from headrace import Abort, App, Context, Reply
from headrace.core.events import Lost, Perform, Responded, TakeSnapshot
from headrace.sim.disk import SimStore
from tests.durability.hand import Hand, after_power_loss, memory

app = App("outside")
item = app.operator("item")


def unused(*_: Any) -> None:
    raise AssertionError("tests are the outside world themselves")


app.external("bank", unused)
app.external("mail", unused)


@item.register
async def pay(ctx: Context, amount: int) -> list[Any]:
    """Between the two calls it is known what the first gave."""
    first = await ctx.call_external("bank", ctx.key, amount)
    ctx.put([first])
    second = await ctx.call_external("bank", ctx.key, first)
    ctx.put([first, second])
    return [first, second]


@item.register
async def pay_in_vain(ctx: Context) -> None:
    paid = await ctx.call_external("bank", ctx.key, 1)
    ctx.put(paid)
    raise Abort(f"paid {paid}, for nothing")


@item.register
def write(ctx: Context, to: str) -> str:
    return ctx.send_external("mail", to, then=written, key=to)


@item.register
def write_and_regret(ctx: Context, to: str) -> None:
    ctx.send_external("mail", to, then=written, key=to)
    raise Abort("better not")


@item.register
def written(ctx: Context, result: Any, error: Any) -> None:
    ctx.put([*ctx.get([]), result if error is None else "no answer"])


@item.register
def wait(ctx: Context, seconds: int, to: str) -> str:
    return ctx.call_later(seconds, ring, to)


@item.register
def wait_not(ctx: Context, to: str) -> None:
    """Sets a timer and drops it again, one transaction later."""
    ctx.call_async(drop, ctx.key, ctx.call_later(1, ring, to))


@item.register
def drop(ctx: Context, timer: str) -> None:
    ctx.cancel(timer)


@item.register
def ring(ctx: Context) -> None:
    ctx.put(ctx.get(0) + 1)


@item.register
def add(ctx: Context, amount: int) -> int:
    ctx.put(ctx.get(0) + amount)
    return int(ctx.get())


leases = app.operator("lease", ttl=2)


@leases.register
def hold(ctx: Context) -> int:
    """How often, without two seconds in between."""
    ctx.put(ctx.get(0) + 1)
    return int(ctx.get())


KINDS = ("pay", "pay_in_vain", "write", "write_and_regret", "wait", "wait_not", "add", "hold", "hold")


class Bank:
    """Idempotent: the same key gets the same answer. Sometimes it does not answer at all."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.given: dict[str, Any] = {}
        self.asked: dict[str, tuple[str, tuple[Any, ...]]] = {}
        self.calls: list[str] = []

    def answer(self, effect: Perform) -> Responded:
        self.calls.append(effect.call)
        assert self.asked.setdefault(effect.call, (effect.name, effect.args)) == (effect.name, effect.args)
        if effect.call not in self.given and self.rng.random() < 0.2:
            return Responded(effect.call, None, "out of order")
        return Responded(effect.call, self.given.setdefault(effect.call, len(self.given) + 1))


class Life:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.store: SimStore = memory(rng.random() < 0.5)
        self.bank = Bank(rng)
        self.requests = [(rng.choice(KINDS), f"k{at}") for at in range(rng.randint(3, 14))]
        self.answered: dict[int, list[Reply]] = {}
        self.sync_chance = rng.choice([0.02, 0.2, 1.0])
        self.now_us = 0
        self.begin()

    def call(self, at: int) -> tuple[Any, ...]:
        kind, key = self.requests[at]
        functions = {"pay": (pay, key, at), "pay_in_vain": (pay_in_vain, key), "add": (add, "sum", 1)}
        functions |= {"write": (write, "writer", key), "write_and_regret": (write_and_regret, "writer", key)}
        functions["hold"] = hold, f"h{at % 2}"
        functions |= {"wait": (wait, "waiter", at % 4, key), "wait_not": (wait_not, "waiter", key)}
        return functions[kind]

    def begin(self) -> None:
        rng = self.rng
        self.asked: dict[int, int] = {}
        self.hand = Hand(
            self.store,
            app,
            rng.choice([0, 0, 1, 2, 3]),
            self.now_us,
            rng.randrange(1 << 30),
            epoch_transactions_max=rng.randint(1, 5),
            epoch_interval_us=rng.choice([0, 1_000]),
            snapshot_interval_us=rng.choice([1, 3_000, 1 << 60]),
            snapshots_kept=1,
            segment_bytes_max=rng.choice([1, 1 << 20]),
            calls_max=rng.choice([10_000, 9_000]),
            reply_retention_us=1 << 60,
        )
        self.hand.outside = self.bank.answer

    def send(self, at: int) -> None:
        self.asked[self.hand.send([f"id{at}"], [self.call(at)])] = at

    def look(self) -> None:
        for token, replies in self.hand.replies.items():
            assert self.answered.setdefault(self.asked[token], replies) == replies

    def die(self) -> None:
        if self.rng.random() < 0.5:
            self.store = after_power_loss(self.store)
        self.now_us = self.hand.now_us + self.rng.choice([-5_000, 0, 5_000, 3_000_000])
        self.begin()

    def live(self, steps: int) -> None:
        rng = self.rng
        for _ in range(steps):
            chance = rng.random()
            if chance < 0.12:
                self.send(rng.randrange(len(self.requests)))
            elif chance < 0.14:
                self.hand.submit(TakeSnapshot(object()))
            elif chance < 0.19:
                self.hand.now_us += rng.choice([1_000, 1_000_000])
            elif chance < 0.20 and self.hand.workers:
                self.hand.submit(Lost(rng.randint(1, self.hand.core.backend.workers)))
            elif chance < 0.225:
                self.die()
            else:
                self.hand.happen(rng, self.sync_chance)
            self.look()

    def finish(self) -> None:
        for at in range(len(self.requests)):
            self.send(at)
        self.hand.settle()
        self.hand.now_us += 5_000_000
        self.hand.settle()
        self.look()
        assert len(self.answered) == len(self.requests)

    def check(self) -> dict[Any, Any]:
        everything = self.hand.state()
        assert not [key for name, key in everything if name == "lease"], "what expired was swept away"
        state = {key: value for (name, key), value in everything.items() if name == "item"}
        for at, (kind, key) in enumerate(self.requests):
            (reply,) = self.answered[at]
            has = state.get(key)
            if kind == "pay" and reply.ok:
                assert has == reply.result, "what it was told is what it noted"
                assert set(reply.result) <= set(self.bank.given.values())
            elif kind == "write":
                assert has is not None, "the answer came back"
                assert len(has) == 1, "and once"
                assert has[0] == "no answer" or has[0] in self.bank.given.values()
            elif kind == "wait":
                assert has == 1
            elif kind == "hold":
                assert reply.result >= 1
            elif kind != "add":
                assert has is None
        adds = [at for at, (kind, _) in enumerate(self.requests) if kind == "add"]
        assert sorted(self.answered[at][0].result for at in adds) == list(range(1, len(adds) + 1))
        bank_keys = [key for key, (name, _) in self.bank.asked.items() if name == "bank"]
        mails = [args for name, args in self.bank.asked.values() if name == "mail"]
        assert len(mails) == len(set(mails)), "a letter has one idempotency key"
        assert len(bank_keys) <= 2 * sum(kind == "pay" for kind, _ in self.requests) + sum(
            kind == "pay_in_vain" for kind, _ in self.requests
        )
        return state


@pytest.mark.parametrize("seed", range(int(25 * float(os.environ.get("HEADRACE_EXAMPLES", "1")))))
def test_timers_messages_and_external_calls_happen_once_wherever_the_process_dies(seed: int) -> None:
    life = Life(seed)
    life.live(300)
    life.finish()
    state = life.check()
    calls = len(life.bank.calls)
    for _ in range(2):
        life.die()
        life.finish()
        assert life.check() == state
    assert len(life.bank.calls) == calls, "nobody is asked again for what is known"


# --- one thing at a time ----------------------------------------------------------------------------------------------


def quiet(hand: Hand) -> bool:
    """Everything happens but the outside world; does it come to an end?"""
    return any(not (hand.deliver() or hand.sync() or hand.work()) for _ in range(1_000))


def hand_of(store: SimStore, workers: int, bank: Bank | None = None, **config: int) -> Hand:
    hand = Hand(store, app, workers, **config)
    hand.outside = bank.answer if bank is not None else None
    return hand


WORKERS = pytest.mark.parametrize("workers", [0, 1, 2])


@WORKERS
def test_the_outside_world_is_called_when_the_intent_is_durable_and_not_before(workers: int) -> None:
    hand = hand_of(memory(), workers)
    hand.send("a", [(add, "sum", 1), (pay, "k", 5)])
    hand.compute()
    assert not hand.performs
    hand.sync(1)  # the epoch
    hand.compute()
    assert not hand.performs
    hand.sync()
    hand.compute()
    assert [(effect.name, effect.args) for effect in hand.performs] == [("bank", ("k", 5))]


@WORKERS
def test_a_reply_waits_for_the_responses_that_it_depends_on_to_be_durable(workers: int) -> None:
    store = memory()
    bank = Bank(random.Random(3))
    hand = hand_of(store, workers)
    later = hand.send("a", [(pay, "k", 5), (add, "sum", 1)])
    assert quiet(hand)
    for _ in range(2):
        assert not hand.replies
        hand.submit(bank.answer(hand.performs.popleft()))
        hand.compute()
        assert not hand.replies
        assert quiet(hand)
    assert hand.replies[later][0].result == [1, 2]


@WORKERS
@pytest.mark.parametrize("done", range(4))
def test_what_the_outside_world_has_answered_is_not_asked_again_and_the_rest_with_the_same_key(
    done: int, workers: int
) -> None:
    """0: nobody was asked. 1: asked, and the answer lost with the process. 2: the first answer is durable. 3: both."""
    store, bank = memory(), Bank(random.Random(3))
    hand = hand_of(store, workers)
    hand.send("a", [(pay, "k", 5)])
    assert quiet(hand)
    if done:
        answer = bank.answer(hand.performs.popleft())
        if done > 1:
            hand.submit(answer)
            assert quiet(hand)
        if done > 2:
            hand.submit(bank.answer(hand.performs.popleft()))
            assert quiet(hand)
    asked = list(bank.calls)
    hand = hand_of(store, workers, bank)
    assert hand.run("a", [(pay, "k", 5)])[0].result == [1, 2]
    assert len(set(bank.calls)) == 2
    again = bank.calls[len(asked) :]
    assert len(again) == {0: 2, 1: 2, 2: 1, 3: 0}[done]
    hand = hand_of(store, 2 - workers, bank, calls_max=9_999)
    assert hand.run("a", [(pay, "k", 5)])[0].result == [1, 2]
    assert len(bank.calls) == len(asked) + len(again)


@WORKERS
def test_a_failure_of_the_outside_world_is_repeated_by_a_replay_though_it_would_answer_now(workers: int) -> None:
    store = memory()
    hand = hand_of(store, workers)
    hand.outside = lambda effect: Responded(effect.call, None, "closed on Sundays")
    (reply,) = hand.run("a", [(pay, "k", 5)])
    assert reply.failure is not None
    assert "closed on Sundays" in reply.failure.message
    for other in (0, 2, 1):
        again = hand_of(store, other, Bank(random.Random(3)))
        assert again.run("a", [(pay, "k", 5)]) == [reply]
        assert again.state() == {}


@WORKERS
def test_a_message_leaves_when_its_transaction_is_durable_and_only_if_it_commits(workers: int) -> None:
    hand = hand_of(memory(), workers)
    hand.send("a", [(write, "w", "k"), (write_and_regret, "w", "never")])
    hand.compute()
    assert not hand.performs
    assert quiet(hand)
    assert [effect.args for effect in hand.performs] == [("k",)]


@WORKERS
@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_message_whose_answer_is_in_the_log_is_not_sent_again(workers: int, with_snapshot: bool) -> None:
    store, bank = memory(), Bank(random.Random(3))
    hand = hand_of(store, workers, bank, epoch_transactions_max=2)
    hand.run("a", [(write, "w", f"k{at}") for at in range(3)])
    if with_snapshot:
        hand.take_snapshot()
    sent, state = list(bank.calls), hand.state()
    for other in (workers, 0, 2):
        hand = hand_of(store, other, bank)
        hand.settle()
        assert bank.calls == sent
        assert hand.state() == state


@WORKERS
@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_message_that_was_not_answered_is_sent_again_with_the_same_key(workers: int, with_snapshot: bool) -> None:
    store = memory()
    hand = hand_of(store, workers)
    hand.send("a", [(write, "w", "k")])
    assert quiet(hand)
    (before,) = hand.performs
    if with_snapshot:
        hand.submit(TakeSnapshot("now"))
        assert quiet(hand)
    for _ in range(2):
        hand = hand_of(store, workers)
        assert quiet(hand)
        assert list(hand.performs) == [before]
    hand.outside = Bank(random.Random(3)).answer
    hand.settle()
    assert hand.state() == {("item", "k"): [1]}


@WORKERS
@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_timer_fires_once_also_if_the_process_was_away_when_it_was_due(workers: int, with_snapshot: bool) -> None:
    store = memory()
    hand = hand_of(store, workers)
    hand.run("a", [(wait, "w", 60, "k")])
    if with_snapshot:
        hand.take_snapshot()
    assert hand.state().get(("item", "k")) is None
    for late_us in (50_000_000, 3_600_000_000, 3_600_000_000):
        hand = Hand(store, app, workers, now_us=late_us)
        assert quiet(hand)
        assert hand.state().get(("item", "k")) == (1 if late_us > 60_000_000 else None)


@WORKERS
def test_a_timer_that_fired_and_was_not_durable_fires_after_the_restart(workers: int) -> None:
    store = memory()
    hand = hand_of(store, workers)
    hand.run("a", [(wait, "w", 60, "k")])
    hand.now_us = 70_000_000
    hand.compute()  # it fires, and the process ends before the log has it
    assert hand.records
    hand = Hand(store, app, workers, now_us=hand.now_us)
    hand.settle()
    assert hand.state() == {("item", "k"): 1}


@WORKERS
def test_the_engine_rests_while_the_outside_world_is_awaited_though_a_snapshot_is_due(workers: int) -> None:
    hand = hand_of(memory(), workers, snapshot_interval_us=1_000)
    hand.send("a", [(add, "sum", 1)])
    assert quiet(hand)
    hand.send("b", [(pay, "k", 1)])
    assert quiet(hand)
    hand.now_us = 5_000
    assert quiet(hand), "nothing is to be done, again and again"
    hand.outside = Bank(random.Random(3)).answer
    hand.settle()
    assert hand.state() == {("item", "sum"): 1, ("item", "k"): [1, 2]}


@WORKERS
def test_a_snapshot_never_holds_half_an_epoch(workers: int) -> None:
    """The first rows of an epoch have run, and one waits for the outside world when a snapshot is wanted."""
    store, bank = memory(), Bank(random.Random(3))
    hand = hand_of(store, workers)
    hand.run("before", [(add, "sum", 1)])
    hand.send("a", [(add, "sum", 1), (pay, "k", 1), (add, "sum", 1)])
    assert quiet(hand)
    hand.core.journal.wanted.append("token")
    assert quiet(hand)
    hand.now_us += 1
    hand = hand_of(store, workers, bank)
    assert hand.run("a", [(add, "sum", 1), (pay, "k", 1), (add, "sum", 1)])[2].result == 3
    assert hand.state() == {("item", "sum"): 3, ("item", "k"): [1, 2]}


@WORKERS
def test_a_lost_worker_changes_nothing_about_the_outside_world(workers: int) -> None:
    bank = Bank(random.Random(3))
    hand = hand_of(memory(), workers)
    token = hand.send("a", [(pay, "k", 5), (write, "w", "l"), (wait, "w", 1, "t")])
    assert quiet(hand)
    answer = bank.answer(hand.performs.popleft())
    for lost in range(1, workers + 1):
        hand.submit(Lost(lost))
        assert quiet(hand)
    hand.submit(answer)
    hand.outside = bank.answer
    hand.settle()
    assert hand.replies[token][0].result == [1, 2]
    assert hand.state() == {("item", "k"): [1, 2], ("item", "l"): [3], ("item", "t"): 1}
    assert len(bank.asked) == len(bank.calls) == 3, "each once"
