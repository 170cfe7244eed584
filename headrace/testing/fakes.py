"""Fake externals: they record what was asked, and answer with what the test has given.

A fake is asked as the real function would be: with the idempotency key before the arguments, and again, with the same
key, up to the `tries` of `app.external` if it raises. Between two tries no time passes.

Never here: threads, the real functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

from headrace.core.events import Perform, Responded
from headrace.errors import HeadraceError, ModelError
from headrace.model.app import App, External
from headrace.runtime.externals import Externals
from headrace.wire.values import Values


class MissingFake(HeadraceError):
    """A function called an external for which the test has given no answer."""

    code: ClassVar[str] = "missing_fake"


class FakeCall(NamedTuple):
    """One try of an external call."""

    key: str  # the idempotency key
    args: tuple[Any, ...]


class FakeExternal:
    """Stands for one external function of the app."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[FakeCall] = []  # every try, in order
        self._function: Callable[..., Any] | None = None
        self._failures = 0  # tries that fail before the function is asked
        self._why = ""

    @property
    def args(self) -> list[tuple[Any, ...]]:
        """The arguments of every try, in order."""
        return [call.args for call in self.calls]

    def returns(self, *results: Any) -> Self:
        """Answer with these results, one after the other. The last one is for all later calls, too."""
        if not results:
            raise ModelError(f"the fake of {self.name}: returns() needs at least one result")
        left = list(results)
        return self.runs(lambda key, *args: left.pop(0) if len(left) > 1 else left[0])

    def runs(self, function: Callable[..., Any]) -> Self:
        """Answer with what `function(idempotency_key, *args)` returns or raises."""
        self._function, self._failures = function, 0
        return self

    def fails(self, why: str = "it does not answer", times: int | None = None) -> Self:
        """Fail: the next `times` tries, or all."""
        if times is None:
            return self.runs(failing(why))
        self._failures, self._why = times, why
        return self

    def __call__(self, key: str, *args: Any) -> Any:
        self.calls.append(FakeCall(key, args))
        if self._failures:
            self._failures -= 1
            raise ConnectionError(self._why)
        assert self._function is not None
        return self._function(key, *args)

    def check(self) -> None:
        """Raise if there is no answer to give."""
        if self._function is None and not self._failures:
            raise MissingFake(
                f"the app called the external {self.name!r}, and the test has no answer for it: give one, as in "
                f'runtime.external("{self.name}").returns(...)'
            )


class FakeExternals(Externals):
    """Answers at once, in the thread of the caller."""

    def __init__(self, app: App, values: Values, given: Mapping[str, Any], tell: Callable[[Responded], None]) -> None:
        super().__init__(app, values, "test", tell)
        self.fakes: dict[str, FakeExternal] = {}
        for name, answer in given.items():
            fake = self.find(name)
            if isinstance(answer, BaseException):
                fake.runs(raising(answer))
            elif callable(answer):
                fake.runs(answer)
            else:
                fake.returns(answer)

    def find(self, name: str) -> FakeExternal:
        if name not in self.app.externals:
            known = ", ".join(self.app.externals) or "none"
            raise ModelError(f"app {self.app.name!r} has no external {name!r}; it has: {known}")
        return self.fakes.setdefault(name, FakeExternal(name))

    def respond(self, effect: Perform) -> Responded:
        """The response to a call, after all tries."""
        if effect.name in self.app.externals:
            self.find(effect.name).check()
        return self._respond(effect)

    def _try(self, external: External, key: str, args: tuple[Any, ...]) -> Responded | str:
        fake = self.find(external.name)
        fake.check()
        return self._attempt(external, fake, key, args)

    def _pause(self, seconds: float) -> bool:
        return False


def failing(why: str) -> Callable[..., Any]:
    return raising(ConnectionError(why))


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(key: str, *args: Any) -> Any:
        raise error

    return fail
