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
LEAST_SHARE = 1 / 16


def inner_products(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    """(3, n) float32: s.t, s.s, t.t, differentiable for hidden (n, H) and weight (V, H)."""
    # On CUDA the logits' products are float32, but Gram matrices of 16-bit weights take 16-bit products.
    if len(hidden) * (8 if _splits(hidden) else 1) <= max(hidden.shape[1], teacher_hidden.shape[1]):
        return _from_logits(hidden, weight, teacher_hidden, teacher_weight)
    products, cancels = _FromGramMatrices.apply(hidden, weight, teacher_hidden, teacher_weight)
    cancelled = cancels.nonzero()[:, 0]
    if not len(cancelled):
        return products
    few = _from_logits(hidden[cancelled], weight, teacher_hidden[cancelled], teacher_weight)
    return products.index_copy(1, cancelled, few)


def _from_logits(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    hidden, teacher_hidden = hidden.float(), teacher_hidden.float()

    def of_rows(w: Tensor, u: Tensor) -> Tensor:
        with _exact(hidden.device):
            s, t = hidden @ w.float().mT, teacher_hidden @ u.float().mT
            return torch.stack([(s * t).sum(1), s.square().sum(1), t.square().sum(1)])

    parts = _parts(_rows_at_a_time(hidden, teacher_hidden, 24 * len(hidden)), weight, teacher_weight)
    return torch.stack(
        [checkpoint(of_rows, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    ).sum(0)


class _FromGramMatrices(torch.autograd.Function):
    """-> the products, and whether too much of a token's products cancels, (n,) bool."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight):
        products = hidden.new_empty(3, len(hidden), dtype=torch.float32)
        cancels = torch.zeros_like(products[0], dtype=torch.bool)
        step = _rows_at_a_time(hidden, teacher_hidden)
        with _exact(hidden.device):
            student, teacher = _gram(weight, weight, step), _gram(teacher_weight, teacher_weight, step)
            cross = _gram(weight, teacher_weight, step)
            tokens = MAX_CHUNK_TOKENS[kind_of(hidden.device)]
            for h, g, out, cancel in _parts(tokens, hidden, teacher_hidden, products.mT, cancels):
                out[:, 0] = times(h, cross).mul_(g).sum(1)
                for column, (x, gram) in enumerate([(h, student), (g, teacher)], 1):
                    out[:, column] = times(x, gram).mul_(x).sum(1)
                    cancel |= out[:, column] < LEAST_SHARE * (x.float().square() @ gram.diagonal())
        ctx.mark_non_differentiable(cancels)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, student, cross)
        return products, cancels

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad, _):
        """dL/dW = W sum_n dL/d(s.s) 2 h h' + U sum_n dL/d(s.t) g h'."""
        hidden, weight, teacher_hidden, teacher_weight, student, cross = saved
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
        by_student, by_teacher = torch.zeros_like(student), torch.zeros_like(cross.mT)
        with _exact(hidden.device):
            tokens = MAX_CHUNK_TOKENS[kind_of(hidden.device)]
            for h, g, out, factors in _parts(tokens, hidden, teacher_hidden, grad_hidden, grad.mT):
                on_st, on_ss = factors[:, :1], 2 * factors[:, 1:2]
                out.copy_(times(h, student).mul_(on_ss) + times(g, cross.mT).mul_(on_st))
                by_student += times(h.mT, h * on_ss)
                by_teacher += times(g.mT, h * on_st)
            for w, u, out in _parts(_rows_at_a_time(hidden, teacher_hidden), weight, teacher_weight, grad_weight):
                out.copy_(times(w, by_student) + times(u, by_teacher))
        return grad_hidden, grad_weight, None, None


def _gram(a: Tensor, b: Tensor, step: int) -> Tensor:
    """a (V, m), b (V, n) -> a' b (m, n) float32."""
    total, dtype = a.new_zeros(a.shape[1], b.shape[1], dtype=torch.float32), torch.promote_types(a.dtype, b.dtype)
    for a_rows, b_rows in _parts(step, a, b):
        gemm.accumulate(total, a_rows.to(dtype).mT, b_rows.to(dtype))
    return total


def times(factor: Tensor, matrix: Tensor) -> Tensor:
    """factor (m, k) @ matrix (k, n) float32 -> float32. A 16-bit factor on CUDA meets three 16-bit summands of it."""
    if not _splits(factor):
        return factor.float() @ matrix
    rest = matrix / (scale := matrix.abs().amax().clamp(min=torch.finfo(torch.float32).tiny))
    product = rest.new_zeros(factor.shape[0], rest.shape[1])
    for _ in range(3):
        summand = rest.to(factor.dtype)
        gemm.accumulate(product, factor, summand)
        rest = rest - summand
    return product.mul_(scale)


def _splits(factor: Tensor) -> bool:
    return factor.is_cuda and factor.dtype != torch.float32


def _rows_at_a_time(hidden: Tensor, teacher_hidden: Tensor, tile_bytes: int = 0) -> int:
    """Rows of the weights whose float32 copies, and tiles of so many bytes for each row, fit the workspace."""
    row_bytes = tile_bytes + 8 * (hidden.shape[1] + teacher_hidden.shape[1])
    return max(WORKSPACE_BYTES[kind_of(hidden.device)] // row_bytes, CHUNK_ALIGNMENT)


def _parts(step: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


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
