"""The OpenAPI file: every function of the app with its parameters and their types, and the status of every outcome."""

from __future__ import annotations
