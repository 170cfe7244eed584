"""Bad input from outside is refused: typed, before anything is logged."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import App, Config, Runtime
from headrace.core.program import Program
from headrace.errors import BadArguments, BadRequest, RequestIdReused, TooLarge
from tests.core.shop import REFUSED, add, app, item, two_texts


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused_and_the_rest_of_its_batch_goes_on(name: str) -> None:
    call, error, named = REFUSED[name]
    with Runtime(app) as runtime:
        replies = runtime.client.options(request_id="b").batch([(add, "k", 1), call, (add, "k", 1)])
        assert [reply.tid for reply in replies] == [1, None, 2]
        assert [reply.request_id for reply in replies] == ["b/0", "b/1", "b/2"]
        assert replies[2].unwrap() == 2
        refused = replies[1]
        assert (refused.status, refused.epoch, refused.result) == ("refused", None, None)
        assert refused.failure is not None
        assert refused.failure.code == error.code
        assert refused.failure.type == error.__name__
        assert named in refused.failure.message
        with pytest.raises(error):
            refused.unwrap()
        assert runtime.state(item) == {"k": 2}


@pytest.mark.parametrize("name", [name for name, (call, *_) in REFUSED.items() if len(call) >= 2])
def test_a_bad_call_raises_its_refusal_and_uses_no_tid(name: str) -> None:
    call, error, named = REFUSED[name]
    with Runtime(app) as runtime:
        with pytest.raises(error) as caught:
            runtime.client.call(*call)
        assert type(caught.value) is error
        assert caught.value.code == error.code
        assert named in str(caught.value)
        assert runtime.metrics()["epochs"] == 0
        assert runtime.client.batch([(add, "k", 1)])[0].tid == 1


@pytest.mark.parametrize("name", [name for name, (call, *_) in REFUSED.items() if len(call) >= 2])
def test_a_bad_row_of_a_map_is_refused_as_in_a_batch(name: str) -> None:
    (function, key, *args), error, _ = REFUSED[name]
    with Runtime(app) as runtime:
        replies = runtime.client.map(function, [key, key], [tuple(args), tuple(args)])
        assert [reply.status for reply in replies] == ["refused", "refused"]
        assert {reply.failure.code for reply in replies if reply.failure} == {error.code}


def test_a_map_refuses_arguments_that_are_no_tuples() -> None:
    with Runtime(app) as runtime, pytest.raises(BadRequest):
        runtime.client.map(add, ["k"], [5])  # type: ignore[list-item]


def test_a_map_refuses_columns_of_different_length() -> None:
    with Runtime(app) as runtime, pytest.raises(BadRequest, match="2 keys"):
        runtime.client.map(add, ["k", "l"], [(1,)])


@pytest.mark.parametrize("call", ["text", 5, None, {}, object(), b"bytes"])
def test_what_is_no_call_is_refused_and_the_rest_goes_on(call: Any) -> None:
    with Runtime(app) as runtime:
        refused, fine = runtime.client.batch([call, (add, "k", 1)])
        assert refused.status == "refused"
        assert fine.unwrap() == 1


@pytest.mark.parametrize("request_id", ["", 5, b"x", "\ud800", "x" * 257, "é" * 129, ["x"]])
def test_a_bad_request_id_is_refused(request_id: Any) -> None:
    with Runtime(app) as runtime:
        for ask in (
            lambda: runtime.client.options(request_id=request_id).call(add, "k", 1),
            lambda: runtime.client.options(request_id=request_id).batch([(add, "k", 1)]),
            lambda: runtime.client.options(request_id=request_id).map(add, ["k"], [(1,)]),
        ):
            with pytest.raises(BadRequest):
                ask()
        assert runtime.state(item) == {}


def test_a_request_id_that_looks_like_a_huge_row_number_is_only_an_id() -> None:
    with Runtime(app, Config(request_id_bytes_max=10_000)) as runtime:
        assert runtime.client.options(request_id="x/" + "1" * 5_000).call(add, "k", 1) == 1
        assert runtime.client.options(request_id="x/" + "1" * 5_000).call(add, "k", 1) == 1


def test_a_reused_request_id_raises_and_changes_nothing() -> None:
    with Runtime(app) as runtime:
        runtime.client.options(request_id="x").call(add, "k", 1)
        with pytest.raises(RequestIdReused, match="x"):
            runtime.client.options(request_id="x").call(add, "k", 2)
        assert runtime.state(item) == {"k": 1}


def test_a_refused_request_id_can_be_used_again() -> None:
    with Runtime(app) as runtime:
        with pytest.raises(BadArguments):
            runtime.client.options(request_id="x").call(add, "k", "one")
        assert runtime.client.options(request_id="x").call(add, "k", 1) == 1


def test_all_arguments_of_a_call_together_are_limited() -> None:
    config = Config(value_bytes_max=100)
    with Runtime(app, config) as runtime:
        assert runtime.client.call(two_texts, "k", "x" * 40, "y" * 40) == 80
        with pytest.raises(TooLarge):
            runtime.client.call(two_texts, "k", "x" * 90, "y" * 90)


def test_many_small_arguments_together_are_limited() -> None:
    fresh = App("fresh")

    @fresh.operator("one").register
    def count(ctx: Any, *values: Any) -> int:
        return len(values)

    with Runtime(fresh, Config(value_bytes_max=100)) as runtime:
        assert runtime.client.call(count, "k", *range(50)) == 50
        with pytest.raises(TooLarge):
            runtime.client.call(count, "k", *range(1_000))


@dataclasses.dataclass
class Fussy:
    x: int

    def __post_init__(self) -> None:
        raise LookupError(self.x)


def test_arguments_that_break_the_conversion_they_are_compared_with_are_refused() -> None:
    fresh = App("fresh")

    @fresh.operator("one").register
    def take(ctx: Any, value: Fussy) -> None: ...

    with Runtime(fresh) as runtime:
        reply = runtime.client.batch([(take, "k", {"x": 1})])[0]
        assert reply.failure is not None
        assert (reply.status, reply.failure.code) == ("refused", "bad_arguments")


SCALARS = (int, str, float, bool)
GIVEN = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.text(max_size=70),
    st.floats(),
    st.booleans(),
    st.none(),
    st.binary(max_size=70),
)


@given(st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3), st.lists(GIVEN, max_size=4))
def test_the_short_way_to_refuse_arguments_says_what_the_long_one_says(hints: list[type], given: list[Any]) -> None:
    fresh = App("fresh")
    names = ("first", "second", "third")[: len(hints)]

    def take(ctx: Any, *args: Any) -> None: ...

    own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("ctx", *names)]
    take.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    take.__annotations__ = dict(zip(names, hints, strict=True))
    function = fresh.operator("one").register(take)
    signature = Program(fresh, Config()).find(function).signature
    assert signature.trouble != signature._trouble
    assert signature.trouble(tuple(given)) == signature._trouble(tuple(given))


def test_a_large_call_can_be_repeated_with_its_request_id() -> None:
    """As large as is taken at all: the largest text that the limit lets in."""
    config = Config(value_bytes_max=100)
    for size in range(80, 101):
        with Runtime(app, config) as runtime:
            first = runtime.client.options(request_id="same").batch([(two_texts, "k", "x" * size, "")])[0]
            again = runtime.client.options(request_id="same").batch([(two_texts, "k", "x" * size, "")])[0]
            assert again == first


# --- request ids ------------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime(app) as made:
        yield made


def test_more_request_ids_than_calls_are_refused(runtime: Runtime) -> None:
    with pytest.raises(BadRequest, match="2 request ids for 1 calls"):
        runtime.client.submit(["p", "q"], [(add, "a", 1)], wait=True)
    assert runtime.client.options(request_id="q").call(add, "b", 5) == 5


def test_a_batch_larger_than_the_ids_that_are_kept_is_refused_rather_than_half_forgotten() -> None:
    with Runtime(app, Config(request_ids_max=100)) as runtime:
        with pytest.raises(TooLarge, match="only 100 request ids are kept"):
            runtime.client.options(request_id="x").batch([(add, "a", 1)] * 101)
        for _ in range(2):
            runtime.client.options(request_id="x").batch([(add, "a", 1)] * 100)
        assert runtime.state(item) == {"a": 100}


def test_many_refused_rows_cost_no_more_than_their_number(runtime: Runtime) -> None:
    calls: list[Any] = [(add, "a", "no") if row % 2 else (add, "a", 1) for row in range(60_000)]
    began = time.perf_counter()
    replies = runtime.client.options(request_id="many").batch(calls)
    again = runtime.client.options(request_id="many").batch([(add, "a", 2)] * 60_000)
    assert time.perf_counter() - began < 30  # it took minutes
    assert (replies.committed, replies[59_998].result, replies[59_999].status) == (30_000, 30_000, "refused")
    assert [reply.status for reply in again[:3]] == ["refused", "ok", "refused"]
