"""The transform of the lm_head's output x into the logits z of the softmax."""

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # positive normal numbers of float32


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """z = softcap * tanh(scale * x / softcap) / temperature; without a softcap, z = scale * x / temperature.

    Args:
        temperature: sampling temperature, > 0: a number, or a float tensor shaped like the call's targets, with which
            the backward is exact and takes two passes: one pass, a `grad_tolerance` and torch.compile support only
            numbers.
        softcap: bound of the capped logits (Gemma 2: 30), > 0; None leaves them uncapped. A GPU knows the tanh to
            2.4e-7, so a capped logit to 2.4e-7 softcap / temperature: 7e-6 at 30, 2e-3 at 10,000.
        scale: factor on the head's output, > 0 (Cohere's `logit_scale`, 1 / Granite's `logits_scaling`).

    Raises:
        TypeError: an option is not a number, or a tensor of temperatures is not of a float dtype.
        ValueError: an option is not positive and finite in float32, the dtype of kernel arguments, or a tensor of
            temperatures has a wrong number of dimensions or requires a gradient.
    """

    temperature: float | Tensor = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "softcap", "scale"):
            value = getattr(self, name)
            if name == "softcap" and value is None:
                continue
            if name == "temperature" and isinstance(value, Tensor):
                _check_per_token(value)
                continue
            check_number(name, value)
            if not (fits_float32(value) and value >= SMALLEST):
                raise ValueError(f"{name} must be positive and finite in float32, got {value}")

    @property
    def per_token(self) -> bool:
        """Whether each token has its own temperature."""
        return isinstance(self.temperature, Tensor)

    def of_tokens(self, temperatures: Tensor | None) -> "LogitTransform":
        """The transform with the temperatures (n,) of n tokens; unchanged for None."""
        return self if temperatures is None else replace(self, temperature=temperatures)


def check_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise TypeError unless `value` is of one of `kinds`. A bool counts as a number only if `kinds` is bool."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")


def check_number(name: str, value: object) -> None:
    check_type(name, value, (int, float), "a number")


def _check_per_token(temperature: Tensor) -> None:
    if not temperature.is_floating_point():
        raise TypeError(f"temperature must be a number or a float tensor, got a tensor of {temperature.dtype}")
    if temperature.dim() not in (1, 2):
        raise ValueError(f"temperature must be a number, (B, T) or (N,), got {tuple(temperature.shape)}")
    if temperature.requires_grad:
        raise ValueError("temperature must require no gradient: none is made for it")


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
    temperatures: Tensor | None = None  # (n,) float32, one per row; kernels divide by them after all other steps

    @classmethod
    def of(cls, transform: LogitTransform) -> "LogitSteps":
        if not isinstance(transform.temperature, Tensor):
            return cls._of_numbers(transform)
        temperatures = transform.temperature.to(torch.float32).contiguous()
        return cls._of_numbers(replace(transform, temperature=1.0))._replace(temperatures=temperatures)

    @classmethod
    @lru_cache
    def _of_numbers(cls, transform: LogitTransform) -> "LogitSteps":
        # Quotients and float(): an int would be an integer in the kernel, and Triton compiles some integers in.
        cap, temperature = transform.softcap, transform.temperature
        assert not isinstance(temperature, Tensor)
        gain, slope = transform.scale / (1.0 if cap is None else cap), transform.scale / temperature
        inverse = 1.0 / temperature
        (bits,) = struct.unpack("Q", struct.pack("d", inverse))
        (cut,) = struct.unpack("d", struct.pack("Q", bits >> 29 << 29))  # inverse, cut to the digits of float32
        heated = temperature != 1.0
        return cls(
            gain=None if cap is None and gain == 1.0 else gain,
            cap=None if cap is None else float(cap),
            inverse=cut if heated else None,
            inverse_rest=max(inverse - cut, inverse * 2.0**-60) if heated else None,
            per_cap=None if cap is None else temperature / cap,
            slope=None if slope == 1.0 else slope,
        )
