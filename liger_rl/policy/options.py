"""Checks of options, for the dataclasses that have them. Each error names the option."""

import math
from collections.abc import Callable, Iterable
from typing import Any


def number(name: str, value: Any) -> float:
    """-> the number as a float, NaN and infinities included.

    Raises:
        TypeError: it is not an int or float.
        ValueError: it is an int that no float holds.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be in a float's range, got an int beyond it") from None


def at_least_zero(options: object, *names: str) -> None:
    _within(options, names, "at least 0 and finite", lambda value: 0 <= value < math.inf)


def above_zero(options: object, *names: str) -> None:
    _within(options, names, "above 0 and finite", lambda value: 0 < value < math.inf)


def share(options: object, *names: str) -> None:
    _within(options, names, "in (0, 1]", lambda value: 0 < value <= 1)


def zero_to_one(options: object, *names: str) -> None:
    _within(options, names, "in [0, 1]", lambda value: 0 <= value <= 1)


def _within(options: object, names: tuple[str, ...], expected: str, holds: Callable[[float], bool]) -> None:
    for name in names:
        value = number(name, getattr(options, name))
        if not holds(value):  # NaN is within nothing
            raise ValueError(f"{name} must be {expected}, got {value}")


def whole_number(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name} must be one of {names}, got {value!r}")


def callable_instance(name: str, value: Any) -> None:
    """Raises TypeError for what cannot be called, and for a class: calling one makes an instance."""
    if isinstance(value, type):
        raise TypeError(f"{name} must be an instance, got the class {value.__name__}; write {value.__name__}(...)")
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}")


def instance_of(name: str, value: Any, kind: type) -> None:
    if isinstance(value, type):
        raise TypeError(f"{name} must be an instance of {kind.__name__}, got the class {value.__name__}")
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}")
