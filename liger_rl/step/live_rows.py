"""The tokens of a padded batch that a model has to run, and its micro-batches.

1. Live rows: `planned` reads where each sequence begins and ends, in one copy to the host.
2. Packing: sequences are put into one row if the model keeps them apart, which `packing_trial` tries out.
3. Micro-batches: sequences are grouped by length; `inputs_of` makes a group's inputs, `placed` finds its outputs.

`Body` says what a model allows.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_rl.call.checks import check_count
from liger_rl.losses.batch import AlignedBatch
from liger_rl.losses.loss import PolicyTerms
from liger_rl.losses.options import Options
from liger_rl.step.model_body import Body

Idle = Literal["skip", "forward", "backward"]
TRIAL_TOKENS = 16  # of each sequence in a trial of packing


@dataclass(frozen=True, kw_only=True)
class RowOptions(Options):
    """The keywords of `policy_steps` about rows."""

    max_tokens: int | None = None
    trim: Annotated[bool, bool] = True
    packing: Annotated[bool | None, bool] = None
    idle: Annotated[Idle, get_args(Idle)] = "skip"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, least=1)


class MicroBatch(NamedTuple):
    """Sequences that run together."""

    # (b, w), or (1, n) packed, int64 in CPU memory: the tokens' flat positions in the (B, T) batch, -1 for padding.
    cells: Tensor | None  # None is the batch as it is
    lengths: tuple[int, ...]  # number of tokens of each sequence, in order
    packed: bool = False  # one row holds all sequences
    keeps_mask: bool = True  # the attention mask says more than the positions
    rows: tuple[int, ...] = ()  # the rows of the batch whose loss it computes


class Plan(NamedTuple):
    """The micro-batches of a batch."""

    live: list[MicroBatch]  # with a backward; their losses add up to the loss of the batch
    idle: list[MicroBatch]  # without a backward; the loss of the first live one includes their rows
    left_out: tuple[int, ...]  # rows with completion tokens that do not run
    carrier: MicroBatch  # the cheapest to run once more, on a rank with fewer micro-batches than another


def planned(
    ids: Tensor,  # (B, T)
    mask: Tensor,  # (B, T) bool, completion tokens
    inputs: Mapping[str, Any],
    body: Body,
    terms: PolicyTerms,
    aligned: AlignedBatch | None,  # None for log-probabilities alone
    options: RowOptions,
) -> Plan:
    """The plan of a batch. Raises ValueError for options that the model or the batch does not allow."""
    obstacle = body.obstacle or (None if options.trim else "trim=False keeps rows as they are")
    if options.packing and (obstacle or body.no_packing):
        raise ValueError(f"packing must not be True here: {obstacle or body.no_packing}")
    batch, budget = ids.shape[0], options.max_tokens
    if body.obstacle is not None or not ids.numel():
        if budget is not None and budget < ids.numel():
            raise ValueError(
                f"max_tokens must be None or at least B T = {ids.numel()} for a batch that stays as it is, got "
                f"{budget}: {body.obstacle}"
            )
        whole = MicroBatch(None, (), rows=tuple(range(batch)))
        return Plan([whole], [], (), whole)
    advantages = aligned.advantages if aligned is not None and terms.idle_without_advantages else None
    rows = _read_rows(ids, mask, inputs, advantages, body, options.trim)
    packed = _packs(rows, body, options)
    every_row = body.router or options.idle == "backward"
    live = [r for r, row in enumerate(rows) if row.lives or every_row]
    waiting = [r for r, row in enumerate(rows) if row.counts and not (row.lives or every_row)]
    if not live:  # for a loss to call backward on
        shortest = min(waiting or range(batch), key=lambda r: rows[r].length)
        live, waiting = [shortest], [r for r in waiting if r != shortest]
    # A support has the metric missing_target.
    metrics_read = terms.metrics_read_all or (terms.metrics != "none" and inputs.get("support") is not None)
    waiting_run = aligned is None or metrics_read or options.idle == "forward"
    idle, left_out = (waiting, []) if waiting_run else ([], waiting)
    longest = max([*live, *idle], key=lambda r: rows[r].length)
    if budget is not None and budget < rows[longest].length:
        raise ValueError(
            f"max_tokens must be at least {rows[longest].length}, the longest sequence (row {longest} of input_ids, "
            f"without its padding), got {budget}"
        )
    groups = _groups(live, rows, budget, packed)
    if len(groups) > 1 and (body.router or (aligned is not None and terms.locality == "batch")):
        why = "the router loss is of all tokens" if body.router else "the loss's sequences depend on each other"
        least = _tokens([rows[r].length for r in live], packed)
        raise ValueError(f"max_tokens must be None or at least {least} here, got {budget}: {why}")

    def micro_batch(group: list[int]) -> MicroBatch:
        return _micro_batch([(r, rows[r]) for r in group], ids.shape, body, packed)

    steps = [micro_batch(group)._replace(rows=tuple(group)) for group in groups]
    without_backward = set(range(batch)) - set(live)
    steps[0] = steps[0]._replace(rows=tuple(sorted(without_backward.union(groups[0]))))
    carrier = micro_batch([min(live, key=lambda r: rows[r].length)])
    return Plan(steps, [micro_batch(g) for g in _groups(idle, rows, budget, packed)], tuple(left_out), carrier)


# --- live rows --------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A sequence in its row of the batch."""

    start: int
    stop: int
    counts: int  # it has a completion token
    lives: int  # its log-probabilities may have a gradient
    attended: int  # the attention mask is set at each of its tokens
    steps: int  # each position is one more than the position before
    from_zero: int  # its first position is 0

    @property
    def length(self) -> int:
        return self.stop - self.start


def _read_rows(
    ids: Tensor, mask: Tensor, inputs: Mapping[str, Any], advantages: Tensor | None, body: Body, trim: bool
) -> list[Row]:
    """The host's copy of the rows. Only rows with an advantage live; None: all."""
    width = ids.shape[1]
    column = torch.arange(width, device=ids.device)
    attention, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    attended = torch.ones_like(mask) if attention is None else attention.to(mask.device) != 0
    counts = mask.any(1)
    lives = counts if advantages is None else ((advantages != 0) & mask).any(1)
    start, stop = torch.zeros_like(counts, dtype=torch.int64), torch.full_like(counts, width, dtype=torch.int64)
    if trim:
        stop = torch.where(mask, column + 1, 0).amax(1)
        if body.router or not body.causal:
            stop = torch.maximum(stop, torch.where(attended, column + 1, 0).amax(1))
        if body.rolls:
            # The token before the first completion token predicts it, even if it is padding.
            first = torch.where(mask, column - 1, width - 1).amin(1)
            start = torch.minimum(first, torch.where(attended, column, width - 1).amin(1))
        stop = torch.maximum(stop, start + 1)
    inside = (column >= start[:, None]) & (column < stop[:, None])
    whole = (attended | ~inside).all(1)
    steps, from_zero = torch.ones_like(counts), start == 0
    if positions is not None:
        positions = positions.to(ids.device).expand(ids.shape)
        jumps = positions[:, 1:] - positions[:, :-1] != 1
        steps = ~(jumps & inside[:, 1:] & inside[:, :-1]).any(1)
        from_zero = positions.gather(1, start[:, None])[:, 0] == 0
    table = torch.stack([start, stop, *(flag.long() for flag in (counts, lives, whole, steps, from_zero))], 1)
    return [Row(*numbers) for numbers in table.tolist()]


# --- packing ----------------------------------------------------------------------------------------------------------


def wants_packing(body: Body, options: RowOptions) -> bool:
    packing = body.packs if options.packing is None else options.packing
    return packing and options.trim and body.obstacle is None and body.no_packing is None


def _packs(rows: list[Row], body: Body, options: RowOptions) -> bool:
    if not wants_packing(body, options):
        return False
    for place, row in enumerate(rows):
        if not (row.attended and row.steps and (row.from_zero or body.rotary)):
            if not options.packing:
                return False
            raise ValueError(
                f"packing must not be True here: row {place} of input_ids is no run of tokens that are attended to, at "
                "positions 0, 1, 2, ..."
            )
    return True


_trial_lock = threading.Lock()
_trials: WeakKeyDictionary[Any, dict[str, tuple[bool, bool]]] = WeakKeyDictionary()


def packing_known(swapped: Any) -> bool:
    """Whether a trial of packing has been run, for the model's present kind of attention."""
    return swapped.config.get_text_config()._attn_implementation in _trials.get(swapped, {})


@torch.no_grad()
def packing_trial(
    run: Callable[[dict[str, Any]], Tensor], swapped: Any, body: Body, device: Any, *, again: bool
) -> tuple[bool, bool]:
    """Whether a packed sequence has the log-probabilities that it has alone, and the same at other positions.

    Some models do not pass positions on to their attention, have a state that runs on, or use positions for more than a
    rotary embedding. Six forwards of at most 32 tokens, once for a model and its kind of attention, or `again`. `run`
    maps inputs, as `inputs_of` makes them, to log-probabilities (1, n).
    """
    config = swapped.config.get_text_config()
    with _trial_lock:
        trials = _trials.setdefault(swapped, {})
        if again or config._attn_implementation not in trials:
            trials[config._attn_implementation] = _packing_trial(run, swapped, body, config.vocab_size, device)
        return trials[config._attn_implementation]


def _packing_trial(
    run: Callable[[dict[str, Any]], Tensor], swapped: Any, body: Body, vocab: int, device: Any
) -> tuple[bool, bool]:
    """The second of two sequences: packed, packed behind another first one, alone, and in one row with the first."""
    length = min(TRIAL_TOKENS, body.positions // 2 or TRIAL_TOKENS)
    ids = torch.arange(3, 3 + 2 * length, device=device).view(2, length) % vocab
    changed = torch.stack([(ids[0] + 2 * length) % vocab, ids[1]])
    counted = torch.arange(length, device=device).expand(2, length) != 0
    micro = MicroBatch(torch.arange(2 * length)[None], (length, length), packed=True)
    last = torch.arange(length, device=device)[None] + max(body.positions - length, length)
    training = {module: module.training for module in swapped.modules()}
    try:
        swapped.eval()  # a dropout would differ
        packed, packed_changed = (run(inputs_of(micro, x, counted, {}, body))[:, length:] for x in (ids, changed))
        alone = run({"input_ids": ids[1:], "counted": counted[1:]})
        joined, joined_changed = (
            run({"input_ids": x.view(1, -1), "counted": counted.reshape(1, -1)})[:, length:] for x in (ids, changed)
        )
        moved = run({"input_ids": ids[1:], "counted": counted[1:], "position_ids": last})
    finally:
        for module, mode in training.items():
            module.training = mode

    def same(values: Tensor, expected: Tensor, effect: Tensor) -> bool:
        # Kernels and experts may round in another way, by far less than the first sequence changes the second.
        return bool((values - expected).abs().max() <= effect.abs().max() / 16)

    # The first sequence's tokens are told apart from its length, because learned positions may change more.
    apart = same(packed, alone, joined - alone), same(packed, packed_changed, joined - joined_changed)
    return all(apart), same(moved, alone, joined - alone)


# --- micro-batches ----------------------------------------------------------------------------------------------------


def _tokens(lengths: list[int], packed: bool) -> int:
    return sum(lengths) if packed else max(lengths) * len(lengths)


def _groups(sequences: list[int], rows: list[Row], budget: int | None, packed: bool) -> list[list[int]]:
    """Rows of each micro-batch. The longest come first; a micro-batch has them in the batch's order."""
    groups: list[list[int]] = []
    for row in sorted(sequences, key=lambda r: -rows[r].length):
        # Without packing, a short row would be padded to the length of a long one.
        for group in groups if packed else groups[-1:]:
            if budget is None or _tokens([rows[r].length for r in (*group, row)], packed) <= budget:
                group.append(row)
                break
        else:
            groups.append([row])
    return [sorted(group) for group in groups]


def _micro_batch(sequences: list[tuple[int, Row]], shape: torch.Size, body: Body, packed: bool) -> MicroBatch:
    lengths = tuple(row.length for _, row in sequences)
    if not packed and len(sequences) == shape[0] and min(lengths) == shape[1]:
        return MicroBatch(None, lengths)
    starts, sizes = torch.tensor([r * shape[1] + row.start for r, row in sequences]), torch.tensor(lengths)
    if packed:
        offsets = torch.arange(sum(lengths)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        return MicroBatch((torch.repeat_interleave(starts, sizes) + offsets)[None], lengths, packed=True)
    column = torch.arange(max(lengths))
    plain = body.rolls and body.causal and not body.router and all(row.attended and row.steps for _, row in sequences)
    return MicroBatch(torch.where(column < sizes[:, None], starts[:, None] + column, -1), lengths, keeps_mask=not plain)


def inputs_of(micro: MicroBatch, ids: Tensor, mask: Tensor, inputs: Mapping[str, Any], body: Body) -> dict[str, Any]:
    """A micro-batch's inputs: `input_ids`, `counted` (the mask of completion tokens), and the others by their names."""
    if micro.cells is None:
        return {"input_ids": ids, "counted": mask, **inputs}
    cells = micro.cells.to(ids.device, non_blocking=True)
    inside, places = cells >= 0, cells.clamp(min=0)
    tensors = dict(inputs)
    tensors["input_ids"] = ids.reshape(-1)[places]
    tensors["counted"] = mask.reshape(-1)[places] & inside
    attention, positions = tensors.pop("attention_mask", None), tensors.pop("position_ids", None)
    if attention is not None and not micro.packed and micro.keeps_mask:
        device = attention.device
        tensors["attention_mask"] = attention.reshape(-1)[places.to(device)].masked_fill(~inside.to(device), 0)
    if body.rolls or positions is not None or micro.packed:
        tensors["position_ids"] = _positions(micro, positions, places, inside, ids, body)
    if micro.packed and body.varlen:
        # Flash attention would look for the sequences' ends in each layer's positions.
        ends = nn.functional.pad(torch.tensor(micro.lengths).cumsum(0), (1, 0))
        ends, longest = ends.to(ids.device, torch.int32, non_blocking=True), max(micro.lengths)
        tensors |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    support = tensors.pop("support", None)
    if support is not None:
        tensors["support"] = support.take(places.reshape(-1), batch=support.tokens)
    return tensors


def _positions(
    micro: MicroBatch, position_ids: Tensor | None, places: Tensor, inside: Tensor, ids: Tensor, body: Body
) -> Tensor:
    """The padded batch's positions, from 0 on in packed sequences. Padding counts on, so that it is seen without a mask
    that a row is one sequence."""
    batch, width = ids.shape
    if position_ids is None:
        positions = places % width
    else:
        positions = position_ids.to(ids.device).expand(batch, width).reshape(-1)[places]
    lengths = torch.tensor(micro.lengths).to(ids.device, non_blocking=True)
    if micro.packed:
        first = positions[0, lengths.cumsum(0) - lengths]
        return positions - torch.repeat_interleave(first, lengths, output_size=positions.shape[1])
    last = positions.gather(1, lengths[:, None] - 1)
    running = positions[:, :1] + torch.arange(positions.shape[1], device=ids.device, dtype=positions.dtype)
    # A table of positions may end at the model's last one.
    return torch.where(inside, positions, torch.minimum(running, last.clamp(min=body.positions - 1)))


def placed(micros: list[MicroBatch], shape: torch.Size, device: torch.device) -> Tensor | None:
    """(B, T): the place of each of the batch's tokens in the concatenated flat outputs of the micro-batches.

    A token of none of them has the place after the last output. None if the output is the batch.
    """
    if len(micros) == 1 and micros[0].cells is None:
        return None
    cells = [torch.arange(shape.numel()) if micro.cells is None else micro.cells.reshape(-1) for micro in micros]
    flat = torch.cat(cells)
    source = torch.full((shape.numel(),), flat.numel())
    source[flat[flat >= 0]] = (flat >= 0).nonzero()[:, 0]
    return source.view(shape).to(device, non_blocking=True)
