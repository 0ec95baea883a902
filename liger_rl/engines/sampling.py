"""Draws an id of each token from its softmax, with the logits of INVARIANT_TOKENS tokens in memory at most.

1. Over the whole vocabulary the product's epilogue draws an id of each tile, and a small kernel draws the tile.
2. Under top-k, top-p or min-p the epilogue keeps the exponentials of a few hundred tokens at a time. They name the
   candidates, whose own logits decide. A token with too many candidates takes 3.
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
from liger_rl.engines.dense import two_pass
from liger_rl.engines.dense.two_pass import INVARIANT_TOKENS
from liger_rl.engines.interface import Head
from liger_rl.engines.run import head_of, log_probs
from liger_rl.engines.tiles import spans
from liger_rl.kernels import devices, for_device
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
    lists: Lists | None  # under limits
    fallbacks: int = 0  # tokens with too many candidates


def sample(call: HeadCall, dtype: torch.dtype, limits: Limits, uniforms: Uniforms | None) -> Drawn:
    """One draw of each token, the targets and the mask of the call not read.

    Without `uniforms`, which goes with no limits, the id of the largest logit.
    """
    n = call.targets.numel()
    head = head_of(call, call.targets.view(-1), TokenSelection(n), None)
    rows, options = head.gathered(dtype).with_weight_in(dtype), resolved(call.options, dtype)
    hidden, transform = rows.hidden, options.transform
    alone = rows.temperatures is None and devices.aligned(hidden)
    if not alone or not devices.applies_to(max(n, devices.MIN_TOKENS), hidden.shape[1], dtype, rows.weight):
        ids, lists = _draw_from_logits(rows, options, limits, uniforms)
        return Drawn(ids, _logps(call, rows, ids, lists), lists)
    if uniforms is None or limits.none:
        from liger_rl.kernels import epilogue

        ids = torch.empty_like(rows.targets)
        state, _ = epilogue.gemm_state(
            hidden, rows.weight, rows.bias, rows.targets, transform, entropy=False, drawn=ids, uniforms=uniforms
        )
        return Drawn(ids, state.finish().logps, None)
    drawn, is_lost = _draw_from_candidates(rows, transform, limits, uniforms)
    lost = is_lost.nonzero().squeeze(1)
    if not lost.numel():
        return drawn
    picked = rows._replace(hidden=hidden[lost], targets=rows.targets[lost], live=TokenSelection(lost.numel()))
    ids, lists = _draw_from_logits(picked, options, limits, uniforms.at(lost))
    assert lists is not None
    return _joined(drawn, lost, Drawn(ids, _logps(call, picked, ids, lists), lists, lost.numel()))


def _logps(call: HeadCall, rows: Head, ids: Tensor, lists: Lists | None) -> Tensor:
    """The log-probabilities of draws from logits: those of `linear_logprobs`."""
    support = None if lists is None else support_of(lists)
    options = replace(call.options, transform=call.options.transform.of_tokens(rows.temperatures))
    return log_probs(replace(call, hidden=rows.hidden, targets=ids, support=support, options=options)).logps


def _draw_from_candidates(
    rows: Head, transform: LogitTransform, limits: Limits, uniforms: Uniforms
) -> tuple[Drawn, Tensor]:
    """-> the draws, and (n,) bool: the tokens for which nothing in them holds."""
    from liger_rl.engines.sparse import slots_triton
    from liger_rl.kernels import epilogue, sampling_triton

    (vocab, _), n = rows.weight.shape, rows.hidden.shape[0]
    pieces = []
    for start, stop in spans(n, KEPT_BYTES // Kept.bytes_per_token(vocab, torch.float16, BLOCK_VOCAB)):
        hidden, uniform = rows.hidden[start:stop], uniforms.of_tile[start:stop]
        kept = Kept.empty(stop - start, vocab, hidden.device, torch.float16, BLOCK_VOCAB)
        state, known = epilogue.gemm_state(
            hidden, rows.weight, rows.bias, rows.targets[start:stop], transform, entropy=False, with_tiles=True,
            kept=kept,
        )  # fmt: skip
        assert known is not None
        found = sampling_triton.candidates(state, known, kept, vocab, limits)
        del kept
        slots = sampling_triton.slots_of(found, vocab)
        logits = slots_triton.dots(Factors(hidden, rows.weight, rows.bias), slots, transform)
        drawn = sampling_triton.limited(found, slots, logits, state, uniform, limits)
        # The statistics of these slots are those of `linear_logprobs` with the lists as a support, bit for bit.
        statistics, _ = slots_triton.statistics(drawn.logits, drawn.slots, drawn.ids, entropy=False, extras=())
        pieces.append((drawn.ids, statistics.logps, drawn.listed, drawn.counts, found.lost))
    ids, logps, listed, counts, lost = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    counts = counts.masked_fill(lost, 0)
    among = torch.arange(listed.shape[1], device=counts.device) < counts[:, None]
    return Drawn(ids, logps, Lists(listed[among], counts)), lost


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
    padded, options = two_pass.invariant(rows, options, in_tiles=True)
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
    assert drawn.lists is not None
    assert others.lists is not None
    counts = drawn.lists.counts.index_copy(0, lost, others.lists.counts)
    token = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)
    ids = torch.empty(token.numel(), dtype=torch.int64, device=counts.device)
    is_other = torch.zeros_like(counts, dtype=torch.bool).index_fill(0, lost, True)[token]
    ids[is_other], ids[~is_other] = others.lists.ids, drawn.lists.ids.long()
    return Drawn(
        drawn.ids.index_copy(0, lost, others.ids),
        drawn.logps.index_copy(0, lost, others.logps),
        Lists(ids, counts),
        others.fallbacks,
    )


def uniforms_of(seed: int, positions: Tensor) -> Uniforms:
    """The two numbers of each token, from the first two words of Philox 4x32-10."""
    return for_device(positions.device).uniforms(seed, positions)


def support_of(lists: Lists) -> Support:
    return Support(lists.ids, offsets_of(lists.counts), may_be_empty=False, distinct=True)
