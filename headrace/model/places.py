"""Places: how many digits a Decimal has, and how many of them are behind the point."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import Any, ClassVar

from headrace.errors import ModelError

PRECISION_MAX = 38  # what a Spark column can hold


@dataclasses.dataclass(frozen=True, repr=False)
class Places:
    """For `Annotated[Decimal, Places(18, 2)]`: at most 18 digits, of which 2 are behind the point. In Spark that is
    `decimal(18,2)`. A value that does not fit is refused, never rounded."""

    of: ClassVar[type] = Decimal
    precision: int
    scale: int

    def __post_init__(self) -> None:
        if type(self.precision) is not int or type(self.scale) is not int:
            raise ModelError(f"{self}: precision and scale must be ints")
        if not 1 <= self.precision <= PRECISION_MAX:
            raise ModelError(f"{self}: the precision must be 1 to {PRECISION_MAX}")
        if not 0 <= self.scale <= self.precision:
            raise ModelError(f"{self}: the scale must be 0 to {self.precision}, the precision")

    def accepts(self, value: Any) -> bool:
        """Whether a Decimal has these places without being rounded. Zeros at the end do not count; NaN and infinity
        never fit. What is no Decimal, such as None, is for its type to accept."""
        if type(value) is not Decimal:
            return True
        _, digits, exponent = value.as_tuple()
        if not isinstance(exponent, int):
            return False
        if not value:
            return True
        behind = -self.scale - exponent  # digits that there is no place for
        if behind > 0 and any(digits[-behind:]):
            return False
        return value.adjusted() < self.precision - self.scale

    def __repr__(self) -> str:
        """Part of the fingerprint of a type."""
        return f"Places({self.precision}, {self.scale})"
