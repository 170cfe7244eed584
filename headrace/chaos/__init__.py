"""Chaos: a real Headrace, real clients, and a killer of its processes. All acknowledged replies must hold."""
