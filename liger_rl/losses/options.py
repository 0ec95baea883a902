"""Checks of options. Each error names the option."""

import sys
import warnings
from inspect import get_annotations
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args, get_origin

from liger_rl.hints import REDUCTIONS
from liger_rl.kernels.argument_checks import check_choice, check_type
from liger_rl.kernels.public_call import NamedOptions


class Options(NamedOptions):
    """Base of dataclasses whose fields are checked by the rule in their annotation.

        epsilon_low: Annotated[float, "[0, inf)"] = 0.2
        level: Annotated[str, ("token", "sequence")] = "token"
        gather: Annotated[Callable[[Tensor], Tensor] | None, callable] = None

    A rule is an interval of numbers, a tuple of known names, a type, or `callable`. The first field that breaks its
    rule raises TypeError or ValueError.
    """

    RULES: ClassVar[dict[str, tuple[Any, bool]]] = {}  # field -> its rule, and whether it may be None

    def __init_subclass__(cls) -> None:
        cls.RULES = cls.RULES | {
            name: (hint.__metadata__[0], NoneType in get_args(hint.__origin__))
            for name, hint in get_annotations(cls).items()
            if get_origin(hint) is Annotated
        }

    def __post_init__(self) -> None:
        for name, (rule, optional) in self.RULES.items():
            value = getattr(self, name)
            if value is None and optional:
                continue
            if isinstance(rule, str):
                check_interval(name, value, rule)
            elif isinstance(rule, tuple):
                check_choice(name, value, rule)
            elif rule is callable:
                check_callable(name, value)
            else:
                check_instance(name, value, rule)


def check_interval(name: str, value: Any, interval: str) -> None:
    """Raises for a value outside an interval such as "[0, inf)". NaN is outside of each."""
    low, high = map(float, interval[1:-1].split(","))
    x = read_number(name, value)
    if not (low < x < high or (x == low and interval[0] == "[") or (x == high and interval[-1] == "]")):
        raise ValueError(f"{name} must be in {interval}, got {value}")


def read_number(name: str, value: Any) -> float:
    """The number as a float, which may be NaN or infinite. Raises for another type, and an int beyond float's range."""
    check_type(name, value, (int, float), "a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be in a float's range, got an int beyond it") from None


def check_whole_number(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")


def check_callable(name: str, value: Any) -> None:
    """Raises TypeError for a value that cannot be called, and for a class: calling one makes an instance."""
    if isinstance(value, type):
        raise TypeError(f"{name} must be an instance, got the class {value.__name__}; write {value.__name__}(...)")
    if isinstance(value, str):
        explained = f"; write {REDUCTIONS[value]}" if name == "reduction" and value in REDUCTIONS else ""
        raise TypeError(f"{name} must be callable, got {value!r}{explained}")
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}")


def check_instance(name: str, value: Any, kind: type) -> None:
    if isinstance(value, type):
        raise TypeError(f"{name} must be an instance of {kind.__name__}, got the class {value.__name__}")
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}")


def warn_caller(message: str) -> None:
    """Warns at the line that called into this package."""
    frame, level, inner = sys._getframe(), 1, ("liger_rl", "torch", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inner:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
