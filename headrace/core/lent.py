"""Contexts that functions keep: a context is for one call, and raises if it is used after it.

Contexts are reused for the next call, so a kept one would act on another call's entity. Watching every call would cost
every call. So the code of a function is read once: most functions only ever write `ctx.something(...)`, and cannot keep
it. The contexts of the others are replaced after each epoch, and the old ones raise from then on.

Never here: running functions.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType
from typing import Any, Never

from headrace.errors import BadCall

USES = (
    *("get", "put", "delete", "merge", "expire", "uuid"),
    *("call", "call_async", "call_later", "cancel", "call_external", "send_external"),
)
PROPERTIES = ("tid", "now", "random")
PLAIN = frozenset((*PROPERTIES, "key"))  # attributes that are not methods


def may_keep(body: Any) -> bool:
    """Whether a function could keep its context. False only if its code shows that it does not."""
    code = getattr(body, "__code__", None)
    return code is None or not code.co_varnames or code.co_argcount == 0 or code_may_keep(code)


@functools.lru_cache(4096)
def code_may_keep(code: CodeType) -> bool:
    name = code.co_varnames[0]
    if name in code.co_cellvars:  # a function inside it has it
        return True
    steps = list(dis.get_instructions(code))
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if name in str(step.argval) and step.opname.startswith(("LOAD_FAST_", "STORE_FAST", "DELETE_FAST")):
            return True  # several variables at once, in newer Pythons; or it is given another value
        if step.opname == "LOAD_FAST" and step.argval == name and not is_use(following):
            return True
    return False


def is_use(step: dis.Instruction | None) -> bool:
    """Whether this instruction takes a method to call it at once, or a plain attribute."""
    if step is None:
        return False
    is_call = step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and step.argrepr.startswith("NULL|self"))
    return is_call or (step.opname == "LOAD_ATTR" and step.argval in PLAIN)


def expire(context: Any) -> None:
    """From now on, the context raises."""
    if not isinstance(context, Expired):
        kind: Any = type(context)
        context.__class__ = expired(kind)


class Expired:
    """A mixin: a context after its call."""

    __slots__ = ()


@functools.cache
def expired(kind: Any) -> type:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Never:
        name = self._binding.name
        raise BadCall(
            f"the context of a call of {name} is used after the call: a context is for one call only. Keep what you "
            "need of it, such as ctx.key, and use the context of the call that runs now"
        )

    names: dict[str, Any] = {"__slots__": (), **dict.fromkeys(USES, refuse)}
    names |= dict.fromkeys(PROPERTIES, property(refuse))
    return type(f"Expired{kind.__name__}", (Expired, kind), names)
