"""Arguments by name, and defaults: on every way into a function they mean what Python means; what is logged is
positions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Aborted, App, Config, Context, Runtime
from headrace.core.admission import Admission, KeywordCall
from headrace.core.origin import FromClient
from headrace.core.program import Program
from headrace.errors import BadArguments, BadRequest, ModelError, UnknownFunction
from tests.cluster import Cluster
from tests.outside import SECOND, World

app = App("named")
form = app.operator("form")


@form.register
def fill(ctx: Context, a: int, b: str = "b", *, c: float = 0.5, d: tuple[int, ...] = (1, 2)) -> tuple[Any, ...]:
    ctx.put((a, b, c, d))
    return (a, b, c, d)


@form.register
def needs(ctx: Context, *, first: int, second: int) -> int:
    return first - second


@form.register
def first_by_place(ctx: Context, a: int, /, b: int = 2) -> int:
    return a * 10 + b


@form.register
def many(ctx: Context, a: int, b: int = 0, *rest: int) -> list[int]:
    return [a, b, *rest]


@form.register
def audit(ctx: Context, request_id: str, function: str = "", key: str = "", self: str = "") -> str:
    """A user's parameters may have any name."""
    return f"{request_id} {function} {key} {self}"


@form.register
async def relay(ctx: Context, how: str, to: str, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Passes arguments on, in one of the three ways."""
    if how == "call":
        return await ctx.call(function, to, *args, **kwargs)
    if how == "call_async":
        ctx.call_async(function, to, *args, **kwargs)
        return None
    return ctx.call_later(1, function, to, *args, **kwargs)


WAYS = ("call", "call_async", "call_later")
MEANT: list[tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = [
    ((1,), {}, (1,)),
    ((), {"a": 1}, (1,)),
    ((1, "x"), {}, (1, "x")),
    ((1,), {"b": "x"}, (1, "x")),
    ((), {"b": "x", "a": 1}, (1, "x")),
    ((1,), {"c": 2.0}, (1, "b", 2.0)),
    ((1, "x"), {"d": (3,)}, (1, "x", 0.5, (3,))),
    ((), {"d": (), "c": -1.0, "b": "", "a": 0}, (0, "", -1.0, ())),
]
FILL = "form.fill(a: int, b: str, c: float, d: tuple[int, ...])"
WRONG = {
    "unknown": ("form.fill", (1,), {"e": 5}, f"{FILL} has no parameter 'e'"),
    "missing": ("form.fill", (), {"b": "x"}, f"{FILL} needs 'a'"),
    "one of two missing": ("form.needs", (), {"first": 1}, "needs 'second'"),
    "doubled": ("form.fill", (1,), {"a": 1}, f"{FILL} got 'a' twice: by position and by name"),
    "of another type": ("form.fill", (1,), {"c": "x"}, f"{FILL}: 'c': wanted float, found 'x' (str)"),
    "by position only": ("form.first_by_place", (), {"a": 1}, "has no parameter that is given by the name 'a'"),
    "of the rest": ("form.many", (1,), {"rest": 1}, "has no parameter that is given by the name 'rest'"),
    "too many": ("form.needs", (1, 2, 3), {}, "takes 2 arguments, got 3"),
    "a request id": ("form.needs", (1, 2), {"request_id": "x"}, "client.options(request_id=...)"),
}


@pytest.fixture(scope="module")
def runtime() -> Any:
    with Runtime(app) as made:
        yield made


@pytest.mark.parametrize(("args", "kwargs", "logged"), MEANT, ids=str)
def test_what_is_logged_is_positions_and_defaults_only_where_a_later_one_is_given(
    runtime: Runtime, args: Any, kwargs: Any, logged: Any
) -> None:
    admission = Admission(Program(app, Config()))
    batch = admission.admit(FromClient("x"), [KeywordCall(fill, "k", args, kwargs)])
    assert not batch.refused
    (entry,), (given_args,) = batch.entries, batch.args
    sealed = entry is entry.sealed
    assert (admission.program.values.decode(given_args[0]) if sealed else given_args) == logged
    everything = fill(Written(), *args, **kwargs)
    assert runtime.client.call(fill, "k", *args, **kwargs) == everything
    assert asyncio.run(runtime.client.acall(fill, "k", *args, **kwargs)) == everything
    assert runtime.client.call("form.fill", "k", *args, **kwargs) == everything
    assert runtime.get(form, "k") == everything


class Written(Context):
    """Enough of a context to call a function as a plain one."""

    def put(self, value: Any) -> None: ...


Written.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_between_functions_names_and_defaults_mean_the_same_with_any_number_of_workers(how: str, workers: int) -> None:
    world = World(app, workers)
    for at, (args, kwargs, _) in enumerate(MEANT):
        reply = world.call(relay, "root", how, f"k{at}", "form.fill", args, kwargs)
        if how == "call":
            assert reply == fill(Written(), *args, **kwargs)
    world.until(world.now_us + 2 * SECOND)
    expected = {f"k{at}": fill(Written(), *args, **kwargs) for at, (args, kwargs, _) in enumerate(MEANT)}
    assert {key: state for (name, key), state in world.state().items() if name == "form"} == expected


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_name_is_refused_with_the_signature(runtime: Runtime, wrong: str) -> None:
    function, args, kwargs, message = WRONG[wrong]
    with pytest.raises(BadArguments) as caught:
        runtime.client.call(function, "k", *args, **kwargs)
    assert message in str(caught.value)
    assert str(caught.value).startswith(function)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_name_between_functions_aborts_in_every_mode_alike(runtime: Runtime, wrong: str, how: str) -> None:
    function, args, kwargs, message = WRONG[wrong]
    call = (relay, "k", how, "k2", function, args, kwargs)
    with pytest.raises(Aborted, match="BadArguments") as caught:
        runtime.client.call(*call)
    assert message in str(caught.value)
    for seed in range(3):
        (reply,) = Cluster(app, 3, seed=seed).run([call])
        assert reply.failure is not None
        assert (reply.failure.type, reply.failure.message) == ("BadArguments", caught.value.message)


def test_an_unknown_function_is_told_before_its_arguments_are_looked_at(runtime: Runtime) -> None:
    with pytest.raises(UnknownFunction, match="no function 'nothing'"):
        runtime.client.call("form.nothing", "k", a=1)
    with pytest.raises(Aborted, match="UnknownFunction"):
        runtime.client.call(relay, "k", "call_async", "k", "form.nothing", (), {"a": 1})


def test_a_users_parameter_may_have_the_name_of_an_option(runtime: Runtime) -> None:
    client = runtime.client.options(request_id="ours")
    told = client.call(audit, "k", request_id="theirs", function="f", key="k", self="me")
    assert told == "theirs f k me"
    assert runtime.client.options(request_id="ours").batch([(audit, "k", "x")])[0].status == "ok"  # "ours/0" is another
    with pytest.raises(BadRequest, match="used for another call"):
        client.call(audit, "k", request_id="others")


def test_keyword_only_parameters_have_places_after_the_others(runtime: Runtime) -> None:
    """In a batch, in JSON lists and in columns, where there are only places."""
    assert runtime.client.batch([(needs, "k", 5, 3)]).results == [2]
    assert runtime.client.call(needs, "k", second=3, first=5) == 2
    assert runtime.client.call(many, "k", b=2, a=1) == [1, 2]
    assert runtime.client.call(first_by_place, "k", 1, b=5) == 15


def twin(a: int, b: str = "b", c: float = 0.5, d: tuple[int, ...] = (1, 2)) -> tuple[Any, ...]:
    """The parameters of `fill`, each by position or by name."""
    return (a, b, c, d)


VALUES: dict[str, Callable[[], Any]] = {
    "a": lambda: st.integers(0, 9),
    "b": lambda: st.sampled_from(["x", "b", ""]),
    "c": lambda: st.sampled_from([0.5, 1.5]),
    "d": lambda: st.sampled_from([(), (1, 2), (3,)]),
    "e": lambda: st.integers(),
}


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_arguments_are_bound_as_python_binds_them(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 5))
    args = tuple(data.draw(VALUES[name]()) for name in "abcde"[:count])
    names = data.draw(st.lists(st.sampled_from("abcde"), unique=True))
    kwargs = {name: data.draw(VALUES[name]()) for name in names}
    batch = ADMISSION.admit(FromClient("x"), [KeywordCall(fill, "k", args, kwargs)])
    try:
        bound = inspect.signature(twin).bind(*args, **kwargs)
    except TypeError:
        assert [failure.type for failure in batch.refused.values()] == ["BadArguments"]
        return
    assert not batch.refused
    entry, logged = batch.entries[0], batch.args[0]
    placed = ADMISSION.program.values.decode(logged[0]) if entry is entry.sealed else logged
    assert twin(*placed) == twin(*bound.args, **bound.kwargs)
    assert len(placed) == max(["abcd".index(name) + 1 for name in bound.arguments], default=0)


ADMISSION = Admission(Program(app, Config()))


def test_options_are_a_view_of_the_client_and_refuse_what_they_do_not_know(runtime: Runtime) -> None:
    client = runtime.client
    assert type(client.options()) is type(client)
    mine = client.options(request_id="mine")
    assert mine.batch([(needs, "k", 5, 3)])[0].request_id == "mine/0"
    assert client.batch([(needs, "k", 5, 3)])[0].request_id != "mine/0"
    assert mine.options().batch([(needs, "k", 5, 3)])[0].request_id != "mine/0"
    assert client.options(request_id="columns").map(needs, ["k"], [(5, 3)])[0].request_id == "columns/0"
    assert asyncio.run(client.options(request_id="later").abatch([(needs, "k", 5, 3)]))[0].request_id == "later/0"
    with pytest.raises(BadRequest, match="a client has no option 'requestid'; it has: request_id"):
        client.options(requestid="x")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="must be a str, not 5"):
        client.options(request_id=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        client.batch([], request_id="x")  # type: ignore[call-arg]


def test_a_schedule_takes_names_too_and_its_own_name_is_an_option() -> None:
    scheduled = App("scheduled")
    operator = scheduled.operator("form")
    function = operator.register(fill.body)
    assert scheduled.every(60, function, "k", 1, c=2.0).args == (1, "b", 2.0)
    assert scheduled.options(name="other").every(60, function, "k", b="x", a=1).name == "other"
    with pytest.raises(ModelError, match=r"has no parameter 'name'.*app\.options\(name=\"\.\.\.\"\)\.every"):
        scheduled.options(name="third").every(60, function, "k", 1, name="x")
    with pytest.raises(ModelError, match=r"two schedules named fill: name one of them, as in app\.options"):
        scheduled.every(60, function, "k", 1)
    with pytest.raises(ModelError, match="an app has no option 'nam'; it has: name"):
        scheduled.options(nam="x")  # type: ignore[arg-type]
