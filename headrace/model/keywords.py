"""Keyword arguments, put into their places: what is logged and passed on is positions only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import BadArguments
from headrace.model.function_parameters import FunctionParameters


class Keywords:
    """The names and the defaults of a function's parameters."""

    def __init__(self, parameters: FunctionParameters) -> None:
        self.names = [each.name for each in parameters]
        self.places = {
            each.name: at
            for at, each in enumerate(parameters)
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }
        self.defaults = {at: each.default for at, each in enumerate(parameters) if each.default is not each.empty}
        self.needed = [
            at for at, each in enumerate(parameters) if at not in self.defaults and each.kind is not each.VAR_POSITIONAL
        ]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], signature: object) -> tuple[Any, ...]:
        """The arguments by position. A default before a given argument is filled in; those after the last one are left
        to the function. `signature` is shown if a name is wrong."""
        given: dict[int, Any] = dict(enumerate(args))
        for name, value in kwargs.items():
            place = self.places.get(name)
            if place is None:
                raise BadArguments(f"{signature} has no parameter {self._unknown(name)}")
            if place in given:
                raise BadArguments(f"{signature} got {name!r} twice: by position and by name")
            given[place] = value
        missing = [self.names[at] for at in self.needed if at not in given]
        if missing:
            raise BadArguments(f"{signature} needs {', '.join(map(repr, missing))}")
        return tuple(given[at] if at in given else self.defaults[at] for at in range(max(given, default=-1) + 1))

    def _unknown(self, name: str) -> str:
        if name in self.names:
            return f"that is given by the name {name!r}: give it by position"
        if name == "request_id":
            return f"{name!r}; to set a call's request id, write client.options(request_id=...).call(...)"
        return repr(name)
