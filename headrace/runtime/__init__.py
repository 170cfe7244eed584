"""Drivers of the core: the runtimes, their clients, the clock. Threads and sockets live here."""
