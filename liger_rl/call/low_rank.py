"""Low-rank terms of the head's logits, such as LoRA's. The sum of the two weights is never made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.call.checks import check_floating, check_shape
from liger_rl.call.tokens import TokenSelection
from liger_rl.kernels import gemm
from liger_rl.kernels.transform import check_number, check_type, fits_float32
from liger_rl.once import differentiable_once

JOINED_COLUMNS = 8  # a multiple of 8 16-bit columns: rows then start at multiples of 16 bytes, which TMA needs


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A low-rank term of the head, LoRA's (arXiv:2106.09685): logits += scaling * (hidden @ a.T) @ b.T.

    Attributes:
        a, b: (r, H) and (V, r), float32, bfloat16 or float16, whatever the head's dtype is. Like the head's logits, the
            term stays float32 from its products' accumulators on. The product with `a` runs in the wider dtype of
            hidden and `a`, or in autocast's dtype. In the products with dL/dlogits, hidden @ a.T and `b` are rounded to
            the head's compute dtype. With a sharded head, `b` is this rank's rows.
        scaling: factor on the term (LoRA: alpha / r).
        hidden: input of `a`, shaped like the call's hidden; None takes the call's. Example: hidden after a dropout.
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0
    hidden: Tensor | None = None

    def inputs(self, hidden: Tensor, live: TokenSelection) -> Tensor:
        """(..., H) -> (N, r) float32: scaling * (hidden @ a.T), 0 at tokens that do not count."""
        x = hidden if self.hidden is None else self.hidden
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        else:
            dtype = torch.promote_types(x.dtype, self.a.dtype)
        return _Inputs.apply(x.reshape(-1, x.shape[-1]), self.a, live, dtype) * self.scaling


def check_low_rank(low_rank: Sequence[LowRank], hidden: Tensor, weight: Tensor) -> None:
    check_type("low_rank", low_rank, (list, tuple), "a list or tuple of LowRank")
    for place, term in enumerate(low_rank):
        name = f"low_rank[{place}]"
        check_type(name, term, LowRank, "a LowRank")
        check_number(f"{name}.scaling", term.scaling)
        if not fits_float32(term.scaling):
            raise ValueError(f"{name}.scaling must be finite in float32, got {term.scaling}")
        for field in ("a", "b", "hidden"):
            tensor = getattr(term, field)
            if tensor is not None or field != "hidden":
                check_floating(f"{name}.{field}", tensor, hidden, "hidden")
        size, vocab = hidden.shape[-1], weight.shape[0]
        check_shape(f"{name}.a", term.a, (None, size), f"(r, H) with H = {size} from hidden")
        rank = term.a.shape[0]
        check_shape(f"{name}.b", term.b, (vocab, rank), f"(V, r) = ({vocab}, {rank}) from weight and {name}.a")
        if term.hidden is not None:
            check_shape(f"{name}.hidden", term.hidden, hidden.shape, f"{tuple(hidden.shape)} from hidden")


class _Inputs(torch.autograd.Function):
    """(hidden (N, H), a (r, H)) -> hidden @ a.T (N, r) float32, 0 at tokens that do not count.

    Forward and backward gather the rows that count, so no copy of the hidden states is kept.
    """

    @staticmethod
    def forward(ctx, hidden, a, live, dtype):
        ctx.live, ctx.dtype = live, dtype
        ctx.save_for_backward(hidden, a)
        with gemm.without_autocast(hidden.device):
            out = gemm.matmul(live.gather(hidden).to(dtype), a.to(dtype).T)
        return live.spread(out, hidden.shape[:1])

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad):
        (hidden, a), live, dtype = saved, ctx.live, ctx.dtype
        grad_hidden = grad_a = None
        with gemm.without_autocast(hidden.device):
            grad_rows = live.gather(grad).to(dtype)
            if ctx.needs_input_grad[0]:
                product = gemm.matmul(grad_rows, a.to(dtype)).to(hidden.dtype)
                grad_hidden = live.spread(product, hidden.shape[:1])
            if ctx.needs_input_grad[1]:
                grad_a = gemm.matmul(grad_rows.T, live.gather(hidden).to(dtype)).to(a.dtype)
        return grad_hidden, grad_a, None, None


def low_rank_factors(
    low_rank: Sequence[LowRank],
    hidden: Tensor,  # (..., H) of the call
    live: TokenSelection,
) -> tuple[Tensor | None, Tensor | None]:
    """-> inputs (N, r) and weight (V, r): inputs @ weight.T is the sum of all terms. (None, None) without a term."""
    if not low_rank:
        return None, None
    inputs, weights = [term.inputs(hidden, live) for term in low_rank], [t.b for t in low_rank]
    if len(low_rank) == 1:
        return inputs[0], weights[0]
    # Factors of two 16-bit dtypes become float32 here. Under autocast `cat` would refuse them.
    with gemm.without_autocast(hidden.device):
        return torch.cat(inputs, dim=1), torch.cat(weights, dim=1)


class LowRankRows(NamedTuple):
    """The low-rank term inputs @ weight.T, computed in the same product as the head's logits.

    The product is [hidden | inputs] @ [head's weight | weight].T. A factor wider than the compute dtype becomes two:
    its rounded values, and the rest. This takes a few more columns, and makes the term as exact as the head's logits.
    """

    inputs: Tensor  # (n, r) any float dtype
    weight: Tensor  # (V, r) any float dtype

    @classmethod
    def of(cls, inputs: Tensor | None, weight: Tensor | None) -> "LowRankRows | None":
        return None if inputs is None or weight is None else cls(inputs, weight)

    def beside_rows(self, hidden: Tensor) -> Tensor:
        """(n, H) in the compute dtype -> (n, H + columns of the term), [hidden | inputs]."""
        rounded, remainder = _split(self.inputs, hidden.dtype)
        repeated = [] if _fits(self.weight, hidden.dtype) else [rounded]
        return _side_by_side(hidden, rounded, *remainder, *repeated)

    def beside_tile(self, weight_tile: Tensor, first: int) -> Tensor:
        """(v, H) in the compute dtype, rows `first` and on of the head's weight -> (v, H + columns of the term)."""
        rounded, remainder = _split(self.weight[first : first + weight_tile.shape[0]], weight_tile.dtype)
        repeated = [] if _fits(self.inputs, weight_tile.dtype) else [rounded]
        return _side_by_side(weight_tile, rounded, *repeated, *remainder)


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    return torch.promote_types(values.dtype, dtype) == dtype


def _split(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """-> values rounded to `dtype`, and [values - rounded] if `dtype` is narrower, else []."""
    rounded = values.to(dtype)
    return rounded, [] if _fits(values, dtype) else [(values - rounded).to(dtype)]


def _side_by_side(*blocks: Tensor) -> Tensor:
    """The blocks side by side, with zero columns up to a multiple of JOINED_COLUMNS, which TMA can address."""
    width = sum(block.shape[1] for block in blocks)
    return torch.cat([*blocks, blocks[0].new_zeros(blocks[0].shape[0], -width % JOINED_COLUMNS)], dim=1)
