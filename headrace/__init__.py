"""Headrace: transactional stateful functions on live data. The log is the serial order."""

from headrace.config import Config
from headrace.errors import Abort, Aborted, HeadraceError
from headrace.model.app import App
from headrace.model.context import Context
from headrace.model.operator import Function, Operator
from headrace.runtime.client import Client, Replies, Reply
from headrace.runtime.inprocess import Runtime

__version__ = "0.1.0"

__all__ = [
    "Abort",
    "Aborted",
    "App",
    "Client",
    "Config",
    "Context",
    "Function",
    "HeadraceError",
    "Operator",
    "Replies",
    "Reply",
    "Runtime",
]
