"""The queue before sequencing: a policy chooses the order, and the log is that order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import App, Config, Context
from headrace.core.epoch import Batch
from headrace.core.origin import BatchId, FromClient, FromSource
from headrace.core.submit_queue import Policy, SubmitQueue, WaitingBatch, first_come
from headrace.errors import StreamError
from tests.driver import Driver

app = App("queued")
book = app.operator("book")


@book.register
def note(ctx: Context, word: str) -> list[str]:
    words: list[str] = [*ctx.get([]), word]
    ctx.put(words)
    return words


@book.register
async def pass_on(ctx: Context, word: str, other: str) -> list[str]:
    await ctx.call(note, other, word)
    words: list[str] = await ctx.call(note, ctx.key, word)
    return words


def newest_first(waiting: WaitingBatch) -> int:
    return -waiting.arrival


def by_source(waiting: WaitingBatch) -> tuple[int, str]:
    """Clients before sources, and sources by their names."""
    origin = waiting.batch.origin
    return (1, origin.source) if isinstance(origin, FromSource) else (0, "")


def shortest_first(waiting: WaitingBatch) -> int:
    return len(waiting.batch)


POLICIES: tuple[Policy, ...] = (first_come, newest_first, by_source, shortest_first)


def empty(origin: Any) -> Batch:
    return Batch(origin, [], [], [])


def taken(queue: SubmitQueue) -> list[Any]:
    return [queue.take().token for _ in range(len(queue))]


def test_without_a_policy_batches_are_taken_as_they_arrive() -> None:
    queue = SubmitQueue()
    for token in "abcd":
        queue.put(token, empty(FromClient(token) if token != "c" else FromSource(token, "s", 0)))
    assert queue.take().token == "a"
    queue.put("e", empty(FromClient("e")))
    assert taken(queue) == ["b", "c", "d", "e"]
    assert not queue


def test_the_lowest_rank_is_taken_first_and_of_equal_ones_the_first_to_arrive() -> None:
    ranks = dict(zip("abcdef", (3, 1, 2, 1, 3, 2), strict=True))
    queue = SubmitQueue(lambda waiting: ranks[waiting.token])
    for token in ranks:
        queue.put(token, empty(FromClient(token)))
    assert taken(queue) == ["b", "d", "c", "f", "a", "e"]


@given(
    arrivals=st.lists(st.tuples(st.sampled_from(["s", "t", None]), st.integers(0, 3)), max_size=20),
    takes=st.lists(st.booleans(), max_size=20),
)
def test_batches_of_a_source_stay_in_order_whatever_the_policy_says(
    arrivals: list[tuple[str | None, int]], takes: list[bool]
) -> None:
    numbers = {"s": 0, "t": 0}
    queue, left = SubmitQueue(lambda waiting: waiting.token[1]), []
    for at, (source, rank) in enumerate(arrivals):
        if source is None:
            queue.put((at, rank), empty(FromClient(f"{at}")))
        else:
            queue.put((at, rank), empty(FromSource("", source, numbers[source])))
            numbers[source] += 1
        if at < len(takes) and takes[at]:
            left.append(queue.take())
    left += [queue.take() for _ in range(len(queue))]
    assert sorted(waiting.arrival for waiting in left) == list(range(len(arrivals)))
    for source in numbers:
        origins = [waiting.batch.origin for waiting in left]
        found = [each.number for each in origins if isinstance(each, FromSource) and each.source == source]
        assert found == list(range(numbers[source]))


def submitted(driver: Driver) -> list[tuple[Any, list[tuple[Any, ...]]]]:
    """Origins and calls: of clients, and of two sources that send several batches each."""
    rows = [[(pass_on, f"k{(at + row) % 3}", f"{at}.{row}", "k0") for row in range(1 + at * 5 % 4)] for at in range(9)]
    sources = {1: BatchId("y", 0), 2: BatchId("x", 0), 4: BatchId("y", 1), 5: BatchId("x", 1), 7: BatchId("y", 2)}
    origins = [FromSource(f"{at}", *sources[at]) if at in sources else FromClient(f"{at}") for at in range(len(rows))]
    return list(zip(origins, rows, strict=True))


def chosen(policy: Policy, batches: list[Batch]) -> list[int]:
    """The order that a policy wants, by its definition."""
    ranks: list[Any] = []
    for at, batch in enumerate(batches):
        rank = policy(WaitingBatch(at, at, batch))
        if isinstance(batch.origin, FromSource):
            before = [(each.origin, other) for each, other in zip(batches, ranks, strict=False)]
            source = batch.origin.source
            rank = max([rank, *(other for it, other in before if isinstance(it, FromSource) and it.source == source)])
        ranks.append(rank)
    return sorted(range(len(batches)), key=lambda at: (ranks[at], at))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_chooses_the_order_and_the_results_are_those_of_a_loop_in_that_order(
    policy: Policy, workers: int
) -> None:
    driver = Driver(app, Config(epoch_transactions_max=4), workers, policy=policy)
    requests = submitted(driver)
    batches = [driver.admission.admit(origin, calls) for origin, calls in requests]
    driver.hand_over(*batches, now_us=0)
    driver.settle()
    assert driver.replies.keys() == set(range(len(batches)))
    order = sorted(driver.replies, key=lambda token: driver.replies[token][0].tid or 0)
    assert order == chosen(policy, batches)
    assert [reply.tid for token in order for reply in driver.replies[token]] == list(
        range(1, 1 + sum(len(calls) for _, calls in requests))
    )
    state: dict[str, list[str]] = {}
    for token in order:
        for (_, key, word, other), reply in zip(requests[token][1], driver.replies[token], strict=True):
            for entity in (other, key):
                state[entity] = [*state.get(entity, []), word]
            assert reply.result == state[key]


def test_policies_of_this_test_choose_different_orders() -> None:
    driver = Driver(app)
    batches = [driver.admission.admit(origin, calls) for origin, calls in submitted(driver)]
    orders = {tuple(chosen(policy, batches)) for policy in POLICIES}
    assert len(orders) == len(POLICIES)


def test_what_is_refused_is_refused_in_the_order_of_the_policy() -> None:
    driver = Driver(app, policy=newest_first)
    known = driver.admission.admit(FromSource("s/0", "s", 0), [(note, "k", "a")])
    gap = driver.admission.admit(FromSource("t/3", "t", 3), [(note, "k", "b")])
    driver.hand_over(known, gap, now_us=0)
    driver.finish()
    assert isinstance(driver.refusals[1], StreamError)
    assert [reply.result for reply in driver.replies[0]] == [["a"]]
