"""Mistakes that break the promises of the section "Arguments and types"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "Arguments by name mean what they mean in Python.",
        "headrace/model/keywords.py",
        "return tuple(given[at] if at in given else self.defaults[at] for at in range(max(given, default=-1) + 1))",
        "return tuple(given[at] for at in sorted(given))",
    ),
    Mistake(
        "They are logged by position, and a default only where a later argument is given.",
        "headrace/model/keywords.py",
        "for at in range(max(given, default=-1) + 1))",
        "for at in range(len(self.names)))",
    ),
    Mistake(
        "Between functions they mean the same with any number of workers.",
        "headrace/core/contexts.py",
        "        super().call_async(function, key, *args, **kwargs)\n",
        "        super().call_async(function, key, *args, *kwargs.values())\n",
        (
            (
                "headrace/core/later/deferring.py",
                "        if kwargs:\n            args = self._bind(function, args, kwargs)\n        name =",
                "        if kwargs:\n            args = (*args, *kwargs.values())\n        name =",
            ),
        ),
    ),
    Mistake(
        "A wrong name is refused with the signature, in every mode alike.",
        "headrace/model/keywords.py",
        "            if place in given:\n",
        "            if place in given and given[place] != value:\n",
    ),
    Mistake(
        "Columns of a table may be named by parameters, and what has no column takes its default.",
        "headrace/durability/inbox/batch_calls.py",
        "for each in signature.bind((), named)]",
        "for each in named.values()]",
    ),
    Mistake(
        "Over HTTP, arguments may be given by name.",
        "headrace/core/json_calls.py",
        "            return signature.bind((), signature.named_from_json(args))\n",
        "            return tuple(signature.named_from_json(args).values())\n",
    ),
    Mistake(
        "A default that can change is refused when its function is registered.",
        "headrace/model/function_parameters.py",
        "        return any(map(is_mutable, value))\n    if isinstance(value, msgspec.Struct):",
        "        return False\n    if isinstance(value, msgspec.Struct):",
    ),
    Mistake(
        "A user's parameter may have the name of an option.",
        "headrace/runtime/client.py",
        "        call = KeywordCall(function, key, args, kwargs) if kwargs else (function, key, *args)\n",
        '        self._request_id = kwargs.pop("request_id", self._request_id)\n'
        "        call = KeywordCall(function, key, args, kwargs) if kwargs else (function, key, *args)\n",
    ),
    Mistake(
        "The type checker reports a wrong argument, result or state on its line.",
        "headrace/model/context.py",
        "    def put(self, value: S) -> None:\n",
        "    def put(self, value: Any) -> None:\n",
    ),
    Mistake(
        "A state, delta or result of another type than the declared one aborts, with the same message in every mode.",
        "headrace/core/ordered/repair.py",
        "            return call.binding.seal(result) if call.order[1] == order.ROOT else None\n",
        "            return self.values.seal(result) if call.order[1] == order.ROOT else None\n",
        (
            (
                "headrace/core/ordered/executor.py",
                "result = binding.seal(result) if place is order.ROOT else",
                "result = self.values.seal(result) if place is order.ROOT else",
            ),
        ),
    ),
    Mistake(
        "A value is refused exactly if it does not have the declared type, with all its parts.",
        "headrace/wire/types.py",
        '        test = f"type({v}) is {self.text}"\n',
        '        test = f"isinstance({v}, {self.text})"\n',
    ),
    Mistake(
        "The error names the field, the type wanted and the value found.",
        "headrace/wire/types.py",
        '                return found.within(f".{name}")\n',
        "                return found\n",
    ),
    Mistake(
        "A value of a declared type comes back with the same types, all the way down.",
        "headrace/wire/types.py",
        'is_kept = f"({v}.tzinfo is None or {v}.tzinfo is {utc}) and not {v}.fold"',
        'is_kept = f"{utc} and not {v}.fold"',
    ),
    Mistake(
        "Readers without the app's classes see the same, whatever the form of a record.",
        "headrace/wire/types.py",
        '            return ["tuple", inner]\n',
        '            return None if inner is None else ["list", inner]\n',
    ),
    Mistake(
        "A type whose values cannot be carried is refused when the app starts.",
        "headrace/wire/hints.py",
        '        raise Unsupported(f"{name_of(hint)} is not supported for values{advice(origin)}")\n',
        '        return AnyType("Any")\n',
    ),
    Mistake(
        "`partition_by` is asked once for a key, and its errors are found each time.",
        "headrace/core/program.py",
        "            placed.add(key)\n",
        "",
    ),
)
