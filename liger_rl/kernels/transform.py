"""What a model does to its lm_head's output before the softmax."""

from dataclasses import dataclass

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's, without subnormal numbers


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """z = softcap * tanh(scale * x / softcap) / temperature; without a softcap, z = scale * x / temperature.

    Args:
        temperature: sampling temperature, > 0.
        softcap: bound of the capped logits (Gemma 2: 30), > 0; None leaves them uncapped.
        scale: factor on the head's output, > 0 (Cohere's `logit_scale`, 1 / Granite's `logits_scaling`).

    Raises:
        TypeError: an option is not a number.
        ValueError: an option is not positive and finite in float32, in which kernels take it.
    """

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "softcap", "scale"):
            value = getattr(self, name)
            if name == "softcap" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {type(value).__name__}")
            if not (fits_float32(value) and value >= SMALLEST):
                raise ValueError(f"{name} must be positive and finite in float32, got {value}")


def fits_float32(value: float) -> bool:
    """Whether a number, an int of any length included, is one in float32 too, and not NaN."""
    return -LARGEST <= value <= LARGEST
