"""A low-rank term of the head's logits, LoRA's, without the sum of the two weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.call.checks import check_device, check_floating
from liger_rl.call.tokens import TokenSelection
from liger_rl.kernels import gemm
from liger_rl.kernels.transform import fits_float32
from liger_rl.once import differentiable_once

JOINED_COLUMNS = 8  # rows of two 16-bit factors side by side start at multiples of the 16 bytes that TMA asks for
ROWS_AT_ONCE = 4096  # of the hidden states, in another dtype or gathered


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A low-rank term of the head, LoRA's (arXiv:2106.09685): logits += scaling * (hidden @ a.T) @ b.T.

    Attributes:
        a, b: (r, H) and (V, r), both with gradient if they want one; float32, bfloat16 or float16, whatever the head's
            dtype is. Like the head's logits, the term stays float32 from its products' accumulators on. The product
            with `a` runs in the wider of the two dtypes, or in autocast's; the factors are rounded to the head's for
            the products of their gradients.
        scaling: factor on the term (LoRA: alpha / r).
        hidden: shaped like the call's hidden, what `a` is applied to in its place (after a dropout, say).
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0
    hidden: Tensor | None = None

    def inputs(self, hidden: Tensor, live: TokenSelection) -> Tensor:
        """(..., H) -> (N, r) float32, scaling * (hidden @ a.T), 0 for the tokens that do not count."""
        given = hidden if self.hidden is None else self.hidden
        kind = given.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        else:
            dtype = torch.promote_types(given.dtype, self.a.dtype)
        product = _product_in_graph if torch.compiler.is_compiling() else _Inputs.apply
        return product(given.reshape(-1, given.shape[-1]), self.a, live, dtype) * self.scaling


def check_low_rank(low_rank: Sequence[LowRank], hidden: Tensor, weight: Tensor) -> None:
    if not isinstance(low_rank, (list, tuple)):
        raise TypeError(f"low_rank must be a list or tuple of LowRank, got {type(low_rank).__name__}")
    for place, term in enumerate(low_rank):
        name = f"low_rank[{place}]"
        if not isinstance(term, LowRank):
            raise TypeError(f"{name} must be a LowRank, got {type(term).__name__}")
        if isinstance(term.scaling, bool) or not isinstance(term.scaling, (int, float)):
            raise TypeError(f"{name}.scaling must be a number, got {type(term.scaling).__name__}")
        if not fits_float32(term.scaling):
            raise ValueError(f"{name}.scaling must be finite in float32, got {term.scaling}")
        for part in ("a", "b", "hidden"):
            tensor = getattr(term, part)
            if part == "hidden" and tensor is None:
                continue
            check_floating(f"{name}.{part}", tensor)
            check_device(f"{name}.{part}", tensor, hidden, "hidden")
        size, vocab = hidden.shape[-1], weight.shape[0]
        if term.a.dim() != 2 or term.a.shape[1] != size or term.a.shape[0] == 0:
            raise ValueError(f"{name}.a must be (r, H) with H = {size} from hidden, got {tuple(term.a.shape)}")
        rank = term.a.shape[0]
        if term.b.shape != (vocab, rank):
            raise ValueError(
                f"{name}.b must be (V, r) = ({vocab}, {rank}) from weight and {name}.a, got {tuple(term.b.shape)}"
            )
        if term.hidden is not None and term.hidden.shape != hidden.shape:
            raise ValueError(f"{name}.hidden must be {tuple(hidden.shape)} from hidden, got {tuple(term.hidden.shape)}")


class _Inputs(torch.autograd.Function):
    """(hidden (N, H), a (r, H)) -> hidden @ a.T (N, r) float32, 0 for the tokens that do not count.

    Rows are gathered and converted a few at a time, and again in the backward: no copy of the hidden states is kept.
    """

    @staticmethod
    def forward(ctx, hidden, a, live, dtype):
        ctx.live, ctx.dtype = live, dtype
        ctx.save_for_backward(hidden, a)
        out = torch.zeros(hidden.shape[0], a.shape[0], dtype=torch.float32, device=hidden.device)
        with gemm.without_autocast(hidden.device):
            factor = a.to(dtype)
            for rows in _parts(live):
                out[rows] = gemm.matmul(_taken(hidden, rows, live).to(dtype), factor.T)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad):
        (hidden, a), live, dtype = saved, ctx.live, ctx.dtype
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        total = torch.zeros_like(a, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        with gemm.without_autocast(hidden.device):
            factor = a.to(dtype)
            for rows in _parts(live):
                part = _taken(grad, rows, live).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = gemm.matmul(part, factor).to(hidden.dtype)
                if total is not None:
                    gemm.accumulate(total, part.T, _taken(hidden, rows, live).to(dtype))
        return grad_hidden, None if total is None else total.to(a.dtype), None, None


def _product_in_graph(hidden: Tensor, a: Tensor, live: TokenSelection, dtype: torch.dtype) -> Tensor:
    """The product of `_Inputs` in plain PyTorch, which a graph holds and differentiates; `live` has a mask.

    Its factors become float32, because the product of 16-bit factors would be rounded: a copy of the hidden states.
    """
    assert live.mask is not None
    rows = torch.where(live.mask[:, None], hidden, 0).to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return rows.float() @ a.to(dtype).float().T


def low_rank_factors(
    low_rank: Sequence[LowRank],
    hidden: Tensor,  # (..., H) of the call
    live: TokenSelection,
) -> tuple[Tensor | None, Tensor | None]:
    """-> (N, r) and (V, r), whose product is what all terms add up to; None without any."""
    if not low_rank:
        return None, None
    inputs, weights = [term.inputs(hidden, live) for term in low_rank], [t.b for t in low_rank]
    if len(low_rank) == 1:
        return inputs[0], weights[0]
    # Autocast would refuse to join factors of two 16-bit dtypes, which become float32 here.
    with gemm.without_autocast(hidden.device):
        return torch.cat(inputs, dim=1), torch.cat(weights, dim=1)


def _parts(live: TokenSelection) -> list:
    """The rows that count, a few at a time: pieces of an index, or slices of all rows."""
    pieces = [slice(start, min(start + ROWS_AT_ONCE, live.count)) for start in range(0, live.count, ROWS_AT_ONCE)]
    return pieces if live.index is None else [live.index[piece] for piece in pieces]


def _taken(values: Tensor, rows: slice | Tensor, live: TokenSelection) -> Tensor:
    """Some of the rows. A row that a mask leaves out is 0, whatever it holds."""
    return values[rows] if live.mask is None else torch.where(live.mask[rows, None], values[rows], 0)


class LowRankRows(NamedTuple):
    """A low-rank term of the logits, inputs @ weight.T, that is computed in one product with hidden @ weight.T.

    Both stand side by side: [hidden | inputs] @ [weight | low-rank weight].T. A factor wider than the compute dtype
    becomes two, its rounded part and the rest, at the price of a few more columns: the term is as exact as the head's.
    """

    inputs: Tensor  # (n, r) any float dtype
    weight: Tensor  # (V, r) any float dtype

    @classmethod
    def of(cls, inputs: Tensor | None, weight: Tensor | None) -> "LowRankRows | None":
        return None if inputs is None or weight is None else cls(inputs, weight)

    def beside_rows(self, hidden: Tensor) -> Tensor:
        """(n, H) in the compute dtype -> (n, H + ...)"""
        rounded, rest = _split(self.inputs, hidden.dtype)
        again = [] if _fits(self.weight, hidden.dtype) else [rounded]
        return _joined(hidden, rounded, *rest, *again)

    def beside_tile(self, weight_tile: Tensor, first: int) -> Tensor:
        """(v, H) in the compute dtype, the weight from row `first` on -> (v, H + ...)"""
        rounded, rest = _split(self.weight[first : first + weight_tile.shape[0]], weight_tile.dtype)
        again = [] if _fits(self.inputs, weight_tile.dtype) else [rounded]
        return _joined(weight_tile, rounded, *again, *rest)


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    return torch.promote_types(values.dtype, dtype) == dtype


def _split(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """-> values rounded to `dtype`, and the rest if they do not fit."""
    rounded = values.to(dtype)
    return rounded, [] if _fits(values, dtype) else [(values - rounded).to(dtype)]


def _joined(*parts: Tensor) -> Tensor:
    """Side by side, with zeros up to a width that TMA can address."""
    width = sum(part.shape[1] for part in parts)
    return torch.cat([*parts, parts[0].new_zeros(parts[0].shape[0], -width % JOINED_COLUMNS)], dim=1)
