"""The transform of the lm_head's output x into the logits z of the softmax."""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from liger_rl.kernels.argument_checks import check_number
from liger_rl.kernels.public_call import NamedOptions

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # positive normal numbers of float32


@dataclass(frozen=True, kw_only=True)
class LogitTransform(NamedOptions):
    """z = softcap * tanh(scale * x / softcap) / temperature; without a softcap, z = scale * x / temperature.

    Args:
        temperature: sampling temperature, > 0, one number for all tokens.
        softcap: bound of the capped logits (Gemma 2: 30), > 0; None leaves them uncapped. A GPU knows the tanh to
            2.4e-7, so a capped logit to 2.4e-7 softcap / temperature: 7e-6 at 30, 2e-3 at 10,000.
        scale: factor on the head's output, > 0 (Cohere's `logit_scale`, 1 / Granite's `logits_scaling`).

    Raises:
        TypeError: an option is not a number.
        ValueError: an option is not positive and finite in float32, the dtype of kernel arguments.
    """

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "softcap", "scale"):
            value = getattr(self, name)
            if name == "softcap" and value is None:
                continue
            check_number(name, value)
            if not (fits_float32(value) and value >= SMALLEST):
                raise ValueError(f"{name} must be positive and finite in float32, got {value}")


def fits_float32(value: float) -> bool:
    """Whether `value` is finite in float32 and not NaN; it may be an int of any length."""
    return -LARGEST <= value <= LARGEST


class HeadFactors(NamedTuple):
    """The factors of a head's logits, transform(hidden @ weight.T + bias)."""

    hidden: Tensor  # (n, H)
    weight: Tensor  # (v, H), rows of the vocabulary from one id on
    bias: Tensor | None  # (v,)
    transform: LogitTransform


class LogitSteps(NamedTuple):
    """A LogitTransform as a kernel argument: z = cap * tanh(gain * x) / temperature, or gain * x / temperature.

    A step that changes nothing is None, and is not compiled.
    """

    gain: float | None
    cap: float | None
    # 1 / temperature = inverse + inverse_rest, a float32 and the remainder. Both are > 0, so that their products with
    # the -inf of a banned id are -inf. A remainder of 0 is replaced by a number that is too small to change the sum.
    inverse: float | None
    inverse_rest: float | None
    per_cap: float | None  # temperature / softcap: per_cap * z is the tanh
    slope: float | None  # scale / temperature, the constant part of dz/dx

    @classmethod
    @lru_cache
    def of(cls, transform: LogitTransform) -> "LogitSteps":
        # Quotients and float(): an int would be an integer in the kernel, and Triton compiles some integers in.
        cap, temperature = transform.softcap, transform.temperature
        gain, slope = transform.scale / (1.0 if cap is None else cap), transform.scale / temperature
        inverse = 1.0 / temperature
        (bits,) = struct.unpack("Q", struct.pack("d", inverse))
        (cut,) = struct.unpack("d", struct.pack("Q", bits >> 29 << 29))  # inverse, cut to the digits of float32
        has_temperature = temperature != 1.0
        return cls(
            gain=None if cap is None and gain == 1.0 else gain,
            cap=None if cap is None else float(cap),
            inverse=cut if has_temperature else None,
            inverse_rest=max(inverse - cut, inverse * 2.0**-60) if has_temperature else None,
            per_cap=None if cap is None else temperature / cap,
            slope=None if slope == 1.0 else slope,
        )
