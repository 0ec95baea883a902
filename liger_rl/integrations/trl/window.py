"""One forward and one backward for the micro-batches of an optimizer step, in every trainer of TRL.

All trainers call the model in one way, `model(input_ids, attention_mask, labels, fused_lm_head=True)`, inside of
`compute_loss`. So nothing of a trainer's loss has to be known:

1. A micro-batch runs its `compute_loss` up to its first call of a model, which an exception leaves. Its training step
   ends there: it returns a zero loss and has no backward. DeepSpeed counts backwards. After one of a zero loss ZeRO-2
   raises, and ZeRO-3 adds to the gradients of the optimizer step before.
2. In the training step of the last micro-batch the first one runs again, up to that call. One forward of all
   micro-batches runs where the call stands, with its gradient mode, autocast and disabled adapters.
3. All run again with their rows of the values, up to their next call (of a reference, of KTO's KL rows) or to their
   end: losses and metrics are TRL's own, in TRL's order.

The sum of the losses goes back to TRL, so there is one backward, where DDP and FSDP synchronize. What stands before a
trainer's call runs several times. No trainer of TRL has an effect there.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.integrations.trl.caught_calls import RunModel
from liger_rl.integrations.trl.even_ranks import Rows, Values, exchange, read_costs, sum_own_losses
from liger_rl.models.project import IGNORE_INDEX
from liger_rl.step.facts import PACKED_INPUTS, is_plain

# Of a call, with the value of padding. A call of packed rows has position_ids in place of the mask.
COLUMNS = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE_INDEX}
PACKED_COLUMNS = {"input_ids": 0, "position_ids": -1, "labels": IGNORE_INDEX}


class _ReachedCall(BaseException):
    """A micro-batch has come to a call of a model whose values are not known yet."""


@dataclasses.dataclass
class _MicroBatch:
    """The arguments of one `compute_loss`, and what is known of its calls of a model."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    is_last: bool  # of its optimizer step, which accelerate knows as `sync_gradients`
    values: list[Any] = dataclasses.field(default_factory=list)  # output of each call that has run
    call: dict[str, Any] = dataclasses.field(default_factory=dict)  # inputs of the call that has not run
    idle_rows: Tensor | None = None  # (B,) bool, of that call
    tokens: Tensor | None = None  # () int64, of the first call, on its device
    is_alone: bool = False  # its calls run as they are
    loss: Tensor | None = None  # () with a graph, once `compute_loss` has returned

    def list_values(self) -> Values | None:
        """The arguments without the model; None if they are not (model, inputs as a dict)."""
        if len(self.arguments) != 2 or type(self.arguments[1]) is not dict:
            return None
        return {(0, name): x for name, x in self.arguments[1].items()} | {
            (1, name): x for name, x in self.options.items()
        }


# (what runs a model, its inputs, idle rows, shapes of the micro-batches, whether only this rank may call it) -> output
RunJoined = Callable[[RunModel, dict[str, Any], Tensor | None, Sequence[tuple[int, int]], bool], Any]


class Window:
    """Micro-batches that run in one forward."""

    def __init__(
        self,
        compute_loss: Callable[..., Tensor],
        gradient_state: Any,
        run_joined: RunJoined,
        shares_prompts: Callable[[dict[str, Any]], bool],  # of the inputs of a call
        agree_to_join: Callable[[bool], bool],  # whether the call of every rank can join others; or this rank's
    ) -> None:
        self._compute_loss, self._gradient_state, self._run_joined = compute_loss, gradient_state, run_joined
        self._shares_prompts, self._agree_to_join = shares_prompts, agree_to_join
        self.micro_batches: list[_MicroBatch] = []
        self._current: _MicroBatch | None = None  # whose `compute_loss` runs
        self._number = 0  # of its next call
        self._leader: _MicroBatch | None = None  # in whose call a forward runs
        self.tokens: list[int] = []  # of each micro-batch, once they have run
        self.added = 0  # micro-batches, with those that run alone
        # What runs alone waits, too: the same on another rank may wait, and TRL gathers metrics of both.
        self.waits = False
        self._called: set[int] = set()  # numbers of the calls that have run while gradients synchronize
        self._owners: list[int] = []  # the rank of each micro-batch's data; empty if no rank has exchanged any

    @property
    def is_running(self) -> bool:
        """Whether the `compute_loss` of a micro-batch runs, whose calls belong to the window."""
        return self._current is not None

    def add(self, *arguments: Any, **options: Any) -> Tensor | None:
        """Keep a micro-batch. -> its loss if its calls do not run together with others', else None."""
        self.added += 1
        batch = _MicroBatch(arguments, options, self._gradient_state.sync_gradients)
        self._run(batch)
        if batch.loss is None:
            self.micro_batches.append(batch)
        return batch.loss

    def exchange(self, model: nn.Module, device: torch.device, *, stays: bool) -> None:
        """Exchange micro-batches with other ranks, so that all ranks have about as much to run. A collective.

        `stays`: whether this rank's have run already, so that none changes its rank.
        """
        values, costs = [batch.list_values() for batch in self.micro_batches], None
        known = [x for x in values if x is not None]
        # At the end of a data set `gather_for_metrics` leaves out the last ranks.
        is_cut = self._gradient_state.end_of_dataloader and self._gradient_state.remainder > 0
        joins = not stays and not any(batch.is_alone for batch in self.micro_batches)
        if known and len(known) == self.added and joins and not is_cut:
            rows = [_read_rows(batch) for batch in self.micro_batches]
            costs = read_costs(rows, self._shares_prompts(self.micro_batches[0].call))
        self._owners, exchanged = exchange(known, costs, device)
        for number, received in exchanged.items():
            inputs, options = ({name: x for (i, name), x in received.items() if i == part} for part in (0, 1))
            batch = _MicroBatch((model, inputs), options, self.micro_batches[number].is_last)
            self.micro_batches[number] = batch
            self._run(batch)

    def sum_losses(self) -> Tensor:
        """The sum of the losses of all micro-batches, with a graph. Its value is of the rank's own micro-batches."""
        while waiting := [batch for batch in self.micro_batches if batch.loss is None]:
            self._leader = waiting[0]
            self._run(waiting[0])
            self._leader = None
            for number, batch in enumerate(waiting):
                if batch.loss is None:
                    # In their order, because a loss may gather values of all ranks.
                    is_next = all(earlier.loss is not None for earlier in waiting[:number])
                    self._leader = batch if batch.is_alone and is_next else None
                    self._run(batch)
            self._leader = None
        losses = [batch.loss for batch in self.micro_batches if batch.loss is not None]
        total = functools.reduce(torch.add, losses).clone()
        if self._owners:
            with torch.no_grad():
                total.copy_(sum_own_losses(torch.stack(losses), self._owners))
        return total

    def _run(self, batch: _MicroBatch) -> None:
        """Run `compute_loss` up to a call that has not run, or to its end."""
        self._current, self._number = batch, 0
        is_last = self._gradient_state.sync_gradients
        self._gradient_state._set_sync_gradients(batch.is_last)  # GRPO reads it
        try:
            batch.loss = self._compute_loss(*batch.arguments, **batch.options)
        except _ReachedCall:
            pass
        finally:
            self._current = None
            self._gradient_state._set_sync_gradients(is_last)

    def call(self, run_model: RunModel, inputs: dict[str, Any], idle_rows: Tensor | None) -> Any:
        """The output of a call by the current micro-batch. Raises `_ReachedCall` if it is not known yet."""
        batch, number = self._current, self._number
        assert batch is not None
        self._number += 1
        if number < len(batch.values):
            return batch.values[number]
        # Packed rows without trees gain nothing: each micro-batch runs as in TRL.
        is_packed = _has_columns(inputs, PACKED_COLUMNS) and len(inputs["input_ids"]) == 1
        can_join = self._shares_prompts(inputs) if is_packed else _has_columns(inputs, COLUMNS)
        batch.is_alone = not self._agree_to_join(can_join and not batch.is_alone)
        if batch.is_alone:
            if self.waits and batch is not self._leader:
                raise _ReachedCall
            ids = inputs.get("input_ids")
            self.tokens += [] if ids is None else [ids.numel()]
            batch.values.append(self._run_model(run_model, number, inputs, idle_rows, ()))
            return batch.values[number]
        batch.call, batch.idle_rows = inputs, idle_rows
        if number == 0:
            batch.tokens = _get_attended(inputs).sum()
        if batch is self._leader:
            self._run_forward(run_model, number)
        raise _ReachedCall

    def _run_forward(self, run_model: RunModel, number: int) -> None:
        """Run the model for all micro-batches whose next call has this number."""
        assert self._leader is not None
        plain = _list_plain(self._leader.call)
        waiting = [b for b in self.micro_batches if b.loss is None and len(b.values) == number and not b.is_alone]
        waiting = [batch for batch in waiting if _list_plain(batch.call) == plain]
        if number == 0:
            # The host reads the sequences in this call anyway, and nothing waits for the device after its forward.
            self.tokens += torch.stack([batch.tokens for batch in waiting if batch.tokens is not None]).tolist()
        calls = [batch.call for batch in waiting]
        idle_rows = _join_idle_rows([batch.idle_rows for batch in waiting], calls)
        shapes = tuple(tuple(call["input_ids"].shape) for call in calls)
        output = self._run_model(run_model, number, _join_calls(calls), idle_rows, shapes)
        for batch, values in zip(waiting, _split_output(output, calls), strict=True):
            batch.values.append(values)

    def _run_model(
        self,
        run_model: RunModel,
        number: int,
        inputs: dict[str, Any],
        idle_rows: Tensor | None,
        shapes: Sequence[tuple[int, int]],
    ) -> Any:
        synchronizes = any(batch is not None and batch.is_last for batch in (self._current, *self.micro_batches))
        is_more = number in self._called or not synchronizes
        if not is_more:
            self._called.add(number)
        return self._run_joined(run_model, inputs, idle_rows, shapes, is_more)


def _has_columns(inputs: Mapping[str, Any], columns: Mapping[str, int]) -> bool:
    """Whether a call has these inputs of tokens and no others, so that calls of several micro-batches can be one."""
    if not all(isinstance(inputs.get(name), Tensor) and inputs[name].dim() == 2 for name in columns):
        return False
    others = inputs.keys() - columns.keys() - {"num_items_in_batch"}
    if "attention_mask" not in columns:
        others -= PACKED_INPUTS
    return all(is_plain(inputs[name]) for name in others)


def _list_plain(call: Mapping[str, Any]) -> dict[str, Any]:
    """What the calls of one forward have in common: names, and values that are not tokens."""
    shared = {name: value for name, value in call.items() if name not in ("num_items_in_batch", "first_column")}
    return {name: x if is_plain(x) and name not in PACKED_INPUTS else None for name, x in shared.items()}


def _get_attended(call: Mapping[str, Any]) -> Tensor:
    """(B, T), not 0 at tokens."""
    mask = call.get("attention_mask")
    return torch.ones_like(call["input_ids"]) if mask is None else mask


def _join_calls(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The inputs of one call, rows below each other, padded on the right; lists of what packed rows have besides."""
    width = max(call["input_ids"].shape[1] for call in calls)
    joined = {name: value for name, value in calls[0].items() if name != "num_items_in_batch"}
    joined |= {name: [call.get(name) for call in calls] for name in PACKED_INPUTS & calls[0].keys()}
    joined |= {name: min(call[name] for call in calls) for name in {"first_column"} & calls[0].keys()}
    for name, padding in (COLUMNS if _has_columns(calls[0], COLUMNS) else PACKED_COLUMNS).items():
        columns = [call[name] for call in calls]
        joined[name] = torch.cat([nn.functional.pad(x, (0, width - x.shape[1]), value=padding) for x in columns])
    return joined


def _read_rows(batch: _MicroBatch) -> Rows:
    inputs, call, idle = batch.arguments[1], batch.call, batch.idle_rows
    counted = call["labels"] != IGNORE_INDEX
    if {"input_ids", "attention_mask", "completion_mask"} <= inputs.keys():  # KTO's first call may be of other rows
        call, counted = inputs, inputs["completion_mask"] != 0
    ids = call["input_ids"]
    if "attention_mask" not in call:  # packed rows, in which each token counts
        counted = torch.ones_like(counted)
    if idle is None or len(idle) != len(ids):
        idle = ids.new_zeros(len(ids), dtype=torch.bool)
    return Rows(ids, _get_attended(call), counted, idle)


def _join_idle_rows(idle_rows: list[Tensor | None], calls: list[dict[str, Any]]) -> Tensor | None:
    if all(rows is None for rows in idle_rows):
        return None
    ids = [call["input_ids"] for call in calls]
    known = [
        x.new_zeros(len(x), dtype=torch.bool) if rows is None else rows for rows, x in zip(idle_rows, ids, strict=True)
    ]
    return torch.cat(known)


def _split_output(output: Any, calls: list[dict[str, Any]]) -> Iterator[Any]:
    """TRL's output of each call. Its loss is that of the call's tokens, without a router's."""
    width, row = max(call["input_ids"].shape[1] for call in calls), 0
    if isinstance(output, Tensor):  # hidden states of the last columns
        parts, first = output.split([len(call["input_ids"]) for call in calls]), width - output.shape[1]
        yield from (x[:, : call["input_ids"].shape[1] - first] for x, call in zip(parts, calls, strict=True))
        return
    # Prompt tuning puts the values of its virtual tokens in front.
    virtual = output.log_probs.shape[1] - (width - 1)
    for number, call in enumerate(calls):
        rows, tokens = call["input_ids"].shape
        values = {
            name: value[row : row + rows, : virtual + tokens - 1]
            for name, value in output.items()
            if isinstance(value, Tensor) and value.dim() == 2
        }
        aux_loss = None if output.aux_loss is None else output.aux_loss[number]
        row += rows
        items = call.get("num_items_in_batch")
        items = values["label_mask"].sum().clamp(min=1) if items is None else items
        yield dataclasses.replace(output, **values, loss=-values["log_probs"].sum() / items, aux_loss=aux_loss)
