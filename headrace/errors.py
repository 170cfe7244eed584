"""Every error that Headrace raises. Each message says what is wrong, where, and what to do next.

An error has a stable `code` (for programs), a message (for people), `retry` (may the same call succeed later?) and an
`http_status`. A *refused* request was never logged and changed nothing. An *aborted* transaction was logged, ran and
was undone. Two errors concern only the reply to calls that ran: `ReplyExpired` and `AnswerTooLarge`.
"""

from __future__ import annotations

from typing import ClassVar


class HeadraceError(Exception):
    """The base class: `except HeadraceError` catches every error that Headrace raises."""

    code: ClassVar[str] = "headrace_error"
    retry: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    row: int | None = None  # of a batch: the call that failed (`Replies.raise_any`)


class Abort(Exception):
    """Raise it in a function, or an exception derived from it, to undo the whole transaction; the message is the
    reply."""


# --- errors in the app ------------------------------------------------------------------------------------------------


class ModelError(HeadraceError):
    """The app is defined incorrectly: found when it is imported or started, never while it serves."""

    code = "bad_model"


class ConfigError(HeadraceError):
    """A setting is out of its range."""

    code = "bad_config"
    http_status = 400


# --- errors in a request: it is refused -------------------------------------------------------------------------------


class BadRequest(HeadraceError):
    """The request cannot be run as it is."""

    code = "bad_request"
    http_status = 400


class UnknownFunction(BadRequest):
    """The operator does not exist, or has no such function."""

    code = "unknown_function"
    http_status = 404


class BadKey(BadRequest):
    """The key is not a str, a 64-bit int or bytes, or it is too long."""

    code = "bad_key"


class BadArguments(BadRequest):
    """The arguments do not fit the function's signature, in number or in type."""

    code = "bad_arguments"


class BadValue(BadRequest):
    """A value cannot be carried unchanged: not msgpack, not a known dataclass or struct, or nested too deep."""

    code = "bad_value"


class TooLarge(BadRequest):
    """A value, or all values of a transaction together, exceed the limit."""

    code = "too_large"
    http_status = 413


class RequestIdReused(BadRequest):
    """The request id was used before, for a different call."""

    code = "request_id_reused"
    http_status = 409


class BadMessage(BadRequest):
    """The bytes are not a Headrace message: truncated, of an unknown type, too large or nested too deep."""

    code = "bad_message"


class ReplyExpired(BadRequest):
    """The request ran long ago, and its reply is no longer kept."""

    code = "reply_expired"
    http_status = 410


class Forbidden(BadRequest):
    """The host or the origin of the request is not allowed: a web page of another site, or another host name."""

    code = "forbidden"
    http_status = 403


class MethodNotAllowed(BadRequest):
    """This address does not take requests of this method."""

    code = "method_not_allowed"
    http_status = 405

    def __init__(self, message: str, allowed: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed


class Overloaded(HeadraceError):
    """Too many requests are waiting; this one was not logged."""

    code = "overloaded"
    retry = True
    http_status = 503


# --- the transaction ended without a result ---------------------------------------------------------------------------


class LimitReached(HeadraceError):
    """A transaction made too many calls or writes, or calls too deep. It aborts even if the function catches this."""

    code = "limit_reached"
    http_status = 422


class BadCall(HeadraceError):
    """A function used its context incorrectly: it did not await a call, or awaited something else."""

    code = "bad_call"


class Aborted(HeadraceError):
    """Raised by a client for a transaction that aborted: the exception's `type` and `message`, and where."""

    code = "aborted"
    http_status = 409

    def __init__(
        self,
        type: str,
        message: str,
        function: str,
        key: object,
        tid: int,
        cause_code: str,
        where: str | None = None,
        call: str = "",
    ) -> None:
        """`where` is the file and the line in the app; `call` says which call of a batch it was."""
        place = "" if where is None else f", {where}"
        super().__init__(f"{call}{type}: {message} (in {function} of {key!r}{place}, TID {tid})")
        self.type, self.message, self.function, self.key, self.tid = type, message, function, key, tid
        self.cause_code, self.where, self.call = cause_code, where, call

    def __reduce__(self) -> tuple[type[Aborted], tuple[object, ...], dict[str, object]]:  # so that it can be copied
        args = (self.type, self.message, self.function, self.key, self.tid, self.cause_code, self.where, self.call)
        return Aborted, args, vars(self)


class FunctionFailed(HeadraceError):
    """A function raised an exception that is not an `Abort`: most likely a bug. Only its code is used; clients raise
    `Aborted`."""

    code = "function_failed"


class Poisoned(HeadraceError):
    """A function ran out of memory or stack, did not return within `wall_limit_us`, or crashed its worker repeatedly.
    Its transaction aborts, and the log records that (a decree), so it also aborts in every replay."""

    code = "poisoned"
    http_status = 422


# --- errors of the machine, the store or the installation -------------------------------------------------------------


class AnswerTooLarge(HeadraceError):
    """The calls ran, and what committed stays; only the answers are too large for one message."""

    code = "answer_too_large"


class Stopped(HeadraceError):
    """The runtime is closed, or has stopped itself because of an error."""

    code = "stopped"
    retry = True
    http_status = 503


class Stuck(Stopped):
    """A function did not return within `wall_limit_us` and could not be interrupted, so the runtime stopped itself. Its
    transaction aborts by decree; with a store, a new start goes on after it."""

    code = "stuck"


class NotDeterministic(HeadraceError):
    """A transaction that was run again, after a crash or a lost worker, gave a different result from the first one,
    which may have been sent already."""

    code = "not_deterministic"


class Unreachable(HeadraceError):
    """There is no Headrace server at this address."""

    code = "unreachable"
    retry = True
    http_status = 503


class StoreError(HeadraceError):
    """The store of the log and snapshots refuses, or does not answer. The message names the object and what to do."""

    code = "store_error"
    retry = True
    http_status = 503


class ObjectMissing(StoreError):
    """There is no object of this name in the store."""

    code = "object_missing"
    retry = False


class StoreFull(StoreError):
    """No space is left. What was answered is safe; free some space and start again."""

    code = "store_full"


class WrongStore(StoreError):
    """The store belongs to another app or cluster, has another format, or is not a Headrace store."""

    code = "wrong_store"
    retry = False


class LogBroken(StoreError):
    """Records of the log that were durable can no longer be read."""

    code = "log_broken"
    retry = False


class SnapshotBroken(StoreError):
    """An object of a snapshot is missing, or is not what was written."""

    code = "snapshot_broken"
    retry = False


class Fenced(HeadraceError):
    """Another process has taken over this store. This one must stop answering."""

    code = "fenced"
    retry = True
    http_status = 503


class AppChanged(HeadraceError):
    """The app's code or types are not those that wrote the log. The message says how to upgrade."""

    code = "app_changed"


class ExternalFailed(HeadraceError):
    """All attempts of an external call failed. Raised in the function that made the call, which may catch it."""

    code = "external_failed"
    http_status = 424


class JavaMissing(HeadraceError):
    """Spark needs Java 17 or 21, and none was found."""

    code = "java_missing"


class ConnectorMissing(HeadraceError):
    """Spark's Kafka connector was not found."""

    code = "connector_missing"


class StreamError(HeadraceError):
    """A DataFrame, a checkpoint or an option that a Spark source or sink cannot use, or a batch that is blocked."""

    code = "bad_stream"


# The errors that a client raises for the code of a refusal that it got over HTTP.
REFUSALS: dict[str, type[HeadraceError]] = {
    error.code: error
    for error in (
        BadRequest,
        UnknownFunction,
        BadKey,
        BadArguments,
        BadValue,
        TooLarge,
        RequestIdReused,
        BadMessage,
        ReplyExpired,
        Forbidden,
        MethodNotAllowed,
        ConfigError,
        Overloaded,
        AnswerTooLarge,
        Stopped,
    )
}
