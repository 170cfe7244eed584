"""Places of a Decimal, against what Arrow's decimals can hold."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace import Places
from headrace.errors import ModelError
from headrace.model.fingerprint import type_text

places = st.integers(1, 38).flatmap(lambda precision: st.builds(Places, st.just(precision), st.integers(0, precision)))
digits = st.integers(-(10**39), 10**39)


def is_exact(value: Decimal, wanted: Places) -> bool:
    """Scaled up it is an integer, and its digits are few enough: with fractions, which never round."""
    scaled = Fraction(value) * 10**wanted.scale
    return scaled.denominator == 1 and abs(scaled.numerator) < 10**wanted.precision


@given(places, st.builds(lambda number, exponent: Decimal(f"{number}E{exponent}"), digits, st.integers(-45, 45)))
@example(Places(18, 2), Decimal("1.5000"))
@example(Places(18, 2), Decimal("1.505"))
@example(Places(2, 2), Decimal("0.99"))
@example(Places(2, 2), Decimal(1))
@example(Places(38, 0), Decimal(10**38 - 1))
@example(Places(5, 2), Decimal("-0E-30"))
@example(Places(5, 2), Decimal("0E+30"))
@example(Places(5, 2), Decimal("0.0010E+2"))
def test_a_value_fits_if_nothing_is_lost(wanted: Places, value: Decimal) -> None:
    assert wanted.accepts(value) == is_exact(value, wanted)
    if wanted.accepts(value):
        (found,) = pa.array([value or value + 0], pa.decimal128(wanted.precision, wanted.scale))
        assert found.as_py() == value


@pytest.mark.parametrize("text", ["NaN", "sNaN", "Infinity", "-Infinity", "1E+999999", "1E-999999"])
def test_what_is_no_number_of_these_places_does_not_fit(text: str) -> None:
    assert not Places(38, 18).accepts(Decimal(text))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((0, 0), r"Places\(0, 0\): the precision must be 1 to 38"),
        ((39, 2), r"Places\(39, 2\): the precision must be 1 to 38"),
        ((5, 6), r"the scale must be 0 to 5, the precision"),
        ((5, -1), r"the scale must be 0 to 5"),
        ((5.0, 2), r"precision and scale must be ints"),
        ((True, 0), r"precision and scale must be ints"),
        ((5, "2"), r"precision and scale must be ints"),
    ],
)
def test_wrong_places_are_refused(given: tuple[Any, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        Places(*given)


def test_places_are_part_of_a_types_text() -> None:
    assert type_text(Annotated[Decimal, Places(18, 2)]) == "Decimal with Places(18, 2)"
    assert str(Places(18, 2)) == "Places(18, 2)"
    assert Places(18, 2) == Places(18, 2) != Places(18, 3)
