"""What the type checker knows of an app: the state of an operator, the parameters and the result of a function.

All have a default, so `Context`, `Function` and `Operator` without brackets stay legal: then nothing is known. Python
has such defaults from 3.13 on; at run time nobody needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar
    from typing_extensions import TypeForm as TypeForm

    S = TypeVar("S", default=Any)  # an operator's state
    P = ParamSpec("P", default=...)  # a function's parameters, without the context
    R = TypeVar("R", default=Any, covariant=True)  # its result
    Plain = TypeVar("Plain", default=Any, covariant=True)  # what its body returns: for an `async def` a coroutine
else:
    from typing import ParamSpec, TypeVar

    S, R, Plain = TypeVar("S"), TypeVar("R", covariant=True), TypeVar("Plain", covariant=True)
    P = ParamSpec("P")

Default = TypeVar("Default")  # what is returned instead of a state
Result = TypeVar("Result")  # of a function that is registered
State = TypeVar("State")  # the type that is given as `state=`
