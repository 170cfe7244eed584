"""Drivers of the core: the in-process runtime, its clients, the HTTP gateway, the clock. Here live threads, sockets."""
