"""What the host knows of the sequences of a padded or packed batch, from one copy to the host."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from liger_rl.models.project import TYPE_INPUTS
from liger_rl.step.facts import Facts
from liger_rl.step.reason import Reason

LABELS = Reason("its labels are not its input_ids")
WRONG = (  # what `_count_wrong` counts
    "input_ids must be token ids in [0, {vocab}), got {count} others",
    "mask (and nll_mask) must be 0 where attention_mask is 0, got 1 at {count} tokens of padding",
    "attention_mask must be left out of packed rows, got one although position_ids begin anew at {count} tokens",
)


class TokenBatch(NamedTuple):
    """A padded or packed batch, on the model's device."""

    ids: Tensor  # (B, T) integers
    mask: Tensor  # (B, T) bool: completion tokens, whose log-probabilities are read; False in the first column
    inputs: Mapping[str, Any]  # the model's other inputs


class SequenceSpan(NamedTuple):
    """The tokens start <= t < stop of the flattened (B, T) batch, and what the host knows of them."""

    start: int
    stop: int
    length: int  # stop - start
    has_targets: bool  # it has a completion token
    has_gradient: bool  # its log-probabilities may have a gradient
    is_run: bool  # the attention mask is set at each token, and each position is one more than the one before
    first_position: int


class Sequences(NamedTuple):
    """The sequences of a (B, T) batch, in CPU memory."""

    spans: list[SequenceSpan]  # of each row, or of each sequence of packed rows; empty with an obstacle
    ids: Tensor  # (B, T) int64; not read with an obstacle
    device: str  # the type of the batch's device
    obstacle: Reason | None = None  # why the batch stays as it is
    packed_tokens: int = 0  # of packed rows, without padding

    def lengths(self, rows: Iterable[int]) -> list[int]:
        return [self.spans[row].length for row in rows]

    def starts(self, rows: Iterable[int]) -> list[int]:
        """The flat index into the (B, T) batch of each row's first token."""
        return [self.spans[row].start for row in rows]


def read_sequences(
    batch: TokenBatch,
    facts: Facts,
    *,
    weights: Tensor | None = None,  # (B, T) or (B, 1), factors of the gradient; None: every row may have a gradient
    labels: Tensor | None = None,  # (B, T); a batch stays as it is if they are not its ids where the mask is set
) -> Sequences:
    """The span of each row without its padding, or of each sequence of packed rows, and all ids. One copy to the host;
    none with an obstacle and labels."""
    ids, mask, inputs = batch
    device, width = ids.device, ids.shape[1]
    obstacle = facts.obstacle or (None if ids.numel() else Reason("it has no token"))
    if obstacle is not None:
        if labels is None:  # an id beyond the vocabulary of a model of images may stand for an image
            _raise_wrong(_count_wrong(batch, facts, torch.full_like(mask, facts.vocab < math.inf)), facts)
        return Sequences([], torch.empty(ids.shape, dtype=torch.int64, device="meta"), device.type, obstacle)
    if facts.packed is not None:
        return _read_packed(batch, facts, labels)
    column = torch.arange(width, device=device)
    attention, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    attended = torch.ones_like(mask) if attention is None else attention.to(device) != 0
    counts = mask.any(1)
    lives = counts if weights is None else ((weights != 0) & mask).any(1)
    stop = torch.where(mask, column + 1, 0).amax(1)
    if facts.has_router_loss or not facts.causal:
        stop = torch.maximum(stop, torch.where(attended, column + 1, 0).amax(1))
    start = torch.zeros_like(stop)
    if facts.drops_left_padding or facts.counts_attended:
        # The token before the first completion token predicts it, and may be padding.
        first = torch.where(mask, column - 1, width - 1).amin(1)
        start = torch.minimum(first, torch.where(attended, column, width - 1).amin(1))
    stop = torch.maximum(stop, start + 1)
    inside = (column >= start[:, None]) & (column < stop[:, None])
    runs, first = (attended | ~inside).all(1), start
    if positions is not None:
        positions = positions.to(device).expand(ids.shape)
        jumps = positions[:, 1:] - positions[:, :-1] != 1
        runs &= ~(jumps & inside[:, 1:] & inside[:, :-1]).any(1)
        first = positions.gather(1, start[:, None])[:, 0]
    differs = torch.zeros_like(counts) if labels is None else (mask & (labels != ids)).any(1)
    types = [inputs[name].to(device) for name in TYPE_INPUTS if inputs.get(name) is not None]
    images = (torch.stack(types) != 0).any(2).any(0) if types else torch.zeros_like(counts)
    start, stop = (column + width * torch.arange(len(ids), device=device) for column in (start, stop))
    table = torch.stack([number.long() for number in (images, differs, start, stop, first, counts, lives, runs)], 1)
    parts = [_count_wrong(batch, facts, inside), table, ids.long()]
    wrong, table, host_ids = torch.cat(parts, 1).cpu().split([part.shape[1] for part in parts], 1)
    _raise_wrong(wrong if labels is None else wrong[:, :1], facts)
    has_images, differ, *numbers = table.T.tolist()
    spans = [
        SequenceSpan(start, stop, stop - start, bool(counts), bool(lives), bool(runs), first)
        for start, stop, first, counts, lives, runs in zip(*numbers, strict=True)
    ]
    obstacle = LABELS if any(differ) else None
    obstacle = Reason("it has tokens of an image") if any(has_images) else obstacle
    return Sequences(spans, host_ids, device.type, obstacle)


def _read_packed(batch: TokenBatch, facts: Facts, labels: Tensor | None) -> Sequences:
    """The sequences of packed rows: each begins at a position 0. Negative positions are padding behind a row."""
    ids, mask, inputs = batch
    differs = torch.zeros_like(mask) if labels is None else mask & (labels != ids)
    columns = differs, ids, inputs["position_ids"].to(ids.device), mask
    table = torch.cat([*columns, _count_wrong(batch, facts, torch.ones_like(mask))], 1).cpu()
    differs, host_ids, positions, counted, wrong = table.split([*[ids.shape[1]] * 4, len(WRONG)], 1)
    _raise_wrong(wrong, facts)
    begins = bool((positions[:, 0] == 0).all())
    positions, counted = (column.reshape(-1).numpy() for column in (positions, counted))
    obstacle = None
    if not begins or ((positions[1:] > 0) & (np.diff(positions) != 1)).any():
        obstacle = Reason("its position_ids jump within a sequence")
    elif counted[positions <= 0].any():
        obstacle = Reason("its labels count the first token of a sequence, which no token of it predicts")
    elif differs.any():
        obstacle = LABELS
    if obstacle is not None:
        return Sequences([], host_ids, ids.device.type, obstacle)
    starts, number = (positions == 0).nonzero()[0], (positions == 0).cumsum() - 1
    live = positions >= 0 if facts.has_router_loss else counted != 0
    lengths = np.ones_like(starts)
    np.maximum.at(lengths, number[live], positions[live] + 1)
    counts = np.bincount(number, counted, minlength=len(starts)) > 0
    spans = [
        SequenceSpan(start, start + length, length, has_targets, has_targets, True, 0)
        for start, length, has_targets in zip(starts.tolist(), lengths.tolist(), counts.tolist(), strict=True)
    ]
    return Sequences(spans, host_ids, ids.device.type, packed_tokens=int((positions >= 0).sum()))


def _count_wrong(batch: TokenBatch, facts: Facts, inside: Tensor) -> Tensor:
    """(B, 3) tokens of each row that are `WRONG`. Ids are looked at `inside`."""
    ids, mask, inputs = batch
    attention, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    attended, restarts = torch.ones_like(mask), torch.zeros_like(mask)
    # Without an attention mask, transformers tells packed sequences apart by their positions.
    if attention is not None and getattr(attention, "shape", None) == ids.shape:
        attended = attention.to(ids.device) != 0
        if positions is not None and positions.dim() == 2:
            restarts = (positions[:, 1:] < positions[:, :-1]).to(ids.device) & attended[:, 1:] & attended[:, :-1]
    outside = ((ids < 0) | (ids >= facts.vocab)) & inside
    return torch.stack([wrong.sum(1) for wrong in (outside, mask & ~attended, restarts)], 1)


def _raise_wrong(counts: Tensor, facts: Facts) -> None:
    for text, count in zip(WRONG, counts.sum(0).tolist(), strict=False):
        if count:
            raise ValueError(text.format(count=count, vocab=facts.vocab))
