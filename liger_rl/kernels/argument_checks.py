"""Checks of a plain argument. An error names the argument, the expected value and the value it got."""

from collections.abc import Iterable
from typing import Any


def check_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise TypeError unless `value` is of one of `kinds`. A bool counts as a number only if `kinds` is bool."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")


def check_number(name: str, value: object) -> None:
    """Raise TypeError unless `value` is an int or a float."""
    check_type(name, value, (int, float), "a number")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of the strings `choices`."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
