"""Mistakes that break the promises of the section "Values"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "A value comes back exactly as it went in, tuples included.",
        "headrace/wire/values.py",
        "return Ext(TUPLE, self._encode([self._lower(item, depth, room) for item in value]))",
        "return [self._lower(item, depth, room) for item in value]",
    ),
    Mistake(
        "So do the arguments, state and results of functions.",
        "headrace/runtime/client.py",
        "return list(map(self._unseal, self.answers.results))",
        "return list(self.answers.results)",
    ),
    Mistake(
        "A value that cannot be carried is refused, and the error names it.",
        "headrace/wire/values.py",
        "        if kind is dict:\n",
        "        if isinstance(value, dict):\n",
    ),
    Mistake(
        "Changing what `get` returned changes nothing until `put`.",
        "headrace/wire/values.py",
        "                return self._from_native(data)\n            return self._decode(data)\n",
        "                return self._from_native(data)\n"
        "            return self._decoded.setdefault(data, self._decode(data))\n",
        (
            (
                "        self.bytes_max, self.depth_max = bytes_max, depth_max\n",
                "        self.bytes_max, self.depth_max = bytes_max, depth_max\n"
                "        self._decoded: dict[bytes, Any] = {}\n",
            ),
        ),
    ),
    Mistake(
        "Changing a value after `put` or `merge` changes nothing.",
        "headrace/core/contexts.py",
        "            self._state = self._seal(value)\n\n"
        "    def delete(self) -> None:\n        self._state = MISSING\n\n    def _combine(",
        "            self._state = value\n\n"
        "    def delete(self) -> None:\n        self._state = MISSING\n\n    def _combine(",
    ),
    Mistake(
        "Changing an argument after a call changes nothing.",
        "headrace/core/program.py",
        "return (self.sealed, (packed,)) if isinstance(packed, bytes) else (self, packed)",
        "return self, args",
    ),
    Mistake(
        "A caller and its callee share no result object.",
        "headrace/core/serial.py",
        "answer = self.values.unseal(context._binding.seal(answer))  # they share nothing",
        "pass",
    ),
    Mistake(
        "Hostile bytes are refused or decoded, and nothing else happens.",
        "headrace/wire/values.py",
        "FAILURES = (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)",
        "FAILURES = (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError)",
    ),
    Mistake(
        "No module imports pickle.",
        "headrace/wire/codec.py",
        "import msgspec\n",
        "import pickle\n\nimport msgspec\n",
    ),
)
