"""Draws an id of each token from its softmax, with the logits of INVARIANT_TOKENS tokens in memory at most.

1. Over the whole vocabulary the product's epilogue draws an id of each tile, and a small kernel draws the tile.
2. Under top-k, top-p or min-p the epilogue keeps the exponentials of a few hundred tokens at a time. They name the
   candidates, whose own logits decide. A token whose candidates are too many or too unlikely takes 3.
3. Where the product has no epilogue, the ids are drawn from tiles of logits.

A draw depends on its token's row, the head, the seed and the token's position. With u and v the two uniform numbers of
a token, u draws the tile and v the id in it; under limits u draws the id. Each draw is the first id, or tile, at which
the sum of the probabilities before it and of its own exceeds u, in the order of the ids.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_rl.call.head_call import HeadCall
from liger_rl.call.options import EngineOptions, resolved
from liger_rl.call.support import Limits, Support, kept_ids, offsets_of
from liger_rl.call.tokens import TokenSelection
from liger_rl.engines.dense import in_order, two_pass
from liger_rl.engines.dense.in_order import INVARIANT_TOKENS, MULTIPLE
from liger_rl.engines.interface import Head
from liger_rl.engines.run import head_of, log_probs
from liger_rl.engines.tiles import spans
from liger_rl.kernels import devices, for_device, gemm
from liger_rl.kernels.reference import Kept, Uniforms, transformed
from liger_rl.kernels.segments import Factors
from liger_rl.kernels.statistics import BLOCK_VOCAB
from liger_rl.kernels.transform import LogitTransform

KEPT_BYTES = 128 << 20  # of exponentials at a time


class Lists(NamedTuple):
    """The ids that could be drawn."""

    ids: Tensor  # (P,) token after token, ascending
    counts: Tensor  # (n,) int64


class Drawn(NamedTuple):
    """The draws of n tokens."""

    ids: Tensor  # (n,) int64
    logps: Tensor  # (n,) float32
    lists: Lists | None  # if asked for
    fallbacks: Tensor  # () int64, tokens whose candidates do not decide


def sample(call: HeadCall, dtype: torch.dtype, limits: Limits, uniforms: Uniforms | None, *, with_lists: bool) -> Drawn:
    """One draw of each token, the targets and the mask of the call not read.

    Without `uniforms`, which goes with no limits, the id of the largest logit.
    """
    with gemm.without_autocast(call.hidden.device):
        return _sample(call, dtype, limits, uniforms, with_lists=with_lists)


def _sample(
    call: HeadCall, dtype: torch.dtype, limits: Limits, uniforms: Uniforms | None, *, with_lists: bool
) -> Drawn:
    n = call.targets.numel()
    head = head_of(call, call.targets.view(-1), TokenSelection(n), None)
    rows, options = head.gathered(dtype).with_weight_in(dtype), resolved(call.options, dtype)
    limited = uniforms is not None and not limits.none
    need = _lacks(rows)
    if limited and not call.hidden.dtype == call.weight.dtype == dtype:
        need = need or "hidden and weight in the dtype of the products, which a support reads as they are"
    if need is not None:
        if limited and call.options.fixed_shape:
            raise ValueError(f"fixed_shape with a top_k, top_p or min_p needs {need}")
        ids, lists = _draw_from_logits(rows, options, limits, uniforms)
        # A support's engine reads hidden states in their own dtype.
        logps = _logps(call, dtype, rows._replace(hidden=call.hidden.flatten(0, -2)), ids, lists)
        return Drawn(ids, logps, lists, _count(0, ids))
    rows = in_order.padded_rows(rows, MULTIPLE)
    transform = rows.transform(options, slice(None))
    if uniforms is None or limits.none:
        from liger_rl.kernels import epilogue

        ids = torch.empty_like(rows.targets)
        state, _ = epilogue.gemm_state(
            rows.hidden, rows.weight, rows.bias, rows.targets, transform, entropy=False, drawn=ids,
            uniforms=None if uniforms is None else _padded(uniforms, ids.numel()),
        )  # fmt: skip
        return Drawn(ids[:n], state.finish().logps[:n], None, _count(0, ids))
    drawn, lost = _draw_from_candidates(rows, options, limits, uniforms, n)
    if call.options.fixed_shape:
        ids, logps = torch.where(lost, -1, drawn.ids), torch.where(lost, 0.0, drawn.logps)
        return Drawn(ids, logps, None, lost.sum())
    lost = lost.nonzero().squeeze(1)
    fast = Drawn(drawn.ids, drawn.logps, _lists(drawn, lost) if with_lists else None, _count(0, lost))
    if not lost.numel():
        return fast
    temperatures = None if rows.temperatures is None else rows.temperatures[lost]
    picked = rows._replace(
        hidden=rows.hidden[lost], targets=rows.targets[lost], temperatures=temperatures,
        live=TokenSelection(lost.numel()),
    )  # fmt: skip
    ids, lists = _draw_from_logits(picked, options, limits, uniforms.at(lost))
    return _joined(fast, lost, Drawn(ids, _logps(call, dtype, picked, ids, lists), lists, _count(lost.numel(), lost)))


def _count(fallbacks: int, like: Tensor) -> Tensor:
    return torch.full((), fallbacks, dtype=torch.int64, device=like.device)


def _lacks(rows: Head) -> str | None:
    """The first thing that a product with an epilogue needs and these rows lack."""
    if not devices.folds(rows.hidden, rows.weight):
        return devices.device_lacks(rows.hidden.device) or "16-bit hidden states and weight, in aligned rows"
    # Without halves in registers of their own, a draw would spill 2504 bytes a thread.
    return None if devices.family_of(rows.hidden.device).halves else "a GPU other than 10.x"


def _padded(uniforms: Uniforms, rows: int) -> Uniforms:
    return Uniforms(*(pad(values, (0, rows - values.numel())) for values in uniforms))


def _logps(call: HeadCall, dtype: torch.dtype, rows: Head, ids: Tensor, lists: Lists | None) -> Tensor:
    """The log-probabilities of draws from logits: those of `linear_logprobs`."""
    support = None if lists is None else support_of(lists)
    options = replace(call.options, transform=call.options.transform.of_tokens(rows.temperatures))
    drawn = replace(call, hidden=rows.hidden, targets=ids, support=support, options=options)
    return log_probs(drawn, dtype=dtype).logps


class _Limited(NamedTuple):
    """The draws of n tokens under limits; of those whose candidates do not decide nothing holds."""

    ids: Tensor  # (n,) int64
    logps: Tensor  # (n,) float32
    listed: Tensor  # (n, most) int32: what could be drawn, ascending
    counts: Tensor  # (n,) int64


def _draw_from_candidates(
    rows: Head, options: EngineOptions, limits: Limits, uniforms: Uniforms, n: int
) -> tuple[_Limited, Tensor]:
    """-> the draws of the first n tokens, and (n,) bool: whether a token's candidates do not decide."""
    from liger_rl.engines.sparse import slots_triton
    from liger_rl.kernels import epilogue, sampling_triton

    (vocab, _), pieces = rows.weight.shape, []
    step = KEPT_BYTES // Kept.bytes_per_token(vocab, torch.float16, BLOCK_VOCAB) // MULTIPLE * MULTIPLE
    for start, stop in spans(rows.hidden.shape[0], max(step, MULTIPLE)):
        hidden, uniform = rows.hidden[start:stop], uniforms.of_tile[start : min(stop, n)]
        kept = Kept.empty(stop - start, vocab, hidden.device, torch.float16, BLOCK_VOCAB)
        state, known = epilogue.gemm_state(
            hidden, rows.weight, rows.bias, rows.targets[start:stop], rows.transform(options, slice(start, stop)),
            entropy=False, with_tiles=True, kept=kept,
        )  # fmt: skip
        assert known is not None
        live = min(stop, n) - start
        found = sampling_triton.candidates(live, state, known, kept, vocab, limits)
        del kept
        slots = sampling_triton.slots_of(found, vocab)
        transform = rows.transform(options, slice(start, start + live))
        logits = slots_triton.dots(Factors(hidden[:live], rows.weight, rows.bias), slots, transform)
        drawn = sampling_triton.limited(found, slots, logits, state, uniform, limits)
        # The statistics of these slots are those of `linear_logprobs` with the lists as a support, bit for bit.
        statistics, _ = slots_triton.statistics(drawn.logits, drawn.slots, drawn.ids, entropy=False, extras=())
        pieces.append((drawn.ids, statistics.logps, drawn.listed, drawn.counts, found.lost))
    joined = pieces[0] if len(pieces) == 1 else tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
    *parts, lost = joined
    return _Limited(*parts), lost


def _lists(drawn: _Limited, lost: Tensor) -> Lists:
    """The lists, empty at the tokens `lost`."""
    counts = drawn.counts.index_fill(0, lost, 0)
    among = torch.arange(drawn.listed.shape[1], device=counts.device) < counts[:, None]
    return Lists(drawn.listed[among], counts)


def _draw_from_logits(
    rows: Head, options: EngineOptions, limits: Limits, uniforms: Uniforms | None
) -> tuple[Tensor, Lists | None]:
    """-> ids (n,), and under limits what could be drawn; from tiles of logits."""
    pieces: list[tuple[Tensor, ...]] = []
    for start, stop in spans(rows.hidden.shape[0], INVARIANT_TOKENS):
        here = slice(start, stop)
        temperatures = None if rows.temperatures is None else rows.temperatures[here]
        z = _logits(
            rows._replace(hidden=rows.hidden[here], targets=rows.targets[here], temperatures=temperatures), options
        )
        uniform = None if uniforms is None else uniforms.at(here)
        if uniform is None:
            pieces.append((z.argmax(1),))
        elif limits.none:
            pieces.append((_draw_by_tiles(z, uniform),))
        else:
            ids, kept = kept_ids(z, limits)
            kept = torch.zeros_like(kept).scatter_(1, ids, kept)
            mass = (z - z.amax(1, keepdim=True)).exp_().masked_fill_(~kept, 0.0)
            pieces.append((_first_past(mass, uniform.of_tile), kept.nonzero()[:, 1], kept.sum(1)))
    ids, *lists = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return ids, Lists(*lists) if lists else None


def _logits(rows: Head, options: EngineOptions) -> Tensor:
    """(n, V) float32, each row the same in every batch."""
    padded, options = in_order.with_fixed_tiles(rows, options)
    z = torch.empty(padded.hidden.shape[0], rows.weight.shape[0], dtype=torch.float32, device=rows.hidden.device)

    def look(logits: Tensor, tokens: slice, first: int, bias: Tensor | None, transform: LogitTransform) -> None:
        z[tokens, first : first + logits.shape[1]] = transformed(logits, bias, transform)

    two_pass.fold_tiles(padded, options, seen=[look])
    return z[: rows.hidden.shape[0]]


def _draw_by_tiles(z: Tensor, uniforms: Uniforms) -> Tensor:
    mass = (z - z.amax(1, keepdim=True)).exp_()
    mass = pad(mass, (0, -z.shape[1] % BLOCK_VOCAB)).unflatten(1, (-1, BLOCK_VOCAB))
    tile = _first_past(mass.sum(2), uniforms.of_tile)
    return tile * BLOCK_VOCAB + _first_past(mass[torch.arange(z.shape[0], device=z.device), tile], uniforms.in_tile)


def _first_past(mass: Tensor, uniform: Tensor) -> Tensor:
    """-> (n,) the place in (n, v) that a uniform number draws by the masses."""
    total = mass.cumsum(1, dtype=torch.float64)
    hit = (total > uniform[:, None] * total[:, -1:]) & (mass > 0)
    return torch.where(hit.any(1), hit.to(torch.uint8).argmax(1), mass.argmax(1))


def _joined(drawn: Drawn, lost: Tensor, others: Drawn) -> Drawn:
    """The draws with those of the tokens `lost` (m,) in place."""
    ids = drawn.ids.index_copy(0, lost, others.ids), drawn.logps.index_copy(0, lost, others.logps)
    if drawn.lists is None or others.lists is None:
        return Drawn(*ids, None, others.fallbacks)
    counts = drawn.lists.counts.index_copy(0, lost, others.lists.counts)
    token = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)
    listed = torch.empty(token.numel(), dtype=torch.int64, device=counts.device)
    is_other = torch.zeros_like(counts, dtype=torch.bool).index_fill(0, lost, True)[token]
    listed[is_other], listed[~is_other] = others.lists.ids, drawn.lists.ids.long()
    return Drawn(*ids, Lists(listed, counts), others.fallbacks)


def uniforms_of(seed: int, positions: Tensor) -> Uniforms:
    """The two numbers of each token, from the first two words of Philox 4x32-10."""
    return for_device(positions.device).uniforms(seed, positions)


def support_of(lists: Lists) -> Support:
    return Support(lists.ids, offsets_of(lists.counts), may_be_empty=False, distinct=True)
