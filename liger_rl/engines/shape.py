"""A call of the head without its tensors, from which the planner picks an engine and bounds its memory."""

import math
from dataclasses import dataclass

import torch

from liger_rl.call.checks import Passes
from liger_rl.call.head_call import HeadCall
from liger_rl.call.options import IDENTITY, EngineOptions
from liger_rl.engines.tiles import kind_of
from liger_rl.kernels import devices, gemm
from liger_rl.kernels.devices import MIN_TOKENS, aligned, call_lacks, compiles

LIBRARY_BYTES = {"cuda": 64 << 20, "cpu": 0}  # cuBLAS's own workspace, at most
BYTES_PER_TOKEN = 256  # statistics, their gradients, indices, and intermediate values
NO_GRADIENT = "an input that wants a gradient"


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """A call without its tensors."""

    tokens: int  # N
    vocab: int  # V
    hidden_size: int  # H
    dtype: torch.dtype  # of the hidden states
    weight_dtype: torch.dtype
    device: torch.device
    needs: tuple[bool, bool]  # gradients of the hidden states, and of the weight
    wants_gradient: bool  # of these, a bias or a low-rank term
    bias: bool
    rank: int  # columns of low-rank terms together
    in_place: bool  # the weight's gradient is added to a float32 tensor of the caller's
    options: EngineOptions
    auto_tolerance: bool  # the tolerance is "auto", which gives way to one pass
    targets: int = 0  # in the list of each token, if tokens have lists
    contiguous: tuple[bool, bool] = (True, True)  # the hidden states, and the weight
    aligned: bool = True  # the weight's rows start where the product of our own can read them
    passes: Passes = "two"
    together: int = 1  # tokens that the gradient of one of them depends on, at most
    loss_lacks: str | None = None  # what one pass needs that the loss does not have

    @classmethod
    def of(
        cls,
        call: HeadCall,
        options: EngineOptions,
        *,
        passes: Passes = "two",
        together: int = 1,
        loss_lacks: str | None = None,
    ) -> "HeadShape":
        """Of a call whose tensors are checked."""
        needs = call.needs
        return cls(
            tokens=math.prod(call.hidden.shape[:-1]),
            vocab=call.weight.shape[0],
            hidden_size=call.weight.shape[1],
            dtype=call.hidden.dtype,
            weight_dtype=call.weight.dtype,
            device=call.hidden.device,
            needs=needs[:2],
            wants_gradient=any(needs) or call.head_needs,
            bias=call.bias is not None,
            rank=call.rank,
            in_place=call.weight_grad is not None,
            options=options,
            auto_tolerance=call.options.grad_tolerance == "auto",
            targets=call.targets.shape[-1] if call.several else 0,
            contiguous=(call.hidden.is_contiguous(), call.weight.is_contiguous()),
            aligned=aligned(call.weight),
            passes=passes,
            together=together,
            loss_lacks=loss_lacks,
        )

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def ids(self) -> int:
        """Ids for each token: several targets, and the largest of the vocabulary."""
        return self.targets + (self.options.topk or 0)

    @property
    def epilogue_lacks(self) -> str | None:
        """What the product with its work in the epilogue would need; None where it applies."""
        tokens = max(self.tokens, MIN_TOKENS) if self.options.batch_invariant else self.tokens
        dtype = self.options.compute_dtype  # also of the weight, or of its copy
        return (
            devices.device_lacks(self.device)
            or ("a head without low_rank terms" if self.rank else None)
            or ("no topk" if self.options.topk is not None else None)
            or ("one temperature for all tokens" if self.options.transform.per_token else None)
            or call_lacks(tokens, self.hidden_size, dtype, dtype)
            or (None if self.aligned or self.casts_weight else "rows of the weight that start at multiples of 16 bytes")
        )

    @property
    def casts_weight(self) -> bool:
        """A copy of the weight, in the dtype of products, is what two passes in an epilogue read."""
        return self.weight_dtype != self.options.compute_dtype

    @property
    def epilogue_of_two_lacks(self) -> str | None:
        return self.epilogue_lacks or ("no chunk to be named" if self.options.names_chunk else None)

    @property
    def base_bytes(self) -> int:
        """What every engine takes: libraries, numbers per token, and contiguous copies of tensors that are not."""
        hidden = 0 if self.contiguous[0] else self.tokens * self.hidden_size * self.dtype.itemsize
        relaid = not self.contiguous[1] and self.needs[1] and not self.in_place  # autograd copies to a leaf's strides
        weight = self.vocab * self.hidden_size * self.weight_dtype.itemsize * relaid
        return LIBRARY_BYTES[kind_of(self.device)] + BYTES_PER_TOKEN * self.tokens + hidden + weight

    @property
    def logit_bytes(self) -> int:
        """A float32 logit, with what eager kernels make on the way to its gradient."""
        if compiles(self.device):
            return 4
        transform = self.options.transform
        plain = not transform.per_token and transform == IDENTITY and not self.bias
        return (16 if plain else 32) + 12 * self.options.entropy + 8 * (len(self.options.extras) > 0)

    @property
    def column_bytes(self) -> int:
        """What a product makes of each element of a weight's tile: copies, and a gradient that is added elsewhere."""
        copies = self.casts_weight or not self.contiguous[1]
        added = 4 * (self.cuda and not gemm.ADDS_TO_FLOAT32)
        return self.options.compute_dtype.itemsize * (copies + (self.rank > 0)) + self.widened_bytes + added

    @property
    def widened_bytes(self) -> int:
        """On CPU, the float32 copy of one element of a product's factor."""
        return 4 if not self.cuda and self.options.compute_dtype.itemsize < 4 else 0

    @property
    def sum_bytes(self) -> int:
        """A float32 sum of the weight's gradient, unless it is the gradient itself."""
        apart = self.needs[1] and not self.in_place and self.weight_dtype != torch.float32
        return 4 * self.vocab * self.hidden_size * apart
