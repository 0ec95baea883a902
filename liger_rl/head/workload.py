"""What the planner reads of a call: sizes, dtypes, device and options. No tensor."""

from typing import NamedTuple

import torch

from liger_rl.head.head_options import HeadOptions
from liger_rl.head.record import Head, Needs
from liger_rl.kernels import devices
from liger_rl.kernels.devices import is_aligned, reason_against_call
from liger_rl.kernels.limits import LIMITS


class Workload(NamedTuple):
    """The sizes, dtypes and options of a call."""

    tokens: int  # N
    vocab: int  # V, rows of the weight on this rank
    hidden_size: int  # H
    dtype: torch.dtype  # of the hidden states
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype  # of the factors of the products
    device: torch.device
    needs: Needs  # whether hidden, weight and bias want a gradient
    options: HeadOptions
    several: bool = False  # each token has a list of targets
    aligned: bool = True  # the weight's rows start at multiples of 16 bytes

    @classmethod
    def of(cls, head: Head) -> "Workload":
        hidden, weight = head.hidden, head.weight
        return cls(
            hidden.shape[0], weight.shape[0], weight.shape[1], hidden.dtype, weight.dtype, head.dtype, hidden.device,
            head.needs, head.options, head.targets.dim() == 2, is_aligned(weight),
        )  # fmt: skip

    @property
    def casts_weight(self) -> bool:
        """Whether the weight's dtype is not the products'. Two passes in an epilogue then read a copy of the weight."""
        return self.weight_dtype != self.compute_dtype

    @property
    def reason_against_fold(self) -> str | None:
        """The first thing that the forward of two passes needs of a product with an epilogue; None if it applies."""
        return (
            ("a token" if self.tokens == 0 else None)
            or self.reason_against_product(max(self.tokens, LIMITS.product_tokens))
            or ("no chunk to be named" if self.options.names_chunk else None)
            or ("topk = None" if self.options.topk is not None else None)
        )

    @property
    def reason_against_grad(self) -> str | None:
        """The first thing that the backward of two passes needs of a product with an epilogue; None if it applies."""
        reason = self.reason_against_product(self.tokens)
        return reason or ("no chunk to be named" if self.options.names_chunk else None)

    def reason_against_product(self, tokens: int) -> str | None:
        """The first thing that a product of so many tokens with an epilogue needs; None if it applies."""
        dtype = self.compute_dtype  # the weight's too, or that of its copy
        return (
            devices.reason_against_device(self.device)
            or reason_against_call(tokens, self.hidden_size, dtype, dtype)
            or (None if self.aligned or self.casts_weight else "rows of the weight that start at multiples of 16 bytes")
        )
