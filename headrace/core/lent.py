"""What the code of a function shows: whether it could keep its context, and whether it passes keyword arguments.

A context is for one call, and raises if it is used after it.

The engine uses a context again for the next call, so a kept one would act on another call's entity. Most functions
only ever write `ctx.something(...)`, and cannot keep it: their code is read once, and they get the context itself. The
others get a `LentContext`, a new one for each call, which ends with the call.

Never here: running functions.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, Never

from headrace.errors import BadCall
from headrace.model.context import Context

PLAIN = frozenset(("tid", "now", "random", "key"))  # attributes that are not methods
SEEING_ALL = frozenset(("locals", "vars", "eval", "exec", "dir", "globals", "_getframe", "currentframe", "stack"))
WITH_KEYWORDS = frozenset(("KW_NAMES", "CALL_KW", "CALL_FUNCTION_KW", "CALL_FUNCTION_EX"))
METHOD_BIT = 0 if "PRECALL" in dis.opmap else 1  # of LOAD_ATTR, from 3.12 on: it takes a method to call it at once

Body = Callable[..., Any]


# --- which functions --------------------------------------------------------------------------------------------------


def may_keep(body: Any) -> bool:
    """Whether a function could keep its context. False only if its code shows that it does not."""
    code = getattr(body, "__code__", None)
    return code is None or not code.co_varnames or code.co_argcount == 0 or code_may_keep(code)


@functools.lru_cache(4096)
def code_may_keep(code: CodeType) -> bool:
    name = code.co_varnames[0]
    if name in code.co_cellvars or not SEEING_ALL.isdisjoint(code.co_names):  # another function has it, or sees it
        return True
    steps = list(dis.get_instructions(code))
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if name in str(step.argval) and step.opname.startswith(("LOAD_FAST_", "STORE_FAST", "DELETE_FAST")):
            return True  # several variables at once, in newer Pythons; or it is given another value
        if step.opname == "LOAD_FAST" and step.argval == name and not is_use(following):
            return True
    return False


def uses_keywords(body: Any) -> bool:
    """Whether a function could pass keyword arguments to anything that it calls."""
    code = getattr(body, "__code__", None)
    return code is None or code_uses_keywords(code)


@functools.lru_cache(4096)
def code_uses_keywords(code: CodeType) -> bool:
    return any(step.opname in WITH_KEYWORDS for step in dis.get_instructions(code))


def is_use(step: dis.Instruction | None) -> bool:
    """Whether this instruction takes a method to call it at once, or a plain attribute."""
    if step is None:
        return False
    if step.opname == "LOAD_METHOD":
        return True
    return step.opname == "LOAD_ATTR" and (bool((step.arg or 0) & METHOD_BIT) or step.argval in PLAIN)


# --- what they get ----------------------------------------------------------------------------------------------------


def method(name: str) -> Any:
    def use(self: LentContext, *args: Any, **kwargs: Any) -> Any:
        context = self._context
        if context is None:
            self._refuse()
        return getattr(context, name)(*args, **kwargs)

    return use


def attribute(name: str) -> Any:
    def use(self: LentContext) -> Any:
        context = self._context
        if context is None:
            self._refuse()
        return getattr(context, name)

    return property(use)


class LentContext(Context[Any]):
    """The context of one call, until the call ends."""

    __slots__ = ("_context", "_function", "key")

    def __init__(self, context: Any, function: str) -> None:
        self._context, self._function, self.key = context, function, context.key

    def _refuse(self) -> Never:
        raise BadCall(
            f"the context of a call of {self._function} is used after the call: a context is for one call only. Keep "
            "what you need of it, such as ctx.key, and use the context of the call that runs now"
        )

    tid, now, random = map(attribute, ("tid", "now", "random"))
    get, put, delete, merge, uuid = map(method, ("get", "put", "delete", "merge", "uuid"))
    call, call_async, call_later, cancel = map(method, ("call", "call_async", "call_later", "cancel"))
    call_external, send_external = map(method, ("call_external", "send_external"))


def lending(body: Body, name: str, is_async: bool) -> Body:
    """The same function, which gets a context that ends with the call."""

    def run(context: Any, *args: Any) -> Any:
        lent = LentContext(context, name)
        try:
            return body(lent, *args)
        finally:
            lent._context = None

    async def run_async(context: Any, *args: Any) -> Any:
        lent = LentContext(context, name)
        try:
            return await body(lent, *args)
        finally:
            lent._context = None

    return run_async if is_async else run
