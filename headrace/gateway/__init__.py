"""The HTTP gateway of a runtime: JSON for people and other languages, msgpack for `RemoteClient`. See docs/http.md.

Calls and reads of state are plain ASGI (`front.py`, `call_routes.py`); everything else is FastAPI (`other_routes.py`).
Binds to loopback: there is no authentication yet.
"""
