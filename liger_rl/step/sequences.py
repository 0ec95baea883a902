"""What the host knows of the sequences of a padded batch, from one copy to the host."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.models.project import TYPE_INPUTS
from liger_rl.step.facts import Facts
from liger_rl.step.reason import Reason


class TokenBatch(NamedTuple):
    """A padded batch, on the model's device."""

    ids: Tensor  # (B, T) integers
    mask: Tensor  # (B, T) bool: completion tokens, whose log-probabilities are read; False in the first column
    inputs: Mapping[str, Any]  # the model's other inputs


class SequenceSpan(NamedTuple):
    """The tokens start <= t < stop of a row of the batch, and what the host knows of them."""

    start: int
    stop: int
    length: int  # stop - start
    has_targets: bool  # it has a completion token
    has_gradient: bool  # its log-probabilities may have a gradient
    is_run: bool  # the attention mask is set at each token, and each position is one more than the one before
    first_position: int


class Sequences(NamedTuple):
    """The sequences of a (B, T) batch, in CPU memory."""

    spans: list[SequenceSpan]  # of each row; empty with an obstacle
    ids: Tensor  # (B, T) int64; not read with an obstacle
    device: str  # the type of the batch's device
    obstacle: Reason | None = None  # why the batch stays as it is

    def lengths(self, rows: Iterable[int]) -> list[int]:
        return [self.spans[row].length for row in rows]

    def starts(self, rows: Iterable[int]) -> list[int]:
        """The flat index into the (B, T) batch of each row's first token."""
        return [row * self.ids.shape[1] + self.spans[row].start for row in rows]


def read_sequences(
    batch: TokenBatch,
    facts: Facts,
    *,
    weights: Tensor | None = None,  # (B, T) or (B, 1), factors of the gradient; None: every row may have a gradient
    labels: Tensor | None = None,  # (B, T); a batch stays as it is if they are not its ids where the mask is set
) -> Sequences:
    """The span of each row without its padding, and all token ids. One copy to the host, none with an obstacle."""
    ids, mask, inputs = batch
    device, width = ids.device, ids.shape[1]
    obstacle = facts.obstacle or (None if ids.numel() else Reason("it has no token"))
    if obstacle is not None:
        return Sequences([], torch.empty(ids.shape, dtype=torch.int64, device="meta"), device.type, obstacle)
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
    negative = ((ids < 0) & inside).any(1)
    table = torch.stack(
        [number.long() for number in (images, differs, negative, start, stop, first, counts, lives, runs)], 1
    )
    host = torch.cat([table, ids.long()], 1).cpu()
    has_images, differ, are_negative, *numbers = host[:, : table.shape[1]].T.tolist()
    if any(are_negative):
        raise ValueError(f"input_ids must be token ids, got a negative one in row {are_negative.index(1)}")
    spans = [
        SequenceSpan(start, stop, stop - start, bool(counts), bool(lives), bool(runs), first)
        for start, stop, first, counts, lives, runs in zip(*numbers, strict=True)
    ]
    obstacle = Reason("its labels are not its input_ids") if any(differ) else None
    obstacle = Reason("it has tokens of an image") if any(has_images) else obstacle
    return Sequences(spans, host[:, table.shape[1] :], device.type, obstacle)
