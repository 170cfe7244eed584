"""Settings, names, functions and records that cannot be are refused when they are made."""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from decimal import Decimal
from typing import Any

import pytest

from headrace import App, Config, Runtime
from headrace.errors import Aborted, BadKey, ConfigError, ModelError, UnknownFunction
from tests.core.shop import app, item


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch_transactions_max": 0},
        {"calls_max": -1},
        {"depth_max": 1.5},
        {"value_bytes_max": True},
        {"key_bytes_max": "10"},
        {"request_ids_max": -1},
        {"epoch_interval_us": -1},
        {"pending_transactions_max": 1 << 62},
        {"value_depth_max": 201},
        {"transaction_bytes_max": None},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name) as caught:
        Config(**wrong)
    assert caught.value.code == "bad_config"


def test_the_least_settings_are_allowed() -> None:
    zero = {"epoch_interval_us", "request_id_retention_us", "request_ids_max"}
    Config(**{field.name: 0 if field.name in zero else 1 for field in dataclasses.fields(Config)})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().calls_max = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", "1a", "a b", "a.b", "é", 5, None, "a\n"])
def test_a_bad_name_of_an_app_or_operator_is_a_model_error(name: Any) -> None:
    with pytest.raises(ModelError):
        App(name)
    with pytest.raises(ModelError):
        App("fine").operator(name)


def test_a_name_is_given_only_once() -> None:
    fresh = App("fresh")
    operator = fresh.operator("one")
    with pytest.raises(ModelError, match=r"operator one .*notebook, run the cell with App\(...\) first"):
        fresh.operator("one")

    def twice(ctx: Any) -> None: ...

    operator.register(twice)
    with pytest.raises(
        ModelError, match=r"one.twice is registered twice.*notebook, run the cell with App\(...\) first"
    ):
        operator.register(twice)


def no_context() -> None: ...


def starred(*ctx: Any) -> None: ...


def keyword_after_rest(ctx: Any, *rest: int, needed: int) -> None: ...


def keywords(ctx: Any, **more: Any) -> None: ...


def generates(ctx: Any) -> Any:
    yield 1


async def generates_async(ctx: Any) -> Any:
    yield 1


@pytest.mark.parametrize(
    "body",
    [no_context, starred, keyword_after_rest, keywords, generates, generates_async, lambda ctx: 1, len, 5, None, int],
    ids=lambda body: getattr(body, "__name__", str(body)),
)
def test_what_cannot_be_a_function_is_a_model_error(body: Any) -> None:
    with pytest.raises(ModelError):
        App("fresh").operator("one").register(body)


def without_context(amount: int) -> None: ...


def without_context_of_lists(amounts: list[int], more: int) -> None: ...


@pytest.mark.parametrize("body", [without_context, without_context_of_lists])
def test_a_function_whose_first_parameter_is_a_value_is_told_to_take_the_context(body: Any) -> None:
    for annotation in (body.__annotations__, {"amount": int, "amounts": list[int]}):  # as text, and as types
        body.__annotations__ = annotation
        with pytest.raises(ModelError, match=rf"must be the context, but 'amounts?' .* def {body.__name__}\(ctx, "):
            App("fresh").operator("one").register(body)


def test_a_function_that_was_registered_and_not_kept_is_told_how() -> None:
    fresh = App("fresh")
    one = fresh.operator("one")

    def put(ctx: Any, value: int) -> int:
        ctx.put(value)
        return value

    def forward(ctx: Any) -> None:
        ctx.call_async(put, "k", 1)

    kept = one.register(put)
    relay = one.register(forward)
    advice = r"put is the plain function; one.register returned .* write @one.register above the def, or put = one.reg"
    with Runtime(fresh) as runtime:
        with pytest.raises(UnknownFunction, match=advice):
            runtime.client.call(put, "k", 1)
        with pytest.raises(Aborted, match=advice):
            runtime.client.call(relay, "k")
        assert runtime.client.call(kept, "k", 1) == 1
    with pytest.raises(ModelError, match="keep what register returns"):
        fresh.every(60, put, "k", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key", [uuid.UUID(int=1), datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2), Decimal("1.5"), ("a", 1)]
)
def test_a_key_that_has_a_text_is_told_to_use_it(key: Any) -> None:
    with (
        Runtime(app) as runtime,
        pytest.raises(BadKey, match=r"must be a str, an int or bytes.*: use str\(...\)$"),
    ):
        runtime.client.call("item.add", key, 1)


@dataclasses.dataclass
class Loose:
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Firm:
    counts: Any = ()


@pytest.mark.parametrize(
    "default", [[], {"a": 1}, set(), bytearray(), Loose(), (1, []), Firm([1])], ids=lambda default: repr(default)
)
def test_a_default_that_can_change_is_a_model_error_that_says_what_to_write(default: Any) -> None:
    def take(ctx: Any, items: Any = default) -> None: ...

    with pytest.raises(ModelError, match=r"one\.take: the default of 'items' is .* write items=None"):
        App("fresh").operator("one").register(take)


@pytest.mark.parametrize("default", [None, 0, "a", (1, "b"), frozenset({1}), Firm((1, 2)), datetime.timedelta(1)])
def test_a_default_that_cannot_change_is_allowed(default: Any) -> None:
    def take(ctx: Any, items: Any = default, *, named: Any = default) -> None: ...

    App("fresh").operator("one").register(take)


@pytest.mark.parametrize("setting", ["combine", "partition_by"])
def test_a_combine_or_partition_by_that_cannot_be_called_is_a_model_error(setting: str) -> None:
    with pytest.raises(ModelError, match=setting):
        App("fresh").operator("one", **{setting: 5})


@pytest.mark.parametrize("annotation", ["Nowhere", "types.Nothing", "list[", "5 +", "int.nothing"])
def test_an_annotation_that_cannot_be_resolved_is_a_model_error(annotation: str) -> None:
    fresh = App("fresh")

    def take(ctx: Any, value: Any) -> None: ...

    take.__annotations__["value"] = annotation
    fresh.operator("one").register(take)
    with pytest.raises(ModelError, match="take"):
        Runtime(fresh)


@dataclasses.dataclass
class Dangling:
    other: Nowhere  # type: ignore[name-defined]  # noqa: F821


def test_a_record_whose_annotation_cannot_be_resolved_is_a_model_error() -> None:
    fresh = App("fresh")
    fresh.operator("one", state=Dangling)
    with pytest.raises(ModelError, match="Dangling"):
        Runtime(fresh)


def test_two_records_of_one_name_are_a_model_error() -> None:
    fresh = App("fresh")
    for _ in range(2):
        fresh.record(dataclasses.make_dataclass("Same", [("x", int)]))
    with pytest.raises(ModelError, match="Same"):
        Runtime(fresh)


@pytest.mark.parametrize("what", [int, 5, object, "Point"])
def test_what_is_no_record_is_a_model_error(what: Any) -> None:
    with pytest.raises(ModelError):
        App("fresh").record(what)


def test_a_runtime_takes_an_app() -> None:
    with pytest.raises(ModelError):
        Runtime("bank")  # type: ignore[arg-type]


def test_asking_for_the_state_of_nobody_is_typed() -> None:
    with Runtime(app) as runtime:
        with pytest.raises(UnknownFunction, match="nobody"):
            runtime.state("nobody")
        with pytest.raises(BadKey):
            runtime.get(item, 1.5)
        assert runtime.get(item, "nothing", "default") == "default"
