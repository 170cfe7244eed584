"""A server that speaks S3, as a process of its own, with faults on demand. `python -m tests.durability.s3_server`.

It prints its port. `PUT /-/faults?kind=..&method=..&count=..` makes the next requests with that method go wrong:
`lost` does them and closes the connection, `refused` answers 503 without doing them, `late` answers 500 after doing
them, `full` answers 507, `blind` drops the condition of a conditional put.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Start = Callable[..., Any]


class Faulty:
    """All requests one after the other (as one server of S3 decides on one object), some of them badly."""

    def __init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.lock = threading.Lock()
        self.faults: list[tuple[str, str]] = []  # kind and method
        self.requests = 0

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        with self.lock:
            if environ["PATH_INFO"] == "/-/faults":
                return self._order(environ, start)
            self.requests += 1
            for fault in self.faults:
                if fault[1] == environ["REQUEST_METHOD"]:
                    self.faults.remove(fault)
                    return self._spoil(fault[0], environ, start)
            return list(self.app(environ, start))

    def _order(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"]).items()}
        if "kind" in query:
            self.faults = [(query["kind"], query["method"])] * int(query["count"])
        start("200 OK", [("Content-Type", "text/plain")])
        return [b"%d" % self.requests]

    def _spoil(self, kind: str, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        if kind == "blind":
            environ.pop("HTTP_IF_NONE_MATCH", None)
            return list(self.app(environ, start))
        if kind in ("lost", "late"):
            list(self.app(environ, lambda *_: lambda _: None))
        if kind == "lost":
            connection: socket.socket = environ["werkzeug.socket"]
            connection.shutdown(socket.SHUT_RDWR)
        status = {"full": "507 Insufficient Storage", "late": "500 Internal Server Error"}
        start(status.get(kind, "503 Service Unavailable"), [("Content-Type", "text/plain")])
        return [b"spoiled on demand"]


def main() -> None:
    server = make_server("127.0.0.1", 0, Faulty(), threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
