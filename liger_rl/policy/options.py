"""Checks of numeric options, for the dataclasses that have them."""

import math


def number(name: str, value: object) -> None:
    """Raises TypeError where it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def at_least_zero(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        number(name, value)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be at least 0 and finite, got {value}")


def above_zero(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        number(name, value)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be above 0 and finite, got {value}")


def share(options: object, name: str) -> None:
    number(name, getattr(options, name))
    if not 0 < getattr(options, name) <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {getattr(options, name)}")
