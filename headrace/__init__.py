"""Headrace: transactional stateful functions on live data. The log is the serial order."""

from typing import TYPE_CHECKING, Any

from headrace.config import Config
from headrace.errors import Abort, Aborted, ExternalFailed, HeadraceError
from headrace.model.app import App
from headrace.model.context import Context
from headrace.model.operator import Function, Operator
from headrace.model.places import Places
from headrace.runtime.client import Client, Replies, Reply
from headrace.runtime.inprocess import Runtime

if TYPE_CHECKING:
    from headrace.runtime.cluster import Cluster

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Cluster":  # imported on demand: only several workers need ZeroMQ
        from headrace.runtime.cluster import Cluster

        return Cluster
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


__all__ = [
    "Abort",
    "Aborted",
    "App",
    "Client",
    "Cluster",
    "Config",
    "Context",
    "ExternalFailed",
    "Function",
    "HeadraceError",
    "Operator",
    "Places",
    "Replies",
    "Reply",
    "Runtime",
]
