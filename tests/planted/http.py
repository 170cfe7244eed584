"""Mistakes that break the promises of the section "HTTP"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "An abort is distinguishable from a result and from a refusal.",
        "headrace/gateway/answers.py",
        "    return answer, status_of_abort(failure.code)\n",
        "    return answer, BadRequest.http_status\n",
    ),
    Mistake(
        "A remote client does what a local one does.",
        "headrace/runtime/remote.py",
        "name = function.full_name if isinstance(function, Function) else function",
        "name = function.name if isinstance(function, Function) else function",
    ),
    Mistake(
        "A request id sent again over HTTP runs once.",
        "headrace/gateway/call_routes.py",
        "self._client.submit(message.ids, batch, wait=False)",
        "self._client.submit(self._client.new_id(), batch, wait=False)",
    ),
    Mistake(
        "Bytes that are not a message are refused, and the server continues.",
        "headrace/gateway/call_routes.py",
        "if len(sizes) > 1 or (isinstance(message.ids, list) and {len(message.ids)} != sizes):",
        "if isinstance(message.ids, list) and {len(message.ids)} != sizes:",
    ),
)
