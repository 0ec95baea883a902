"""Why a step runs a batch in a slower way."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why a model or a batch does not allow something, such as packing.

    A reason is made where it is found, and becomes text where it is logged or raised.
    """

    text: str  # a clause without a full stop
    fix: str | None = None  # what a user can change; None if there is nothing

    def __str__(self) -> str:
        return self.text
