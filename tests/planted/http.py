"""Mistakes that break the promises of the section "HTTP"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "An abort is distinguishable from a result and from a refusal.",
        "headrace/runtime/gateway.py",
        '"raised_in": where}, 409',
        '"raised_in": where}, 400',
    ),
    Mistake(
        "A remote client does what a local one does.",
        "headrace/runtime/remote.py",
        "name = function.full_name if isinstance(function, Function) else function",
        "name = function.name if isinstance(function, Function) else function",
    ),
    Mistake(
        "A request id sent again over HTTP runs once.",
        "headrace/runtime/gateway.py",
        "runtime.client.submit(message.ids, batch, wait=False)",
        "runtime.client.submit(runtime.client.new_id(), batch, wait=False)",
    ),
    Mistake(
        "Bytes that are not a message are refused, and the server continues.",
        "headrace/runtime/gateway.py",
        "if len(sizes) > 1 or (isinstance(message.ids, list) and {len(message.ids)} != sizes):",
        "if isinstance(message.ids, list) and {len(message.ids)} != sizes:",
    ),
)
