"""Inner products of two heads' logits for each token: s.t, s.s and t.t, where s = W h and t = U g.

s.t = h'(W'U)g, s.s = h'(W'W)h and t.t = g'(U'U)g. The Gram matrices take 2 V H^2 operations each, for any number of
tokens, and no logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_rl.engines.tiles import CHUNK_ALIGNMENT, MAX_CHUNK_TOKENS, WORKSPACE_BYTES, kind_of
from liger_rl.kernels import gemm
from liger_rl.once import differentiable_once

# h'Gh has an error of about 1e-7 sum_i h_i^2 G_ii. Tokens with less than this share of the sum get logits.
LEAST_SHARE = 1 / 64


def inner_products(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """(3, n) float32: s.t, s.s, t.t of hidden (n, H) and weight (V, H), which are differentiable, and the teacher's."""
    # Logits are float32 products, Gram matrices of 16-bit weights are not.
    if len(hidden) * (8 if _splits(hidden) else 1) <= max(hidden.shape[1], teacher_hidden.shape[1]):
        return _from_logits(hidden, weight, teacher_hidden, teacher_weight)
    products, scales = _FromGramMatrices.apply(hidden, weight, teacher_hidden, teacher_weight)
    cancelled = (products[1:] < LEAST_SHARE * scales).any(0).nonzero()[:, 0]
    if not len(cancelled):
        return products
    few = _from_logits(hidden[cancelled], weight, teacher_hidden[cancelled], teacher_weight)
    return products.index_copy(1, cancelled, few)


def _from_logits(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    def of_rows(w: Tensor, u: Tensor) -> Tensor:
        with _exact(hidden.device):
            s, t = hidden.float() @ w.float().mT, teacher_hidden.float() @ u.float().mT
            return torch.stack([(s * t).sum(1), s.square().sum(1), t.square().sum(1)])

    step = _rows(hidden, teacher_hidden, bytes_per_row=24 * len(hidden))
    parts = zip(weight.split(step), teacher_weight.split(step), strict=True)
    products = [checkpoint(of_rows, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(products).sum(0)


class _FromGramMatrices(torch.autograd.Function):
    """-> the products, and sum_i h_i^2 G_ii of both heads, (2, n)."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight):
        products, scales = (torch.empty(count, len(hidden), device=hidden.device) for count in (3, 2))
        step, tokens = _rows(hidden, teacher_hidden), MAX_CHUNK_TOKENS[kind_of(hidden.device)]
        with _exact(hidden.device):
            student, cross, teacher = (
                _gram(a, b, step) for a, b in ((weight, weight), (weight, teacher_weight), (teacher_weight,) * 2)
            )
            for h, g, out, scale in zip(
                *(hidden.split(tokens), teacher_hidden.split(tokens)),
                *(x.split(tokens, 1) for x in (products, scales)),
                strict=True,
            ):
                out[0] = times(h, cross).mul_(g).sum(1)
                for row, (x, gram) in enumerate([(h, student), (g, teacher)]):
                    out[1 + row] = times(x, gram).mul_(x).sum(1)
                    scale[row] = x.float().square() @ gram.diagonal()
        ctx.mark_non_differentiable(scales)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, student, cross)
        return products, scales

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad, _):
        """dL/dW = W sum_n dL/d(s.s) 2 h h' + U sum_n dL/d(s.t) g h'."""
        hidden, weight, teacher_hidden, teacher_weight, student, cross = saved
        step, tokens = _rows(hidden, teacher_hidden), MAX_CHUNK_TOKENS[kind_of(hidden.device)]
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
        by_student, by_teacher = torch.zeros_like(student), torch.zeros_like(cross.mT)
        with _exact(hidden.device):
            parts = (
                x.split(tokens) for x in (hidden, teacher_hidden, grad_hidden, grad[0, :, None], 2 * grad[1, :, None])
            )
            for h, g, out, grad_st, grad_ss in zip(*parts, strict=True):
                out.copy_(times(h, student).mul_(grad_ss) + times(g, cross.mT).mul_(grad_st))
                by_student += times(h.mT, h * grad_ss)
                by_teacher += times(g.mT, h * grad_st)
            for w, u, out in zip(*(x.split(step) for x in (weight, teacher_weight, grad_weight)), strict=True):
                out.copy_(times(w, by_student) + times(u, by_teacher))
        return grad_hidden, grad_weight, None, None


def _rows(hidden: Tensor, teacher_hidden: Tensor, bytes_per_row: int = 0) -> int:
    """Rows of the weights at a time, for float32 copies of the rows and `bytes_per_row` of tiles."""
    bytes_per_row += 8 * (hidden.shape[1] + teacher_hidden.shape[1])
    return max(WORKSPACE_BYTES[kind_of(hidden.device)] // bytes_per_row, CHUNK_ALIGNMENT)


def _gram(a: Tensor, b: Tensor, step: int) -> Tensor:
    """a (V, m), b (V, n) -> a' b (m, n) float32."""
    total, dtype = torch.zeros(a.shape[1], b.shape[1], device=a.device), torch.promote_types(a.dtype, b.dtype)
    for a_rows, b_rows in zip(a.split(step), b.split(step), strict=True):
        gemm.accumulate(total, a_rows.to(dtype).mT, b_rows.to(dtype))
    return total


def _splits(factor: Tensor) -> bool:
    return factor.is_cuda and factor.dtype != torch.float32


def times(factor: Tensor, matrix: Tensor) -> Tensor:
    """factor (m, k) @ matrix (k, n) float32 -> float32. A 16-bit factor on CUDA meets three 16-bit summands of it."""
    if not _splits(factor):
        return factor.float() @ matrix
    scale = matrix.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    product, rest = torch.zeros(factor.shape[0], matrix.shape[1], device=factor.device), matrix / scale
    for _ in range(3):
        summand = rest.to(factor.dtype)
        gemm.accumulate(product, factor, summand)
        rest = rest - summand
    return product.mul_(scale)


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """A context without autocast and without TF32."""
    cublas = torch.backends.cuda.matmul
    name, off = ("fp32_precision", "ieee") if hasattr(cublas, "fp32_precision") else ("allow_tf32", False)
    before = getattr(cublas, name)
    setattr(cublas, name, off)
    try:
        with gemm.without_autocast(device):
            yield
    finally:
        setattr(cublas, name, before)
