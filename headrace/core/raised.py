"""How a function failed: what its reply says, and where it was: a file and a line, and the frames for the log.

Rules:
1. The place is relative to the app's folder: never an absolute path. It is the innermost line of the app's own code; if
   there is none (a result that cannot be carried), it is the line where the function is defined.
2. `Abort` is the app's own word, not a bug: it has neither a place nor a trace.
3. Neither is compared in a replay (`core/outcome.py`): lines move when code is edited.

Never here: source files (the runtime shows their lines), logging.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sysconfig
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, NamedTuple

from headrace.core.bindings import Binding
from headrace.core.contexts import NO_ASYNCIO
from headrace.errors import Abort, Aborted, FunctionFailed, HeadraceError, Poisoned
from headrace.wire.messages import Failure, TracedError
from headrace.wire.values import Key

MESSAGE_CHARACTERS_MAX, NAME_CHARACTERS_MAX = 2_000, 200
FRAMES_MAX = 20  # of one exception: those in the middle are left out
CAUSES_MAX = 4  # exceptions that led to it
TRACES_MAX = 3  # of one place in one epoch; other failures are counted
TRIED_TRACES_MAX = 8  # the same, on a worker whose failures may be taken back
TEXT_CHARACTERS_MAX = 300
INSTALLED = ("/site-packages/", "/dist-packages/")
STANDARD = tuple({sysconfig.get_path(name).replace("\\", "/") + "/" for name in ("stdlib", "platstdlib")})
OWN = "headrace"
ABORTED = Aborted.code
ABORTS: dict[type, str] = {}  # kinds of `Abort` that were raised, and their names
ABORTS_MAX = 1_000
NO_LOOP = re.compile(r"^no running event loop|^There is no current event loop")  # of asyncio


def place_of(error: BaseException, body: Callable[..., Any]) -> str:
    """The file and the line, as in "shop/orders.py:41"."""
    site = site_of(body)
    file, line = site.code.co_filename, site.code.co_firstlineno
    raised: TracebackType | None = error.__traceback__
    while raised is not None:
        its = raised.tb_frame.f_code.co_filename
        if its == site.code.co_filename or is_of_app(its, raised.tb_frame.f_globals.get("__name__"), site):
            file, line = its, raised.tb_lineno
        raised = raised.tb_next
    return shown_place(file, line, site.folder)


@functools.lru_cache(maxsize=1_024)
def shown_place(file: str, line: int, folder: str) -> str:
    name = file.removeprefix(folder) if folder else file
    name = name.replace(chr(92), "/").rpartition("/")[2] if is_absolute(name) else name
    return f"{fit(name, NAME_CHARACTERS_MAX)}:{line}"


class Site(NamedTuple):
    """Where a function is defined."""

    code: CodeType
    package: str  # its first name
    folder: str  # that the package is in


@functools.lru_cache(maxsize=1_024)
def site_of(body: Callable[..., Any]) -> Site:
    body = innermost(body)
    return Site(body.__code__, str(body.__globals__.get("__name__")).partition(".")[0], folder_of(body))


def innermost(body: Any) -> Any:
    """The function itself, without decorators that name what they wrap."""
    for _ in range(100):
        wrapped = getattr(body, "__wrapped__", None)
        if wrapped is None or not hasattr(wrapped, "__code__"):
            break
        body = wrapped
    return body


def folder_of(body: Any) -> str:
    """The folder from which its module was imported, with a slash at the end; "" if it has none."""
    module, file = body.__globals__, body.__code__.co_filename.replace("\\", "/")
    name = module.get("__name__") or ""
    spec = module.get("__spec__")
    if name == "__main__" and spec is not None:
        name = spec.name
    depth = name.count(".") + file.endswith("/__init__.py")
    folders = file.rsplit("/", depth + 1)
    return folders[0] + "/" if len(folders) == depth + 2 else ""


def is_of_app(file: str, module: object, site: Site) -> bool:
    """Whether this code is the app's own: in its package, or else beside it."""
    package = str(module).partition(".")[0]
    if package == OWN:
        return False
    if package == site.package != "__main__":
        return True
    return site.folder != "" and file.startswith(site.folder) and not is_library(file)


@functools.lru_cache(maxsize=4_096)
def is_library(file: str) -> bool:
    """Whether this file is of Python itself, or of an installed package."""
    file = file.replace("\\", "/")
    return file.startswith(("<frozen ", *STANDARD)) or any(folder in file for folder in INSTALLED)


def is_absolute(file: str) -> bool:
    return file.startswith("/") or file[1:2] == ":"


def trace_of(error: BaseException, name: str, text: str) -> list[TracedError]:
    """The exception, whose text is known, and before it those that led to it."""
    chain = [traced(error, name, text)]
    cause = cause_of(error)
    while cause is not None and len(chain) < CAUSES_MAX:
        chain.append(traced(cause, *describe(cause)[1:]))
        cause = cause_of(cause)
    return chain[::-1]


def cause_of(error: BaseException) -> BaseException | None:
    """The exception that it was raised from, or while handling. One that the engine handled just then has nothing to do
    with it."""
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    context = error.__context__
    raised = None if context is None else context.__traceback__
    while raised is not None:
        if str(raised.tb_frame.f_globals.get("__name__")).partition(".")[0] != OWN:
            return context
        raised = raised.tb_next
    return None


def traced(error: BaseException, name: str, text: str) -> TracedError:
    frames: list[tuple[str, int, str]] = []
    raised, is_ours = error.__traceback__, True
    while raised is not None:
        code = raised.tb_frame.f_code
        is_ours = is_ours and str(raised.tb_frame.f_globals.get("__name__")).startswith("headrace.core.")
        if not is_ours:  # how the engine called the function tells nobody anything
            name_of_file, name_of_code = (fit(each, TEXT_CHARACTERS_MAX) for each in (code.co_filename, code.co_name))
            frames.append((name_of_file, raised.tb_lineno, name_of_code))
        raised = raised.tb_next
    if len(frames) > FRAMES_MAX:
        half = FRAMES_MAX // 2
        frames[half:-half] = [("", len(frames) - 2 * half, "")]
    return TracedError(name, fit(text + more_of(error), TEXT_CHARACTERS_MAX), frames)


def more_of(error: BaseException) -> str:
    """What an exception tells beside its text: the exceptions of a group, and notes."""
    more = ""
    with contextlib.suppress(BaseException):
        if isinstance(error, BaseExceptionGroup):
            inner = (": ".join(describe(each)[1:]) for each in error.exceptions[:CAUSES_MAX])
            more = f" [{'; '.join(inner)}]"
        more += "".join(f"\n{note}" for note in getattr(error, "__notes__", ())[:CAUSES_MAX])
    return more


class Traces:
    """Makes failures of exceptions. Of many failures of one place in an epoch, a few have a trace."""

    def __init__(self, traces_max: int = TRACES_MAX) -> None:
        self.traces_max = traces_max
        self.epoch: Any = None
        self.counts: dict[str, int] = {}  # failures of this epoch with a trace, by place

    def failure(self, error: BaseException, binding: Binding, key: Key, epoch: Any = None) -> Failure:
        """What a function raised, with its place and its trace. Nothing that the exception does can raise here."""
        kind = type(error)  # an instance may lie about its class
        try:
            known = ABORTS.get(kind)
            if known is not None:  # the common case, fast
                text = str(error)
                if type(text) is str and len(text) <= MESSAGE_CHARACTERS_MAX and text.isascii():
                    return Failure(ABORTED, known, text, binding.name, key)
        except BaseException:
            pass
        code, name, text = describe(error)
        if issubclass(kind, Abort):
            if type(kind) is type and len(ABORTS) < ABORTS_MAX:  # so it is hashable
                ABORTS[kind] = name
            return Failure(code, name, text, binding.name, key)
        if epoch is not self.epoch:
            self.epoch, self.counts = epoch, {}
        where, trace = None, None
        try:
            where = place_of(error, binding.entry.function.body)
            count = self.counts.get(where, 0)
            if count < self.traces_max:
                trace = trace_of(error, name, text)
                self.counts[where] = count + 1
        except BaseException:
            pass
        return Failure(code, name, text, binding.name, key, where, trace)

    def release(self, failure: Failure) -> None:
        """This failure is taken back: another one may have its trace."""
        if failure.trace is not None and failure.where is not None:
            self.counts[failure.where] -= 1


def without_trace(failure: Failure) -> Failure:
    return Failure(failure.code, failure.type, failure.message, failure.function, failure.key, failure.where)


def with_few_traces(failures: dict[int, Failure]) -> dict[int, Failure]:
    """The same, with a trace only for the first of each place."""
    counts: dict[str | None, int] = {}
    few = {}
    for tid, failure in failures.items():
        if failure.trace is not None:
            count = counts[failure.where] = counts.get(failure.where, 0) + 1
            failure = failure if count <= TRACES_MAX else without_trace(failure)
        few[tid] = failure
    return few


def describe(error: BaseException) -> tuple[str, str, str]:
    """Code, type and message of any exception, even one that raises when it is inspected."""
    kind = type(error)
    try:
        code, name, is_poisoned = named(kind)  # type: ignore[arg-type]  # types are hashable
    except BaseException:
        code, name, is_poisoned = code_of(kind), "Exception", issubclass(kind, MemoryError | RecursionError)
    try:
        text = str(error)
        if type(text) is not str or len(text) > MESSAGE_CHARACTERS_MAX or not text.isascii():
            text = fit(text, MESSAGE_CHARACTERS_MAX)
    except BaseException:
        text = "<an exception without a message>"
    if kind is RuntimeError and NO_LOOP.search(text):
        text = f"{text}: {NO_ASYNCIO}"
    return (Poisoned.code, Poisoned.__name__, f"{name}: {text}") if is_poisoned else (code, name, text)


def code_of(kind: type[BaseException]) -> str:
    """A function raises `Abort` on purpose; anything else is a mistake in it."""
    return Aborted.code if issubclass(kind, Abort) else FunctionFailed.code


@functools.lru_cache(maxsize=256)
def named(kind: type[BaseException]) -> tuple[str, str, bool]:
    """Code and name of a type of exceptions, and whether they are caused by memory or stack."""
    code, name = code_of(kind), "Exception"
    with contextlib.suppress(BaseException):
        code = kind.code if issubclass(kind, HeadraceError) and type(kind.code) is str else code
    with contextlib.suppress(BaseException):
        name = fit(kind.__name__, NAME_CHARACTERS_MAX)
    return code, name, issubclass(kind, MemoryError | RecursionError)


def fit(text: str, characters_max: int) -> str:
    """Make a text bounded and valid."""
    cut = text if len(text) <= characters_max else text[:characters_max] + "…"
    return str.encode(cut, "utf-8", "replace").decode()
