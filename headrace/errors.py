"""Every error Headrace raises: who erred, where, and what to do next.

An error has a stable `code` (for programs), a message (for people), `retry` (may the same call succeed later?)
and an `http_status`. Two kinds never mix: a request that is *refused* was never logged and changed nothing; a
transaction that *aborted* was logged, ran, and was undone.
"""

from __future__ import annotations

from typing import ClassVar


class HeadraceError(Exception):
    """The base class: `except HeadraceError` catches all that Headrace raises."""

    code: ClassVar[str] = "headrace_error"
    retry: ClassVar[bool] = False
    http_status: ClassVar[int] = 500


class Abort(Exception):
    """Raise it in a function to undo the whole transaction; the message is the reply."""


# --- the app's author erred -------------------------------------------------------------------------------------------


class ModelError(HeadraceError):
    """The app is defined wrongly: found when it is imported or started, never while it serves."""

    code = "bad_model"


class ConfigError(HeadraceError):
    """A setting is out of its range."""

    code = "bad_config"


# --- the caller erred: the request is refused -------------------------------------------------------------------------


class BadRequest(HeadraceError):
    """The request cannot be run as it is."""

    code = "bad_request"
    http_status = 400


class UnknownFunction(BadRequest):
    """No such operator, or no such function on it."""

    code = "unknown_function"
    http_status = 404


class BadKey(BadRequest):
    """A key is a str, an int of 64 bits or bytes, and not too long."""

    code = "bad_key"


class BadArguments(BadRequest):
    """The arguments do not fit the function's signature, in number or in type."""

    code = "bad_arguments"


class BadValue(BadRequest):
    """A value that cannot be carried unchanged: not msgpack, not a known dataclass or struct, too deep."""

    code = "bad_value"


class TooLarge(BadRequest):
    """A value, or all values of a transaction together, exceed the limit."""

    code = "too_large"
    http_status = 413


class RequestIdReused(BadRequest):
    """The request id was used before, for another call."""

    code = "request_id_reused"
    http_status = 409


class BadMessage(BadRequest):
    """Bytes that are no message of ours: cut short, of an unknown type, too large or too deep."""

    code = "bad_message"


class ReplyExpired(BadRequest):
    """It ran long ago: its reply is not kept any more."""

    code = "reply_expired"
    http_status = 410


class Forbidden(BadRequest):
    """The caller may not: a web page of another site, or a name that is not this server's."""

    code = "forbidden"
    http_status = 403


class Overloaded(HeadraceError):
    """Too many requests are waiting; nothing was logged."""

    code = "overloaded"
    retry = True
    http_status = 503


# --- the transaction ended otherwise than with a result ---------------------------------------------------------------


class LimitReached(HeadraceError):
    """A transaction made too many calls or writes, or calls too deep. It aborts even if the function catches this."""

    code = "limit_reached"
    http_status = 422


class BadCall(HeadraceError):
    """A function used its context wrongly: a call that was not awaited, an await of something else."""

    code = "bad_call"
    http_status = 422


class Aborted(HeadraceError):
    """What a client raises for a transaction that aborted: `type` and `message` of the exception, and where."""

    code = "aborted"
    http_status = 409

    def __init__(self, type: str, message: str, function: str, key: object, tid: int, cause_code: str) -> None:
        super().__init__(f"{type}: {message} (in {function} of {key!r}, TID {tid})")
        self.type, self.message, self.function, self.key, self.tid = type, message, function, key, tid
        self.cause_code = cause_code

    def __reduce__(self) -> tuple[type[Aborted], tuple[object, ...]]:  # so that it can be copied, as exceptions are
        return Aborted, (self.type, self.message, self.function, self.key, self.tid, self.cause_code)


class Poisoned(HeadraceError):
    """A function exhausted the process (memory, the Python stack): its transaction aborts by decree."""

    code = "poisoned"
    http_status = 422


# --- the machine or the operator of the system ------------------------------------------------------------------------


class AnswerTooLarge(HeadraceError):
    """The calls ran, and what committed stays; only their answers are too large for one message."""

    code = "answer_too_large"


class Stopped(HeadraceError):
    """The runtime is closed, or stopped itself because an invariant broke."""

    code = "stopped"
    retry = True
    http_status = 503


class NotDeterministic(HeadraceError):
    """A transaction that was run again, after a worker was lost, gave another result than the one that left."""

    code = "not_deterministic"


class Unreachable(HeadraceError):
    """No Headrace answers at this address."""

    code = "unreachable"
    retry = True
    http_status = 503


class StoreError(HeadraceError):
    """The store of log and snapshots refuses, or does not answer. The message names the object and what to do."""

    code = "store_error"
    retry = True
    http_status = 503


class ObjectMissing(StoreError):
    """There is no object of this name in the store."""

    code = "object_missing"
    retry = False


class StoreFull(StoreError):
    """No room is left. What was answered is safe; free some space and start again."""

    code = "store_full"


class WrongStore(StoreError):
    """The store belongs to another app or cluster, has another format, or is no store of ours."""

    code = "wrong_store"
    retry = False


class LogBroken(StoreError):
    """Records of the log that were durable cannot be read any more."""

    code = "log_broken"
    retry = False


class SnapshotBroken(StoreError):
    """A snapshot misses an object, or one is not what was written."""

    code = "snapshot_broken"
    retry = False


class Fenced(HeadraceError):
    """Another coordinator has taken over this store: this one must not answer any more."""

    code = "fenced"
    retry = True
    http_status = 503


class AppChanged(HeadraceError):
    """The app's code or types are not those that wrote the log. The message says how to upgrade."""

    code = "app_changed"


class ExternalFailed(HeadraceError):
    """An external call did not succeed, after all its tries. Raised in the function that made it, which may catch."""

    code = "external_failed"
    http_status = 424


class JavaMissing(HeadraceError):
    """Spark needs a Java 17 or 21 and none was found."""

    code = "java_missing"


class ConnectorMissing(HeadraceError):
    """Spark's Kafka connector was not found."""

    code = "connector_missing"


class StreamError(HeadraceError):
    """A DataFrame or checkpoint that `transact` cannot run on."""

    code = "bad_stream"


# What a refusal's code means to a client that got it over the wire.
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
        Overloaded,
        AnswerTooLarge,
        Stopped,
    )
}
