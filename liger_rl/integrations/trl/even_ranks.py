"""Micro-batches change ranks before their window runs, so that no rank waits long for the rank with the most tokens.

DDP and ZeRO-1 and 2 average gradients over the ranks. The loss of a micro-batch depends on the micro-batch itself, and
KTO's also on the micro-batches that have the same number on the other ranks. TRL gathers the metrics of these
micro-batches, and logs their sum, mean or extreme. So a micro-batch may change its rank but not its number in the
window, and the gradient and the log are TRL's.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.distributed import gathered_objects
from liger_rl.step.facts import Facts, fit_facts, is_plain
from liger_rl.step.prefix_tree import LEAST_SHARED
from liger_rl.step.ranks import count_averaging_ranks, find_sharding, pick_device
from liger_rl.step.trial import apply_known_trials

LIVE, IDLE = 3, 1  # cost of a token with a backward and without one, in forwards
MIN_GAIN = 0.03  # the least share of the largest cost that an exchange must save
MIN_SWAP_GAIN = 0.01  # the same for a swap of two ranks
MAX_TRIES = 4000  # costs that are computed, about 5 to 20 us each

Values = dict[tuple[int, str], Any]  # a micro-batch, by a number and a name


@dataclass(frozen=True)
class Cost:
    """What a micro-batch costs in a window, in forwards of a token."""

    own: int
    prompts: dict[tuple[int, int], int]  # of each prompt, which all micro-batches of a window run once


@dataclass(frozen=True)
class Rows:
    """The sequences of a micro-batch."""

    ids: Tensor  # (B, T) integers
    attention: Tensor  # (B, T), not 0 at tokens
    counted: Tensor  # (B, T) bool, tokens in the loss
    idle: Tensor  # (B,) bool, sequences without a backward


# --- costs ------------------------------------------------------------------------------------------------------------


def can_share_prompts(model: Any, facts: Facts, call: Mapping[str, Any]) -> bool:
    """Whether a window runs equal prompts once, as far as known without another trial.

    `facts`: of the model, a module inside of the trainer's.
    """
    inputs = {name: value for name, value in call.items() if name not in ("input_ids", "labels", "num_items_in_batch")}
    facts = apply_known_trials(model, fit_facts(facts, inputs, call["input_ids"], may_be_packed=True))
    if facts.packed is not None and facts.has_reentrant_checkpoints:  # which take one forward for each backward
        return False
    return facts.obstacle is None and facts.no_tree is None


def read_costs(batches: list[Rows], shares_prompts: bool) -> list[Cost]:
    """The costs of micro-batches, from one copy to the host."""
    table = torch.cat([_measure_rows(rows) for rows in batches]).tolist()
    costs, numbers = [], iter(table)
    for rows in batches:
        own, prompts = 0, dict[tuple[int, int], int]()
        for key, prompt, completion, is_idle in itertools.islice(numbers, len(rows.ids)):
            price = IDLE if is_idle else LIVE
            own += price * completion
            if shares_prompts and prompt > LEAST_SHARED:
                prompts[key, is_idle] = price * prompt  # sequences with a backward and without one run apart
            else:
                own += price * prompt
        costs.append(Cost(own, prompts))
    return costs


def _measure_rows(rows: Rows) -> Tensor:
    """(B, 4) int64: a hash of the prompt, tokens of the prompt, tokens behind it, whether the sequence is idle."""
    column = torch.arange(rows.ids.shape[1], device=rows.ids.device)
    first = torch.where(rows.counted, column, len(column)).amin(1, keepdim=True)
    last = torch.where(rows.counted, column, -1).amax(1, keepdim=True)
    runs = (rows.attention != 0) & (column <= last)
    prompt = runs & (column < first)
    # A polynomial modulo 2^64. Padding does not count.
    key = (prompt * (rows.ids.long() + 1) * 1_000_003 ** prompt.cumsum(1)).sum(1)
    return torch.stack([key, prompt.sum(1), (runs & ~prompt).sum(1), rows.idle.long()], 1)


def sum_costs(costs: list[Cost]) -> int:
    """The cost of one window."""
    prompts: dict[tuple[int, int], int] = {}
    for cost in costs:
        prompts.update(cost.prompts)
    return sum(cost.own for cost in costs) + sum(prompts.values())


_Load = list[tuple[int, Cost]]  # a rank's micro-batches: the rank that has them, and their costs


def assign(costs: list[list[Cost]]) -> list[list[int]]:
    """The rank from which a rank takes a micro-batch, [rank][number], from the costs [rank][number].

    The slowest rank swaps one or two micro-batches with the fastest rank that makes the pair faster, and so on. Nothing
    moves if the slowest rank does not get faster by `MIN_GAIN`.
    """
    loads = [[(rank, cost) for cost in load] for rank, load in enumerate(costs)]
    sums, tries = [sum_costs(load) for load in costs], 0
    before, is_done = max(sums), False
    while not is_done and tries < MAX_TRIES:
        *others, slowest = sorted(range(len(loads)), key=sums.__getitem__)
        is_done = True
        for other in others:
            pair, pair_sums = _swap_best(loads[slowest], loads[other])
            tries += len(costs[0]) * (len(costs[0]) + 1) // 2
            if max(pair_sums) < (1 - MIN_SWAP_GAIN) * sums[slowest]:
                loads[slowest], loads[other] = pair
                sums[slowest], sums[other] = pair_sums
                is_done = False
                break
    gains = max(sums) <= (1 - MIN_GAIN) * before
    return [[owner if gains else rank for owner, _ in load] for rank, load in enumerate(loads)]


def _swap_best(first: _Load, second: _Load) -> tuple[list[_Load], list[int]]:
    """Both loads after the swap of one or two micro-batches that makes the larger sum least, and their sums."""
    results = []
    for swapped in (*itertools.combinations(range(len(first)), 1), *itertools.combinations(range(len(first)), 2)):
        pair = list(first), list(second)
        for number in swapped:
            pair[0][number], pair[1][number] = second[number], first[number]
        results.append(([*pair], [sum_costs([cost for _, cost in load]) for load in pair]))
    return min(results, key=lambda result: max(result[1]))


# --- the exchange -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TensorSpec:
    """In place of a tensor that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_Template = dict[tuple[int, str], Any]  # `Values` with a `_TensorSpec` in place of each tensor


def can_exchange(accelerator: Any, model: nn.Module) -> bool:
    """Whether the gradient is a mean over all ranks, and each has sequences of its own; equal on all ranks.

    A sharded model runs sequences without a backward with one, so less is uneven: measured, an exchange gains nothing.
    """
    if accelerator.num_processes == 1 or find_sharding(list(model.modules())) is not None:
        return False
    # Ranks of tensor, context or sequence parallelism have the same sequences or parts of them.
    others = getattr(getattr(accelerator, "parallelism_config", None), "non_data_parallel_size", 1)
    return others == 1 and count_averaging_ranks(model) == accelerator.num_processes


def exchange(
    batches: list[Values], costs: list[Cost] | None, device: torch.device
) -> tuple[list[int], dict[int, Values]]:
    """A collective of all ranks -> (the rank that each micro-batch of this rank comes from, the ones from other ranks
    by number).

    Nothing is exchanged, and the first list is empty on all ranks, if a rank has no costs, if the ranks have different
    numbers of micro-batches, if a value is neither a tensor nor a plain value that all micro-batches have, or if it
    gains too little.

    Args:
        batches: of this rank.
        costs: of each micro-batch; None if this rank's micro-batches must stay.
        device: of the tensors that are not in CPU memory.
    """
    templates = [_describe(values) for values in batches]
    can_move = costs is not None and None not in templates
    group: Any = torch.distributed.group.WORLD
    buffer = torch.empty(0, dtype=torch.uint8, device=pick_device(group, device))
    ranks = gathered_objects((costs, templates) if can_move else None, group, buffer)
    if None in ranks or len({len(costs) for costs, _ in ranks}) > 1:
        return [], {}
    if len({_list_kinds(template) for _, templates in ranks for template in templates}) > 1:
        return [], {}
    rank, owners = torch.distributed.get_rank(), assign([costs for costs, _ in ranks])
    moves = [(owner, target, n) for target, row in enumerate(owners) for n, owner in enumerate(row) if owner != target]
    if not moves:
        return [], {}

    outgoing, incoming = [0] * len(ranks), [0] * len(ranks)
    sent, received = [buffer], []
    for source, target, number in sorted(moves):
        template = ranks[source][1][number]
        if source == rank:
            outgoing[target] += _count_bytes(template)
            sent += [_to_bytes(value).to(buffer.device) for value in batches[number].values() if _is_tensor(value)]
        elif target == rank:
            incoming[source] += _count_bytes(template)
            received.append((number, template))
    buffer = buffer.new_empty(sum(incoming))
    torch.distributed.all_to_all_single(buffer, torch.cat(sent), incoming, outgoing, group=group)
    pieces = buffer.split([_count_bytes(template) for _, template in received])
    values = {
        number: _unpack(piece, template, device) for (number, template), piece in zip(received, pieces, strict=True)
    }
    return owners[rank], values


def sum_own_losses(losses: Tensor, owners: list[int]) -> Tensor:
    """() the sum of the losses of this rank's own micro-batches, from the losses (M,) of those that it runs.

    A collective of all ranks. TRL logs the mean over the ranks, but `train_loss` ends with the rank's own losses.
    """
    group: Any = torch.distributed.group.WORLD
    table = losses.new_zeros(torch.distributed.get_world_size(), len(owners))  # [owner, number]
    table[owners, range(len(owners))] = losses
    table = table.to(pick_device(group, losses.device))
    torch.distributed.all_reduce(table, group=group)
    return table[torch.distributed.get_rank()].sum().to(losses.device)


def _is_tensor(value: Any) -> bool:
    """Whether the value is a tensor that is its bytes."""
    return type(value) is Tensor and value.layout == torch.strided and not (value.requires_grad or value.is_quantized)


def _describe(values: Values) -> _Template | None:
    """None if a value cannot be sent."""
    if not all(_is_tensor(value) or is_plain(value) for value in values.values()):
        return None
    return {
        name: _TensorSpec(tuple(x.shape), x.dtype, x.device.type == "cpu") if isinstance(x, Tensor) else x
        for name, x in values.items()
    }


def _list_kinds(template: _Template) -> frozenset:
    """What must be equal in all micro-batches."""
    kinds = {name: (x.dtype, len(x.shape)) if isinstance(x, _TensorSpec) else x for name, x in template.items()}
    return frozenset(kinds.items())


def _count_bytes(template: _Template) -> int:
    return sum(spec.bytes for spec in template.values() if isinstance(spec, _TensorSpec))


def _to_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _unpack(buffer: Tensor, template: _Template, device: torch.device) -> Values:
    values, start = dict(template), 0
    for name, spec in template.items():
        if isinstance(spec, _TensorSpec):
            # A copy begins at a multiple of the dtype's size.
            piece = buffer[start : (start := start + spec.bytes)].clone()
            values[name] = piece.view(spec.dtype).view(spec.shape).to("cpu" if spec.is_on_host else device)
    return values
