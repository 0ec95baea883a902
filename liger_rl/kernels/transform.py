"""What a model does to its lm_head's output before the softmax."""

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's, without subnormal numbers


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """z = softcap * tanh(scale * x / softcap) / temperature; without a softcap, z = scale * x / temperature.

    Args:
        temperature: sampling temperature, > 0: a number, or a float tensor shaped like the call's targets, one for each
            token. Tensors get no gradient. They take float32 tiles of logits in two passes: neither the product's
            epilogue, nor one pass, nor a `grad_tolerance` know them, nor does torch.compile.
        softcap: bound of the capped logits (Gemma 2: 30), > 0; None leaves them uncapped.
        scale: factor on the head's output, > 0 (Cohere's `logit_scale`, 1 / Granite's `logits_scaling`).

    Raises:
        TypeError: an option is not a number, or a temperature no float tensor.
        ValueError: an option is not positive and finite in float32, in which kernels take it.
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
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {type(value).__name__}")
            if not (fits_float32(value) and value >= SMALLEST):
                raise ValueError(f"{name} must be positive and finite in float32, got {value}")

    @property
    def per_token(self) -> bool:
        """Whether each token has a temperature of its own."""
        return isinstance(self.temperature, Tensor)

    @property
    def of_logits(self) -> "LogitTransform":
        """Without the temperatures of tokens."""
        return replace(self, temperature=1.0) if self.per_token else self

    def of_tokens(self, temperatures: Tensor | None) -> "LogitTransform":
        """The transform of some of the tokens, whose temperatures these are, (n,); itself for None."""
        return self if temperatures is None else replace(self, temperature=temperatures)


def _check_per_token(temperature: Tensor) -> None:
    if not temperature.is_floating_point():
        raise TypeError(f"temperature must be a number or a float tensor, got a tensor of {temperature.dtype}")
    if temperature.dim() not in (1, 2):
        raise ValueError(f"temperature must be a number, (B, T) or (N,), got {tuple(temperature.shape)}")
    if temperature.requires_grad:
        raise ValueError("temperature must require no gradient: none is made for it")


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
    slope: float | None  # scale / temperature, the constant part of dz/dx
    temperatures: Tensor | None = None  # (n,) float32 of rows, by which kernels of rows divide after all other steps

    @classmethod
    def of(cls, transform: LogitTransform) -> "LogitSteps":
        if not isinstance(transform.temperature, Tensor):
            return cls._of_numbers(transform)
        temperatures = transform.temperature.to(torch.float32).contiguous()
        return cls._of_numbers(transform.of_logits)._replace(temperatures=temperatures)

    @classmethod
    @lru_cache
    def _of_numbers(cls, transform: LogitTransform) -> "LogitSteps":
        # Quotients and float(), because an int would be an integer in the kernel, and some of them compiled in.
        cap, temperature = transform.softcap, transform.temperature
        assert not isinstance(temperature, Tensor)
        gain, slope = transform.scale / (1.0 if cap is None else cap), transform.scale / temperature
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
            slope=None if slope == 1.0 else slope,
        )
