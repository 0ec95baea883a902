"""Which tokens of a padded batch a model has to be given, and in which micro-batches.

`planned` reads where each sequence begins and ends, in one copy to the host, and makes micro-batches. `inputs_of` makes
what the model is called with. What a model allows is its `Body`.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_rl.head.checks import check_count, check_flag
from liger_rl.integrations.model_body import Body

Idle = Literal["skip", "forward", "backward"]
TRIED = 16  # tokens of a sequence on which packing is tried out


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The keywords of `policy_steps` that say which tokens run, and how."""

    max_tokens: int | None = None
    trim: bool = True
    packing: bool | None = None
    idle: Idle = "skip"

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, least=1)
        check_flag("trim", self.trim)
        if self.packing is not None:
            check_flag("packing", self.packing)
        if self.idle not in get_args(Idle):
            raise ValueError(f"idle must be one of {list(get_args(Idle))}, got {self.idle!r}")


class Row(NamedTuple):
    """Where a sequence lies in its row of the batch, and what is known of it."""

    start: int
    stop: int
    counts: int
    """Whether it has a completion token."""
    lives: int
    """Whether its log-probabilities may have a gradient."""
    attended: int
    """Whether each of its tokens is, by the attention mask."""
    steps: int
    """Whether each position is one more than that before it."""
    from_zero: int
    """Whether its first position is 0."""

    @property
    def length(self) -> int:
        return self.stop - self.start


def _read_rows(
    ids: Tensor, mask: Tensor, inputs: Mapping[str, Any], alive: Tensor | None, body: Body, trim: bool
) -> list[Row]:
    """One copy from the device. `alive` is (B, T) or (B, 1), where the loss may have a gradient; None everywhere."""
    width = ids.shape[1]
    column = torch.arange(width, device=ids.device)
    attention, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    attended = torch.ones_like(mask) if attention is None else attention.to(mask.device) != 0
    counts = mask.any(1)
    lives = counts if alive is None else ((alive != 0) & mask).any(1)
    start, stop = torch.zeros_like(counts, dtype=torch.int64), torch.full_like(counts, width, dtype=torch.int64)
    if trim:
        stop = torch.where(mask, column + 1, 0).amax(1)
        if body.router or not body.causal:
            stop = torch.maximum(stop, torch.where(attended, column + 1, 0).amax(1))
        if body.rolls:
            # A completion that begins the row is predicted by what lies before it.
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


class MicroBatch(NamedTuple):
    """Sequences that the model is given together.

    Attributes:
        cells: (b, w), or (1, n) packed, int64 in CPU memory: which of the batch's B T tokens stands here, -1 for
            padding. None is the batch as it is.
        lengths: tokens of each sequence, in order.
        packed: one row of all sequences.
        keeps_mask: the attention mask is not plain.
    """

    cells: Tensor | None
    lengths: tuple[int, ...]
    packed: bool = False
    keeps_mask: bool = True


class Part(NamedTuple):
    """A micro-batch with a backward, and the rows of the batch whose loss it is."""

    micro: MicroBatch
    rows: tuple[int, ...]


class Plan(NamedTuple):
    """What runs. The loss of all parts is the loss of the batch."""

    parts: list[Part]
    idle: list[MicroBatch]
    """Without a backward; their rows are among those of the first part."""
    left_out: tuple[int, ...]
    """Rows that do not run, although they have completion tokens."""
    carrier: MicroBatch
    """The cheapest to run once more, for a rank that has to."""


class Demand(NamedTuple):
    """What the loss needs of the plan."""

    alive: Tensor | None
    """(B, T) or (B, 1), other than 0 where a sequence has a gradient; None is everywhere."""
    reads_idle: bool
    """Whether log-probabilities without a gradient are needed."""
    divisible: bool
    """Whether the loss is a sum over sequences."""


def wants_packing(body: Body, options: RowOptions) -> bool:
    wanted = body.packs if options.packing is None else options.packing
    return wanted and options.trim and body.obstacle is None and body.no_packing is None


class Tried(NamedTuple):
    """What a model made of a few tokens."""

    apart: bool
    """Whether a packed sequence's log-probabilities are those that it has alone."""
    shifts: bool
    """Whether they are at other positions, too."""


@torch.no_grad()
def tried_packing(run: Callable[[dict[str, Any]], Tensor], swapped: Any, body: Body, device: Any) -> Tried:
    """Some models do not hand positions on to their attention, or have a state that runs on, or do more with positions
    than a rotary embedding does. Six forwards of at most 32 tokens, once for a model and its kind of attention.

    Args:
        run: what `inputs_of` made -> log-probabilities (1, n).
    """
    config = swapped.config.get_text_config()
    with _trying:
        found = _tried.setdefault(swapped, {})
        if config._attn_implementation not in found:
            found[config._attn_implementation] = _tried_packing(run, swapped, body, config.vocab_size, device)
        return found[config._attn_implementation]


_trying = threading.Lock()
_tried: WeakKeyDictionary[Any, dict[str, Tried]] = WeakKeyDictionary()


def _tried_packing(run: Callable[[dict[str, Any]], Tensor], swapped: Any, body: Body, vocab: int, device: Any) -> Tried:
    length = min(TRIED, body.positions // 2 or TRIED)
    ids = torch.arange(3, 3 + 2 * length, device=device).view(2, length) % vocab
    counted = torch.arange(length, device=device).expand(2, length) != 0
    others = torch.stack([(ids[0] + 2 * length) % vocab, ids[1]])
    micro = MicroBatch(torch.arange(2 * length)[None], (length, length), packed=True)
    last = torch.arange(length, device=device)[None] + max(body.positions - length, length)
    trained = {part: part.training for part in swapped.modules()}
    try:
        swapped.eval()  # a dropout would differ
        packed, other = (run(inputs_of(micro, rows, counted, {}, body))[:, length:] for rows in (ids, others))
        alone = run({"input_ids": ids[1:], "counted": counted[1:]})
        joined = counted.reshape(1, -1)
        behind, behind_other = (
            run({"input_ids": rows.view(1, -1), "counted": joined})[:, length:] for rows in (ids, others)
        )
        moved = run({"input_ids": ids[1:], "counted": counted[1:], "position_ids": last})
    finally:
        for part, mode in trained.items():
            part.training = mode
    # Kernels and experts may round in another way, which is little beside what the other sequence changes. Its tokens
    # are told apart from its length, because learned positions may change more than what is seen.
    unmoved, unseen, shifts = (
        bool((found - expected).abs().max() <= (most - against).abs().max() / 16)
        for found, expected, most, against in (
            (packed, alone, behind, alone),
            (packed, other, behind, behind_other),
            (moved, alone, behind, alone),
        )
    )
    return Tried(unmoved and unseen, shifts)


def planned(
    ids: Tensor, mask: Tensor, inputs: Mapping[str, Any], body: Body, demand: Demand, options: RowOptions
) -> Plan:
    """Micro-batches of a batch. Raises ValueError where the options ask for what cannot be."""
    obstacle = body.obstacle or (None if options.trim else "trim=False keeps rows as they are")
    if options.packing and (obstacle or body.no_packing):
        raise ValueError(f"packing must not be True here: {obstacle or body.no_packing}")
    batch = ids.shape[0]
    budget = options.max_tokens
    if body.obstacle is not None or not ids.numel():
        if budget is not None and budget < ids.numel():
            raise ValueError(
                f"max_tokens must be None or at least B T = {ids.numel()} for a batch that stays as it is, got "
                f"{budget}: {body.obstacle}"
            )
        whole = MicroBatch(None, ())
        return Plan([Part(whole, tuple(range(batch)))], [], (), whole)
    rows = _read_rows(ids, mask, inputs, demand.alive, body, options.trim)
    packed = _packed(rows, body, options)
    everything = body.router or options.idle == "backward"
    live = [r for r, row in enumerate(rows) if row.lives or everything]
    waiting = [r for r, row in enumerate(rows) if row.counts and r not in set(live)]
    if not live:  # for a loss to call backward on
        shortest = min(waiting or range(batch), key=lambda r: rows[r].length)
        live, waiting = [shortest], [r for r in waiting if r != shortest]
    runs = demand.reads_idle or options.idle == "forward"
    idle, left_out = (waiting, []) if runs else ([], waiting)
    _check_budget(rows, [*live, *idle], budget)

    def made(chosen: list[int]) -> MicroBatch:
        return _micro_batch([(r, rows[r]) for r in chosen], ids.shape, body, packed)

    groups = _groups(live, rows, budget, packed)
    if len(groups) > 1 and not (demand.divisible and not body.router):
        why = "the router loss is of all tokens" if body.router else "the loss's sequences depend on each other"
        least = _tokens([rows[r].length for r in live], packed)
        raise ValueError(f"max_tokens must be None or at least {least} here, got {budget}: {why}")
    others = sorted(set(range(batch)) - set(live))
    parts = [Part(made(group), tuple(group)) for group in groups]
    parts[0] = parts[0]._replace(rows=tuple(sorted([*parts[0].rows, *others])))
    carrier = made([min(live, key=lambda r: rows[r].length)])
    return Plan(parts, [made(group) for group in _groups(idle, rows, budget, packed)], tuple(left_out), carrier)


def _packed(rows: list[Row], body: Body, options: RowOptions) -> bool:
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


def _check_budget(rows: list[Row], chosen: list[int], budget: int | None) -> None:
    longest = max(chosen, key=lambda r: rows[r].length)
    if budget is not None and budget < rows[longest].length:
        raise ValueError(
            f"max_tokens must be at least {rows[longest].length}, the longest sequence (row {longest} of input_ids, "
            f"without its padding), got {budget}"
        )


def _tokens(lengths: list[int], packed: bool) -> int:
    return sum(lengths) if packed else max(lengths) * len(lengths)


def _groups(chosen: list[int], rows: list[Row], budget: int | None, packed: bool) -> list[list[int]]:
    """Rows of each micro-batch, the longest first; within one in the batch's order."""
    groups: list[list[int]] = []
    for row in sorted(chosen, key=lambda r: -rows[r].length):
        # A short row beside a long one would be padded to its length.
        for group in groups if packed else groups[-1:]:
            if budget is None or _tokens([rows[r].length for r in (*group, row)], packed) <= budget:
                group.append(row)
                break
        else:
            groups.append([row])
    return [sorted(group) for group in groups]


def _micro_batch(chosen: list[tuple[int, Row]], shape: torch.Size, body: Body, packed: bool) -> MicroBatch:
    lengths = tuple(row.length for _, row in chosen)
    plain = body.rolls and body.causal and not body.router and all(row.attended and row.steps for _, row in chosen)
    if not packed and len(chosen) == shape[0] and min(lengths) == shape[1]:
        return MicroBatch(None, lengths)
    begins = torch.tensor([r * shape[1] + row.start for r, row in chosen])
    sizes = torch.tensor(lengths)
    if packed:
        offsets = torch.arange(sum(lengths)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        return MicroBatch((torch.repeat_interleave(begins, sizes) + offsets)[None], lengths, packed=True)
    column = torch.arange(max(lengths))
    cells = torch.where(column < sizes[:, None], begins[:, None] + column, -1)
    return MicroBatch(cells, lengths, keeps_mask=not plain)


def inputs_of(micro: MicroBatch, ids: Tensor, mask: Tensor, inputs: Mapping[str, Any], body: Body) -> dict[str, Any]:
    """-> input_ids, the mask of completion tokens as `counted`, and the other inputs, of a micro-batch's tokens."""
    if micro.cells is None:
        return {"input_ids": ids, "counted": mask, **inputs}
    cells = micro.cells.to(ids.device, non_blocking=True)
    inside, places = cells >= 0, cells.clamp(min=0)
    made = dict(inputs)
    made["input_ids"] = ids.reshape(-1)[places]
    made["counted"] = mask.reshape(-1)[places] & inside
    attention, positions = made.pop("attention_mask", None), made.pop("position_ids", None)
    if attention is not None and not micro.packed and micro.keeps_mask:
        made["attention_mask"] = attention.reshape(-1)[places.to(attention.device)].masked_fill(
            ~inside.to(attention.device), 0
        )
    if body.rolls or positions is not None or micro.packed:
        made["position_ids"] = _positions(micro, positions, places, inside, ids, body)
    if micro.packed:
        made |= _varlen(micro, body, ids.device)
    support = made.pop("support", None)
    if support is not None:
        made["support"] = support.take(places.reshape(-1), batch=support.tokens)
    return made


def _positions(
    micro: MicroBatch, given: Tensor | None, places: Tensor, inside: Tensor, ids: Tensor, body: Body
) -> Tensor:
    """What the padded forward has at each token; in padding as if the sequence went on, so that no mask is needed to
    see that it is one sequence."""
    batch, width = ids.shape
    found = places % width if given is None else given.to(ids.device).expand(batch, width).reshape(-1)[places]
    lengths = torch.tensor(micro.lengths).to(ids.device, non_blocking=True)
    if micro.packed:
        first = found[0, lengths.cumsum(0) - lengths]
        return found - torch.repeat_interleave(first, lengths, output_size=found.shape[1])
    last = found.gather(1, lengths[:, None] - 1)
    running = found[:, :1] + torch.arange(found.shape[1], device=ids.device, dtype=found.dtype)
    # A table of positions has no more than the model says.
    return torch.where(inside, found, torch.minimum(running, last.clamp(min=body.positions - 1)))


def _varlen(micro: MicroBatch, body: Body, device: torch.device) -> dict[str, Any]:
    """Sequences' ends for flash attention, which would look for them in each layer's positions."""
    if not body.varlen:
        return {}
    ends = nn.functional.pad(torch.tensor(micro.lengths).cumsum(0), (1, 0)).to(device, torch.int32, non_blocking=True)
    longest = max(micro.lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def placed(micros: list[MicroBatch], shape: torch.Size, device: torch.device) -> Tensor | None:
    """(B, T): where in the micro-batches' flat outputs, one after the other, each of the batch's tokens is; one past
    their end for what is nowhere. None where the output is the batch."""
    if len(micros) == 1 and micros[0].cells is None:
        return None
    cells = torch.cat([_flat_cells(micro, shape) for micro in micros])
    source = torch.full((shape.numel(),), cells.numel())
    source[cells[cells >= 0]] = (cells >= 0).nonzero()[:, 0]
    return source.view(shape).to(device, non_blocking=True)


def _flat_cells(micro: MicroBatch, shape: torch.Size) -> Tensor:
    return torch.arange(shape.numel()) if micro.cells is None else micro.cells.reshape(-1)
