"""What a model does to its lm_head's output before the softmax."""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

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


class LogitSteps(NamedTuple):
    """A LogitTransform as kernels take it, z = cap * tanh(gain * x) / temperature or gain * x / temperature.

    A step that changes nothing is None, and is not compiled.
    """

    gain: float | None
    cap: float | None
    # 1 / temperature in two parts of float32, the second what the first was cut by. Both are above 0, so that their
    # products with the -inf of a banned id are -inf. The second changes no sum where it would be 0.
    inverse: float | None
    inverse_rest: float | None
    heat: float | None  # temperature / softcap, which makes a tanh of z
    slope: float  # scale / temperature, the constant part of dz/dx

    @classmethod
    @lru_cache
    def of(cls, transform: LogitTransform) -> "LogitSteps":
        # Quotients and float(), because an int would be an integer in the kernel, and some of them compiled in.
        cap, temperature = transform.softcap, transform.temperature
        gain = transform.scale / (1.0 if cap is None else cap)
        inverse = 1.0 / temperature
        (bits,) = struct.unpack("Q", struct.pack("d", inverse))
        (cut,) = struct.unpack("d", struct.pack("Q", bits >> 29 << 29))  # to float32's digits
        heated = temperature != 1.0
        return cls(
            gain=None if cap is None and gain == 1.0 else gain,
            cap=None if cap is None else float(cap),
            inverse=cut if heated else None,
            inverse_rest=max(inverse - cut, inverse * 2.0**-60) if heated else None,
            heat=None if cap is None else temperature / cap,
            slope=transform.scale / temperature,
        )
