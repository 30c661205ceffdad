"""Functions with the settings of a frozen description, which they build and use."""

import inspect
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Description = TypeVar("Description")
Result = TypeVar("Result")


def function(
    name: str, description: Callable[P, Description], use: Callable[[Description], Result]
) -> Callable[P, Result]:
    """Returns `lambda **settings: use(description(**settings))`, declared like the description.

    Gin files bind settings by the function's name. Types, defaults and meanings are those of the
    description, which so states each setting once.

    Args:
        name: name of the function in the description's module.
        description: a dataclass.
        use: its method.
    """

    def call(*args: P.args, **settings: P.kwargs) -> Result:
        return use(description(*args, **settings))

    signature, hints = inspect.signature(description), typing.get_type_hints(description)
    declared = {parameter: hints[parameter] for parameter in signature.parameters}
    attributes: dict[str, Any] = {
        "__name__": name,
        "__qualname__": name,
        "__module__": description.__module__,
        "__doc__": description.__doc__,
        "__annotations__": {**declared, "return": typing.get_type_hints(use)["return"]},
    }
    for attribute, value in attributes.items():
        setattr(call, attribute, value)
    vars(call).update(__signature__=signature, __wrapped__=description)
    return call
