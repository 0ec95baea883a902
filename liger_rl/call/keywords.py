"""Keywords of public functions: an error for an unknown one that names the right one."""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from liger_rl.kernels.transform import LogitTransform
from liger_rl.keywords import hint

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def named_keywords(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator: the TypeError for a keyword that the function does not have names the right one, or lists all."""
    known = tuple(name for name in signature(function).parameters if name != "self")

    @wraps(function)
    def checked(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        for name, value in keywords.items():
            if name not in known:
                called = function.__qualname__
                raise TypeError(f"{called} got an unexpected argument {name!r}{_right(name, value, known)}")
        return function(*args, **keywords)

    return checked


def _right(name: str, value: object, known: Sequence[str]) -> str:
    if "transform" in known and name in LogitTransform.__dataclass_fields__:
        return f"; write transform=LogitTransform({name}={value if isinstance(value, (int, float)) else '...'})"
    return f"{hint(name, known)}. Its arguments are {', '.join(known)}"
