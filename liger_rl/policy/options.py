"""Checks of options, for the dataclasses that have them. Each error names the option."""

import math
from collections.abc import Iterable
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
    for name in names:
        value = number(name, getattr(options, name))
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be at least 0 and finite, got {value}")


def above_zero(options: object, *names: str) -> None:
    for name in names:
        value = number(name, getattr(options, name))
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be above 0 and finite, got {value}")


def share(options: object, name: str) -> None:
    value = number(name, getattr(options, name))
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value}")


def zero_to_one(options: object, *names: str) -> None:
    for name in names:
        value = number(name, getattr(options, name))
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name} must be one of {names}, got {value!r}")


def callable_instance(name: str, value: Any) -> None:
    """Raises TypeError for what cannot be called, and for a class, a call of which would make an instance."""
    if isinstance(value, type):
        raise TypeError(f"{name} must be an instance, got the class {value.__name__}; write {value.__name__}(...)")
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}")


def instance_of(name: str, value: Any, kind: type) -> None:
    if isinstance(value, type):
        raise TypeError(f"{name} must be an instance of {kind.__name__}, got the class {value.__name__}")
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}")
