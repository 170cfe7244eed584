"""Drivers of the core: the runtimes, their clients, the HTTP gateway, the clock. Threads and sockets live here."""
