"""The formulas in PyTorch: the specification of every shared kernel, and the kernels on CPU and without Triton.

With z the transformed logits and p = exp(z - lse):

    logp = z_y - lse,  entropy = lse - sum_v p_v z_v
    dL/dz_v = dL/dlogp (1[v=y] - p_v) - dL/dentropy p_v (log p_v + entropy) + dL/dlse p_v + dL/dmean_logits / V
    dL/dx_v = dL/dz_v dz_v/dx_v,  z = softcap tanh(scale x / softcap) / temperature

`fold` and `grad` take a tile of the vocabulary. `fold_rows` and `grad_rows` take whole rows of given logits: (N, V)
with targets (N,), or (B, P, V) with targets (B, T) and T <= P. A token counts if its mask is not 0 and its target is an
id in [0, V). Logits of tokens that do not count, NaN included, change nothing.
"""

import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from liger_rl.kernels.statistics import LOWEST, Fold, TokenGradients, TokenStatistics
from liger_rl.kernels.transform import LogitTransform

FLOAT32_BYTES = 16 << 20  # bound of the float32 copy of a piece of given rows
ROWS = 2048  # rows that `write_rows` converts at a time, so that the copy stays small
# Smallest log-probability in products with p. exp(-200) is 0 in float32, so nothing is lost. For a banned id, 0 * -200
# is 0, but 0 * -inf would be NaN.
LOWEST_LOG_PROBABILITY = -200.0


def fold(
    logits: Tensor,  # (n, v) any float dtype
    targets: Tensor,  # (n,) token ids of the whole vocabulary
    first: int,  # vocabulary id of the tile's first column
    bias: Tensor | None,  # (v,)
    transform: LogitTransform,
    state: Fold | None,  # (n,) each, of the tiles before this one; a kernel may overwrite it
    *,
    entropy: bool = False,  # results of the first tile, whose `state` is None; later tiles have those of `state`
    extras: Collection[str] = (),
) -> Fold:
    """The running sums after one more tile of logits."""
    z = transform_logits(logits, bias, transform)
    peak = z.amax(-1).clamp_(min=LOWEST) if state is None else torch.maximum(state.peak, z.amax(-1))
    if state is not None:
        entropy, extras = state.moment is not None, state.extras
    sum_logits = z.sum(-1) if "mean_logits" in extras else None
    peak_before = None
    if "is_top1" in extras:
        before_target = torch.arange(first, first + z.shape[-1], device=z.device) < targets.unsqueeze(1)
        peak_before = torch.where(before_target, z, -math.inf).amax(-1)
    shifted = z - peak.unsqueeze(1)
    if entropy:
        exp = shifted.clamp_(min=LOWEST_LOG_PROBABILITY).exp()
        moment = (exp * shifted).sum(-1)
    else:
        exp, moment = shifted.exp_(), None
    sum_sq_exp = exp.square().sum(-1) if "log_sum_sq_probs" in extras else None
    column, hit = _target_columns(targets.unsqueeze(1), first, z.shape[-1])
    target = torch.where(hit, z.gather(1, column), 0.0 if state is None else state.target.unsqueeze(1)).squeeze(1)
    tile = Fold(peak, exp.sum(-1), target, moment, sum_sq_exp, sum_logits, peak_before)
    return tile if state is None else tile.with_earlier_tiles(state)


def grad(
    logits: Tensor,  # as in fold
    targets: Tensor,
    first: int,
    bias: Tensor | None,
    transform: LogitTransform,
    tokens: TokenGradients,  # (n,) each
    out: Tensor,  # shaped like logits, any float dtype; may be `logits` itself
) -> None:
    """out = dL/dx of a tile of logits."""
    z = transform_logits(logits, bias, transform)
    # A softcap's derivative reads z again, which may be in the memory of `out`.
    memory = out if out.dtype == torch.float32 and transform.softcap is None else None
    log_p, at_target = torch.sub(z, tokens.lse.unsqueeze(1), out=memory), tokens.at_target
    targets = targets.unsqueeze(1)
    if tokens.grad_entropy is None or tokens.entropy is None:
        p = log_p.exp_()
    else:
        p = log_p.clamp_(min=LOWEST_LOG_PROBABILITY).exp()
        if at_target is not None:
            target_log_p = log_p.gather(1, _target_columns(targets, first, z.shape[-1])[0]).squeeze(1)
            at_target = at_target - tokens.grad_entropy * entropy_term(target_log_p, tokens.entropy)
    grad_z = grad_except_targets(log_p, p, tokens)
    if at_target is not None:
        write_at_ids(grad_z, targets, at_target.unsqueeze(1), first)
    grad_x = times_derivative(with_uniform(grad_z, tokens), z, transform)
    if grad_x is not out:
        out.copy_(grad_x)


def grad_except_targets(
    log_p: Tensor,  # (n, v) finite; read and overwritten only with a gradient of the entropy
    p: Tensor,  # (n, v) overwritten
    tokens: TokenGradients,  # (n,) each
) -> Tensor:
    """-> dL/dz (n, v) float32 at all entries except the targets, where it is wrong (`write_at_ids` fixes it)."""
    if tokens.grad_entropy is None or tokens.entropy is None:
        return p.mul_(-tokens.grad_logps.unsqueeze(1))
    # -p (g + e (log p + entropy)) takes one temporary less than the two terms computed apart.
    grad_z = log_p.add_(tokens.entropy.unsqueeze(1)).mul_(tokens.grad_entropy.unsqueeze(1))
    return grad_z.add_(tokens.grad_logps.unsqueeze(1)).mul_(p).neg_()


def with_uniform(grad_z: Tensor, tokens: TokenGradients) -> Tensor:
    """dL/dz (n, v) plus dL/dmean_logits / V, in the memory of grad_z."""
    return grad_z if tokens.uniform is None else grad_z.add_(tokens.uniform[:, None])


def entropy_term(log_p: Tensor, entropy: Tensor) -> Tensor:
    """p (log p + entropy), which is 0 for a banned id: exp(-inf) times -inf would be NaN."""
    log_p = log_p.clamp(min=LOWEST_LOG_PROBABILITY)
    return log_p.exp() * (log_p + entropy)


def _target_columns(ids: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """ids (n, K) -> their columns in a tile, clamped to [0, width), and (n, K) bool: the id is in the tile."""
    column = ids - first if first else ids
    clamped = column.clamp(0, width - 1)
    return clamped, clamped == column


def transform_logits(logits: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    """z in float32. It may be `logits` itself, so the caller must not write to it."""
    x = logits.float()
    if bias is not None:
        x = x + bias.float()
    z = x
    if transform.softcap is not None:
        z = (x * (transform.scale / transform.softcap)).tanh_().mul_(transform.softcap)
    elif transform.scale != 1.0:
        z = x * transform.scale
    return z / transform.temperature if transform.temperature != 1.0 else z


def tanh_square(z: Tensor, transform: LogitTransform) -> Tensor:
    """tanh^2 of transformed logits z under a softcap."""
    assert transform.softcap is not None
    return (z * (transform.temperature / transform.softcap)).square_()


def times_derivative(grad_z: Tensor, z: Tensor, transform: LogitTransform) -> Tensor:
    """dL/dx = dL/dz dz/dx in the memory of grad_z, with dz/dx = scale / temperature (1 - tanh^2)."""
    if transform.softcap is not None:
        grad_z.mul_(tanh_square(z, transform).neg_().add_(1.0))
    factor = transform.scale / transform.temperature
    return grad_z.mul_(factor) if factor != 1.0 else grad_z


def fold_rows(
    logits: Tensor, targets: Tensor, mask: Tensor | None, transform: LogitTransform, *, entropy: bool
) -> TokenStatistics:
    """-> statistics (tokens,) in the order of targets.flatten(). A token that does not count has 0, and lse +inf."""
    counts, flat_targets = _live_mask(logits, targets, mask), targets.flatten().long()
    columns = torch.empty(1 + entropy, targets.numel(), dtype=torch.float32, device=logits.device)
    lse = torch.empty(targets.numel(), dtype=torch.float64, device=logits.device)
    for tokens, rows in _pieces(logits, targets):
        piece = fold(logits[rows], flat_targets[tokens], 0, None, transform, None, entropy=entropy).finish()
        for column, values in zip((lse, *columns), (piece.lse, piece.logps, piece.entropy), strict=False):
            column[tokens] = values
    columns.masked_fill_(~counts, 0.0)
    lse.masked_fill_(~counts, math.inf)
    return TokenStatistics(columns[0], lse, columns[1] if entropy else None)


def grad_rows(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: LogitTransform,
    statistics: TokenStatistics,  # from `fold_rows`
    grads: tuple[Tensor, Tensor | None],  # (tokens,) float32: dL/dlogp, dL/dentropy
    out: Tensor,  # shaped like logits; every row is written, with 0 if the token has no gradient
) -> None:
    """out = dL/dx of given logits."""
    (grad_logps, grad_entropy), flat_targets = grads, targets.flatten().long()
    has_gradient = grad_logps != 0 if grad_entropy is None else (grad_logps != 0) | (grad_entropy != 0)
    has_gradient = has_gradient & _live_mask(logits, targets, mask)
    gradients = TokenGradients.of(statistics, grad_logps, grad_entropy).with_float32_lse()
    for tokens, rows in _pieces(logits, targets):
        gradient = torch.empty(len(rows[0]), logits.shape[-1], dtype=torch.float32, device=logits.device)
        grad(logits[rows], flat_targets[tokens], 0, None, transform, gradients.take(tokens), gradient)
        out[rows] = gradient.masked_fill_(~has_gradient[tokens, None], 0.0).to(out.dtype)
    if logits.dim() == 3:
        out[:, targets.shape[1] :] = 0


def _live_mask(logits: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
    """(tokens,) bool: the tokens that count."""
    targets = targets.long()  # a narrow dtype would wrap the vocabulary's size in comparisons
    counts = (targets >= 0) & (targets < logits.shape[-1])
    return (counts if mask is None else counts & (mask != 0)).flatten()


def _pieces(logits: Tensor, targets: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Slices of the flattened tokens, FLOAT32_BYTES of logits each, with the indices of their rows of logits."""
    step = max(1, FLOAT32_BYTES // (4 * logits.shape[-1]))
    for first in range(0, targets.numel(), step):
        last = min(first + step, targets.numel())
        yield slice(first, last), torch.unravel_index(torch.arange(first, last, device=logits.device), targets.shape)


def select_tokens(
    targets: Tensor, mask: Tensor | None, vocab: int, needed: Tensor | None = None
) -> tuple[Tensor, list[int]]:
    """Positions of the tokens that count and are needed. A token counts if its mask is nonzero and its target >= 0.

    The Triton kernel does not wait for the device: its integers are a tensor there.

    Args:
        targets: (B, T) or (N,) integer ids; those >= vocab are counted as outside.
        mask: shaped like targets.
        needed: shaped like targets or (B, 1), nonzero where a token is needed; None needs all.

    Returns:
        int64 (n,) or longer, whose first n entries are the flat positions in ascending order; and (4,) integers: n; the
            number of tokens that count, needed or not, with a target outside the vocabulary; the largest of these
            targets, or 0; the number of mask values other than 0 and 1.
    """
    targets = targets.long()  # a narrow dtype would wrap the vocabulary's size in comparisons
    counted = targets >= 0 if mask is None else torch.logical_and(targets >= 0, mask)
    live = counted if needed is None else torch.logical_and(counted, needed)
    positions = live.flatten().nonzero().squeeze(1)
    outside = largest = improper = 0
    if targets.numel() and targets.max().item() >= vocab:
        outside_targets = targets[counted & (targets >= vocab)]
        outside = outside_targets.numel()
        largest = int(outside_targets.max()) if outside else 0
    if mask is not None and mask.dtype != torch.bool:
        improper = int(((mask != 0) & (mask != 1)).sum())
    return positions, [positions.numel(), outside, largest, improper]


def write_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """out[index] = rows, for float32 rows (n, H), an index (n,) without repeats and out (N, H) of any float dtype."""
    for first in range(0, rows.shape[0], ROWS):
        piece = slice(first, first + ROWS)
        out.index_copy_(0, index[piece], rows[piece].to(out.dtype))


def write_at_ids(
    tile: Tensor,  # (n, v) any float dtype
    ids: Tensor,  # (n, K) int64; ids outside the tile are skipped
    values: Tensor,  # (n, K) float32; the same number at each repetition of an id in a row
    first: int,  # id of the tile's first column
) -> None:
    """tile[i, ids[i, k] - first] = values[i, k]"""
    column, hit = _target_columns(ids, first, tile.shape[1])
    # Nothing waits for the device: in place of an id outside the tile we write another one of its row again, or what
    # the row has already.
    if ids.shape[1] > 1:
        hit_place = hit.to(torch.uint8).argmax(1, keepdim=True)
        column = torch.where(hit, column, column.gather(1, hit_place))
        values = torch.where(hit, values, values.gather(1, hit_place))
        hit = hit.any(1, keepdim=True)
    tile.scatter_(1, column, torch.where(hit, values.to(tile.dtype), tile.gather(1, column)))
