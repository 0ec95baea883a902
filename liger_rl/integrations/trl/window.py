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

The sum of the losses goes back to TRL, so there is one backward, where DDP and FSDP synchronize. A call is caught at
the outermost module, before the forward of DDP and the hooks of FSDP. What stands before a trainer's call runs several
times. No trainer of TRL has an effect there.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.integrations.trl.adapted_head import TRAINERS
from liger_rl.integrations.trl.even_ranks import (
    Rows,
    Values,
    can_exchange,
    can_share_prompts,
    exchange,
    read_costs,
    sum_own_losses,
)
from liger_rl.integrations.trl.forward import (
    BUILT_BEFORE,
    WindowCall,
    find_wrapped,
    get_window_call,
    log_once,
    set_window_call,
)
from liger_rl.integrations.trl.settings import get_settings
from liger_rl.models.modules import walked_once
from liger_rl.models.swap import IGNORE_INDEX
from liger_rl.step.body import COMPILED, DYNAMIC_ROPE, is_plain, read_static_positions
from liger_rl.step.memory import DEFAULT_SHARE, count_fitting_tokens, count_missing_gradients, read_memory
from liger_rl.step.ranks import agree_on_minimum
from liger_rl.step.reason import Reason
from liger_rl.step.row_readers import NEFTUNE, find_row_reader
from liger_rl.step.trial import find_known_row_reader

COLUMNS = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE_INDEX}  # of a call, with the value of padding
# Methods with a trainer's calls of the model.
METHODS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies", "_compute_kl_logps")


class _ReachedCall(BaseException):
    """A micro-batch has come to a call of a model whose values are not known yet."""


class _Waits(BaseException):
    """The training step of a micro-batch ends without a loss."""


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


class Window:
    """Micro-batches that run in one forward."""

    def __init__(
        self,
        compute_loss: Callable[..., Tensor],
        models: list[nn.Module],
        gradient_state: Any,
        max_tokens: int | None,  # of a forward that keeps activations
    ) -> None:
        self._compute_loss, self._models, self._gradient_state = compute_loss, models, gradient_state
        self._max_tokens = max_tokens
        self.micro_batches: list[_MicroBatch] = []
        self._current: _MicroBatch | None = None  # whose `compute_loss` runs
        self._number = 0  # of its next call
        self._leader: _MicroBatch | None = None  # in whose call a forward runs
        self.tokens: list[int] = []  # of each micro-batch, once they have run
        self.live_tokens = 0  # that ran in the first call with a graph
        self.added = 0  # micro-batches, with those that run alone
        self._in_forward = False
        self._owners: list[int] = []  # the rank of each micro-batch's data; empty if no rank has exchanged any

    def add(self, *arguments: Any, **options: Any) -> Tensor | None:
        """Keep a micro-batch. -> its loss if its calls do not run together with others', else None."""
        self.added += 1
        batch = _MicroBatch(arguments, options, self._gradient_state.sync_gradients)
        with self._caught_calls():
            self._run(batch)
        if batch.loss is None:
            self.micro_batches.append(batch)
        return batch.loss

    def exchange(self, model: nn.Module, device: torch.device) -> None:
        """Exchange micro-batches with other ranks, so that all ranks have about as much to run. A collective."""
        values, costs = [batch.list_values() for batch in self.micro_batches], None
        known = [x for x in values if x is not None]
        # At the end of a data set `gather_for_metrics` leaves out the last ranks.
        is_cut = self._gradient_state.end_of_dataloader and self._gradient_state.remainder > 0
        if known and len(known) == self.added and not is_cut:
            shares = can_share_prompts(model, self.micro_batches[0].call)
            costs = read_costs([_read_rows(batch) for batch in self.micro_batches], shares)
        self._owners, exchanged = exchange(known, costs, device)
        with self._caught_calls():
            for number, received in exchanged.items():
                inputs, options = ({name: x for (i, name), x in received.items() if i == part} for part in (0, 1))
                batch = _MicroBatch((model, inputs), options, self.micro_batches[number].is_last)
                self.micro_batches[number] = batch
                self._run(batch)

    def sum_losses(self) -> Tensor:
        """The sum of the losses of all micro-batches, with a graph. Its value is of the rank's own micro-batches."""
        with self._caught_calls():
            while waiting := [batch for batch in self.micro_batches if batch.loss is None]:
                self._leader = waiting[0]
                self._run(waiting[0])
                self._leader = None
                for batch in waiting:
                    self._run(batch)
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

    def _call(self, model: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """The output of a call by the current micro-batch. Raises `_ReachedCall` if it is not known yet."""
        batch, number = self._current, self._number
        assert batch is not None
        self._number += 1
        if number < len(batch.values):
            return batch.values[number]
        batch.is_alone = batch.is_alone or not _is_text(inputs)
        if batch.is_alone:
            batch.values.append(self._run_model(model, inputs))
            return batch.values[number]
        batch.call, batch.idle_rows = inputs, get_window_call().idle_rows
        if number == 0:
            batch.tokens = inputs["attention_mask"].sum()
        if batch is self._leader:
            self._run_forward(model, number)
        raise _ReachedCall

    def _run_forward(self, model: Callable[..., Any], number: int) -> None:
        """Run the model for all micro-batches whose next call has this number."""
        waiting = [batch for batch in self.micro_batches if batch.loss is None and len(batch.values) == number]
        if number == 0:
            # The host reads the sequences in this call anyway, and nothing waits for the device after its forward.
            self.tokens = torch.stack([batch.tokens for batch in waiting if batch.tokens is not None]).tolist()
        calls = [batch.call for batch in waiting]
        idle_rows = _join_idle_rows([batch.idle_rows for batch in waiting], calls)
        shapes = tuple(call["input_ids"].shape for call in calls)
        call = WindowCall(idle_rows, shapes, self._max_tokens)
        with set_window_call(call):
            output = self._run_model(model, _join_calls(calls))
        self.live_tokens = self.live_tokens or sum(call.live_tokens)
        for batch, values in zip(waiting, _split_output(output, calls), strict=True):
            batch.values.append(values)

    def _run_model(self, model: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """The output of a model, whose calls of other models (DDP's of its module) are not caught."""
        self._in_forward = True
        try:
            return model(**inputs)
        finally:
            self._in_forward = False

    @contextmanager
    def _caught_calls(self) -> Iterator[None]:
        """Calls of the models with fused_lm_head=True go to `_call`."""

        def catch(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **inputs: Any) -> Any:
                if self._in_forward or args or not inputs.get("fused_lm_head"):
                    return original(*args, **inputs)
                return self._call(original, inputs)

            return call

        for model in self._models:
            # An attribute of the object in front of the class's method, through which torch calls a module.
            vars(model)["_call_impl"] = catch(model._call_impl)
        try:
            yield
        finally:
            for model in self._models:
                del vars(model)["_call_impl"]


def _is_text(inputs: Mapping[str, Any]) -> bool:
    """Whether the calls of several micro-batches can be one: no input of tokens or images but those of `COLUMNS`."""
    if not all(isinstance(inputs.get(name), Tensor) and inputs[name].dim() == 2 for name in COLUMNS):
        return False
    others = inputs.keys() - COLUMNS.keys() - {"num_items_in_batch"}
    return all(is_plain(inputs[name]) for name in others)


def _join_calls(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The inputs of one call, rows below each other, padded on the right."""
    width = max(call["input_ids"].shape[1] for call in calls)
    joined = {name: value for name, value in calls[0].items() if name != "num_items_in_batch"}
    for name, padding in COLUMNS.items():
        columns = [call[name] for call in calls]
        joined[name] = torch.cat([nn.functional.pad(x, (0, width - x.shape[1]), value=padding) for x in columns])
    return joined


def _read_rows(batch: _MicroBatch) -> Rows:
    inputs, call, idle = batch.arguments[1], batch.call, batch.idle_rows
    counted = call["labels"] != IGNORE_INDEX
    if {"input_ids", "attention_mask", "completion_mask"} <= inputs.keys():  # KTO's first call may be of other rows
        call, counted = inputs, inputs["completion_mask"] != 0
    ids = call["input_ids"]
    if idle is None or len(idle) != len(ids):
        idle = ids.new_zeros(len(ids), dtype=torch.bool)
    return Rows(ids, call["attention_mask"], counted, idle)


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


# --- in a trainer -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _TrainerState:
    """The window of a trainer, and what it has measured."""

    window: Window | None = None
    step: tuple[Any, int] | None = None  # (TRL's state, number of the optimizer step) of the window
    finished: Window | None = None  # which has run in this training step
    size: float = 0  # micro-batches of a window; 0: not known yet
    limit: int | None = None  # how many tokens a window may have; None: any number
    largest: int = 0  # tokens of the largest micro-batch so far
    token_bytes: float = 0.0  # memory of the first window for each of its tokens


def _get_state(trainer: Any) -> _TrainerState:
    # On the trainer: a window that an error has left refers to it, and so would keep it in any other table.
    return vars(trainer).setdefault("_liger_rl_state", _TrainerState())


def run_training_step(self: Any, original: Callable[..., Any], model: Any, *arguments: Any) -> Any:
    """`original`, transformers' `training_step` of a trainer, in which a micro-batch may wait for the next ones."""
    if not _uses_window(self, model):
        return original(self, model, *arguments)
    state = _get_state(self)
    self.compute_loss = functools.partial(_compute_loss, self, state, self.compute_loss)
    try:
        with _measured_memory(self, model, state):
            return original(self, model, *arguments)
    except _Waits:
        return torch.zeros((), device=self.args.device)
    finally:
        del self.compute_loss
        state.finished = None


def _compute_loss(
    trainer: Any, state: _TrainerState, compute_loss: Callable[..., Tensor], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """The loss of a trainer's micro-batches so far, or `_Waits`."""
    step = trainer.state, trainer.state.global_step
    window = state.window
    # An error may have ended the optimizer step before.
    if window is None or state.step is None or state.step[0] is not step[0] or state.step[1] != step[1]:
        models = {id(m): m for m in (model, trainer.model, getattr(trainer, "ref_model", None)) if m is not None}
        if state.step is None or state.step[1] != step[1]:
            _set_size(trainer, model, state)
        state.step = step
        state.window = window = Window(
            compute_loss, list(models.values()), trainer.accelerator.gradient_state, state.limit
        )
    loss = window.add(model, *args, **kwargs)
    size = get_size(trainer)
    if not trainer.accelerator.sync_gradients and window.added < size:
        if loss is None:
            raise _Waits
        return loss
    state.window = None
    if size > 1 and get_settings().even_ranks and can_exchange(trainer.accelerator, model):
        window.exchange(model, trainer.args.device)
    if not window.micro_batches:
        return loss
    total = window.sum_losses()
    state.finished, state.largest = window, max(state.largest, *window.tokens)
    return total if loss is None else total + loss


# --- the size of a window ---------------------------------------------------------------------------------------------


def get_size(trainer: Any) -> float:
    """How many micro-batches the trainer's windows have at most."""
    state = _get_state(trainer)
    if not state.size:
        # Where there is a limit, the first windows have one micro-batch, to measure what it takes.
        state.size = 1 if get_settings().max_tokens is not None or trainer.args.device.type == "cuda" else math.inf
    return state.size


@contextmanager
def _measured_memory(trainer: Any, model: nn.Module, state: _TrainerState) -> Iterator[None]:
    """Sets `token_bytes` of a training step on a GPU whose window runs in this context, if it is not known yet."""
    before = None if state.token_bytes else read_memory(trainer.args.device, restart_peak=True)
    gradients = 0 if before is None else count_missing_gradients(model)
    yield
    if before is not None and state.finished is not None:
        memory = read_memory(trainer.args.device)
        assert memory is not None
        # Gradients stay, and do not grow with the number of tokens.
        peak = memory.peak - before.allocated - (gradients - count_missing_gradients(model))
        state.token_bytes = max(peak, 1) / max(state.finished.live_tokens, 1)


def _set_size(trainer: Any, model: nn.Module, state: _TrainerState) -> None:
    """How many micro-batches the windows of an optimizer step have, from the largest one so far; equal on all ranks."""
    state.limit = limit = _find_limit(trainer, model, state)
    if limit is None:
        return
    # A rank without a window so far takes part in the collective, too.
    size = max(1, limit // state.largest) if state.largest else 1
    groups: list[Any] = [torch.distributed.group.WORLD] if trainer.accelerator.num_processes > 1 else []
    state.size = agree_on_minimum(groups, size, trainer.args.device)


def _find_limit(trainer: Any, model: nn.Module, state: _TrainerState) -> int | None:
    """How many tokens a window may have, 1 if it is not known yet; None for any number."""
    settings = get_settings()
    memory = read_memory(trainer.args.device)
    if settings.max_tokens is not None or memory is None:
        return settings.max_tokens
    share = settings.memory or DEFAULT_SHARE  # without kept layers, too, a window takes what is free
    count = count_fitting_tokens(model, share)
    if count is None and state.token_bytes:  # no layer is recomputed, or none has transformers' switch
        count = int(share * (memory.spare - count_missing_gradients(model)) / state.token_bytes)
    return max(count or 1, 1)


def _uses_window(trainer: Any, model: Any) -> bool:
    if not get_settings().whole_step or trainer.args.gradient_accumulation_steps == 1:
        return False
    with walked_once():
        reason = find_refusal(trainer, model)
    if reason is not None:
        log_once(trainer, f"a forward for each micro-batch: {reason}")
    return reason is None


def is_trl_trainer(trainer: Any) -> bool:
    """Whether the trainer is TRL's, or of a subclass."""
    return any(kind.__module__.startswith("trl.trainer.") for kind in type(trainer).__mro__)


def list_own_methods(trainer: Any) -> list[str]:
    """The names of the methods with a loss or calls of the model that a subclass or the trainer itself defines."""
    own = [method for method in METHODS if method in vars(trainer) and method != "compute_loss"]  # the window's
    kinds = type(trainer).__mro__
    owners = {method: next((kind for kind in kinds if method in vars(kind)), object) for method in METHODS}
    packages = ("trl.trainer.", "transformers.", "builtins")
    return own + [method for method, owner in owners.items() if not owner.__module__.startswith(packages)]


def is_compiled(trainer: Any, model: nn.Module) -> bool:
    """Whether torch.compile compiles the model that the trainer calls."""
    return trainer.args.torch_compile or hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


def find_refusal(trainer: Any, model: nn.Module) -> Reason | None:
    """Why each micro-batch has a forward of its own; None if they have one together."""
    if find_wrapped(trainer.model) is None:
        if any(kind.__module__ in TRAINERS for kind in type(trainer).__mro__):
            return BUILT_BEFORE
        return Reason(f"{type(trainer).__name__} does not call TRL's fused head")
    own = list_own_methods(trainer) or [method for method in ("compute_loss",) if method in vars(trainer)]
    if own:  # what it does before a call would be done several times
        return Reason(f"{type(trainer).__name__} has a {own[0]} of its own")
    if callable(getattr(trainer, "compute_loss_func", None)):  # GRPO and RLOO have a text there
        return Reason("compute_loss_func takes logits", "leave compute_loss_func out")
    if getattr(trainer, "label_smoother", None) is not None:
        return Reason("label smoothing takes logits", "label_smoothing_factor=0")
    if getattr(trainer, "_is_vlm", False) and trainer.accelerator.num_processes > 1:
        return Reason("a micro-batch of one rank may have images, and that of another rank none")
    if read_static_positions(trainer.model.config.get_text_config()) < math.inf:
        return DYNAMIC_ROPE
    if is_compiled(trainer, model):
        return COMPILED
    if isinstance(model, nn.DataParallel):
        return Reason("DataParallel splits a micro-batch over devices", "one process for each GPU (torchrun)")
    return find_trained_row_reader(trainer)


def find_trained_row_reader(trainer: Any) -> Reason | None:
    """What reads the rows of the policy's batch in training; None if nothing is known to."""
    if getattr(trainer, "neftune_noise_alpha", None) is not None:  # its hook is there in training alone
        return NEFTUNE
    model = find_wrapped(trainer.model)
    assert model is not None
    return find_row_reader(model, in_training=True) or find_known_row_reader(model)
