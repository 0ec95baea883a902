"""The shapes, dtypes and options of a call. From them the planner picks an engine and its tiles."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from liger_rl.head.checks import Passes
from liger_rl.head.head_call import HeadCall
from liger_rl.head.head_options import EngineOptions
from liger_rl.kernels import devices
from liger_rl.kernels.devices import MIN_TOKENS, is_aligned, reason_against_call

NO_GRADIENT = "an input that wants a gradient"


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The shapes, dtypes and options of a call."""

    tokens: int  # N
    vocab: int  # V
    hidden_size: int  # H
    dtype: torch.dtype  # of the hidden states
    weight_dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, bool]  # whether hidden and weight need a gradient
    wants_gradient: bool  # whether hidden, weight or bias needs one
    options: EngineOptions
    auto_tolerance: bool  # the tolerance is "auto", which does not rule out one pass
    several: bool = False  # each token has a list of targets
    aligned: bool = True  # the weight's rows start at multiples of 16 bytes
    passes: Passes = "two"
    together: int = 1  # largest number of tokens that one token's gradient depends on
    loss_lacks: str | None = None  # one pass's need that the loss does not meet; None: it meets all

    @classmethod
    def of(cls, call: HeadCall, options: EngineOptions, **one_pass: Any) -> "HeadShape":
        """The shape of a call whose tensors have been checked. `one_pass` has `passes`, `together` and `loss_lacks`."""
        needs = call.needs
        return cls(
            tokens=math.prod(call.hidden.shape[:-1]),
            vocab=call.weight.shape[0],
            hidden_size=call.weight.shape[1],
            dtype=call.hidden.dtype,
            weight_dtype=call.weight.dtype,
            device=call.hidden.device,
            needs=needs[:2],
            wants_gradient=any(needs),
            options=options,
            auto_tolerance=call.options.grad_tolerance == "auto",
            several=call.several,
            aligned=is_aligned(call.weight),
            **one_pass,
        )

    @property
    def epilogue_lacks(self) -> str | None:
        """The first thing that one pass or a tolerance needs of a product with an epilogue; None if it applies."""
        return self._product_lacks(self.tokens)

    @property
    def fold_lacks(self) -> str | None:
        """The first thing that the forward of two passes needs of a product with an epilogue; None if it applies."""
        return (
            ("a token" if self.tokens == 0 else None)
            or self._product_lacks(max(self.tokens, MIN_TOKENS))
            or ("no chunk to be named" if self.options.names_chunk else None)
            or ("topk = None" if self.options.topk is not None else None)
        )

    def _product_lacks(self, tokens: int) -> str | None:
        dtype = self.options.compute_dtype  # the weight's too, or that of its copy
        return (
            devices.reason_against_device(self.device)
            or reason_against_call(tokens, self.hidden_size, dtype, dtype)
            or (None if self.aligned or self.casts_weight else "rows of the weight that start at multiples of 16 bytes")
        )

    @property
    def casts_weight(self) -> bool:
        """Whether the weight's dtype is not the products'. Two passes in an epilogue then read a copy of the weight."""
        return self.weight_dtype != self.options.compute_dtype

    @property
    def two_pass_epilogue_lacks(self) -> str | None:
        """`epilogue_lacks` of a tolerance, which needs also that no chunk is named."""
        return self.epilogue_lacks or ("no chunk to be named" if self.options.names_chunk else None)
