"""Chaos: a real Headrace, real clients, and somebody who kills its processes. What was answered must hold."""
