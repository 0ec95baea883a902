"""One optimizer step of a trainer of TRL: what it may do, how large its windows are, and how its calls ran.

A trainer has one `OptimizerStep` at a time. Reasons against a window, and its size, are asked once, when the step
begins, and agreed on with the other ranks. Facts of its models are read once, at their first call. What
stays for the next step are measurements.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.integrations.patching import Patch, replaced
from liger_rl.integrations.trl.between import (
    METHODS,
    Fingerprint,
    StateReader,
    find_own_code,
    is_of,
    is_trl_trainer,
    list_own_methods,
    warn,
)
from liger_rl.integrations.trl.caught_calls import RunModel, caught_calls, is_catching
from liger_rl.integrations.trl.even_ranks import can_exchange, can_share_prompts
from liger_rl.integrations.trl.forward import CALL, CallRecord, ModelCall, find_known_refusal, find_wrapped, log_once
from liger_rl.integrations.trl.kept_scores import MOST_MEMORY, KeptScores
from liger_rl.integrations.trl.settings import get_settings
from liger_rl.integrations.trl.window import Window
from liger_rl.step.facts import COMPILED, DYNAMIC_ROPE, PROMPT_LEARNING, Facts, read_facts, read_static_positions
from liger_rl.step.memory import DEFAULT_SHARE, count_fitting_tokens, count_missing_gradients, read_memory
from liger_rl.step.ranks import UNLIMITED, Agreement, agree, find_ddp
from liger_rl.step.reason import Reason
from liger_rl.step.row_readers import NEFTUNE, find_row_reader
from liger_rl.step.trial import find_known_row_reader

FUSED_TRAINERS = tuple(f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "dpo", "kto", "sft", "distillation"))
BUILT_BEFORE = Reason("the trainer was built before patch_trl()", "call patch_trl() before the trainer is built")
MOVED = Reason("the model changed between the micro-batches of an optimizer step")
UNMEASURED_SIZE = 6  # micro-batches of a window where nothing tells how much memory is free
UNMEASURED = Reason("nothing tells how much memory is free here", "set max_tokens")
ANOTHER_RANK = Reason("another rank has a reason against one forward for all micro-batches")


class _Waits(BaseException):
    """The training step of a micro-batch ends without a loss."""


@dataclasses.dataclass
class Measurements:
    """What a trainer's windows have measured."""

    size: int = 0  # micro-batches of a window; 0: not known yet
    largest: int = 0  # tokens of the largest micro-batch so far
    token_bytes: float = 0.0  # memory of the first window for each of its tokens
    has_moved: bool = False  # whether a model has changed between the micro-batches of a window
    kept_failures: int = 0  # in a row, of what the scores have kept for the loss
    run: Any = None  # the `TrainerState` of the last run
    accumulation: int = 0  # `gradient_accumulation_steps` when it began


def get_measurements(trainer: Any) -> Measurements:
    # On the trainer: what refers to it would be kept in any other table.
    return vars(trainer).setdefault("_liger_rl_measurements", Measurements())


class OptimizerStep:
    """The micro-batches of one optimizer step of a trainer."""

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self.trainer, self.model = trainer, model
        self.key = trainer.state, trainer.state.global_step
        self.calls: list[CallRecord] = []
        self.window: Window | None = None
        self.idle_rows: Tensor | None = None  # (B,) bool, of the calls of the `_compute_loss` that runs
        self.shapes: Sequence[tuple[int, int]] = ()  # of the micro-batches whose scores one call computes
        self.keeps_scores = False  # whether that call's forward is to be the training's
        self._kept: KeptScores | None = None
        self._kept_state: Fingerprint | None = None  # of the model that has computed them
        self.own_methods = list_own_methods(trainer)  # with a loss or calls of the model
        self._facts: dict[tuple[int, bool], Facts] = {}
        self._wrapped: dict[int, nn.Module | None] = {}
        # DistillationTrainer's, by which its loss runs inside of the student's forward.
        self.redirect = vars(trainer).get("_forward_redirection")
        self._models = [m for m in (model, trainer.model, getattr(trainer, "ref_model", None)) if m is not None]
        self._finished: Window | None = None  # which has run in this training step
        self._live_tokens = 0  # of the first call of that window with a graph
        self._state_reader = StateReader(trainer.model)
        self._waiting = 0  # micro-batches whose training steps have ended without a loss
        self._is_run = False  # whether they have begun to run in this training step
        self._of_epoch = 0  # micro-batches so far, since this step or an epoch within it began
        self._first_state: Fingerprint | None = None  # when the window's first micro-batch came
        self.activation_tokens: int | None = None  # how many tokens a window may have; None: any number
        self.refusal: Reason | None = None  # why each micro-batch has a forward of its own
        measured = get_measurements(trainer)
        if measured.run is not trainer.state:
            measured.run, measured.accumulation = trainer.state, trainer.args.gradient_accumulation_steps
        if get_settings().whole_step and trainer.args.gradient_accumulation_steps > 1:
            self.refusal = find_refusal(trainer, model)
            self._agree()
            if self.refusal is not None:
                log_once(trainer, ModelCall(), f"a forward for each micro-batch: {self.refusal}")

    @classmethod
    def of(cls, trainer: Any, model: nn.Module) -> "OptimizerStep":
        """The optimizer step that runs, or a new one. An error may have ended the one before."""
        step = find_step(trainer)
        state = trainer.state
        if step is None or step.key[0] is not state or step.key[1] != state.global_step:
            step = vars(trainer)["_liger_rl_step"] = cls(trainer, model)
        return step

    def close(self) -> None:
        """The next training step begins another optimizer step."""
        vars(self.trainer).pop("_liger_rl_step", None)

    def _agree(self) -> None:
        """The size of the windows and a refusal, equal on all ranks. A collective of all ranks."""
        trainer, measured = self.trainer, get_measurements(self.trainer)
        if find_wrapped(trainer.model) is None:  # on all ranks
            return
        # Without kept layers, too, a window takes what is free.
        share = get_settings().memory or DEFAULT_SHARE
        self.activation_tokens = (
            None if self.refusal is not None else _find_activation_tokens(trainer, self.model, measured, share)
        )
        size = UNMEASURED_SIZE if self.refusal is None else UNLIMITED
        if self.activation_tokens is not None:
            size = max(1, self.activation_tokens // measured.largest) if measured.largest else 1
        groups: list[Any] = [torch.distributed.group.WORLD] if trainer.accelerator.num_processes > 1 else []
        wanted = Agreement(window=size, refuses=self.refusal is not None)
        agreed = agree(groups, wanted, trainer.args.device)
        if agreed.refuses and self.refusal is None:
            self.refusal = ANOTHER_RANK
        if agreed.window != UNLIMITED:
            measured.size = agreed.window

    # --- micro-batches ------------------------------------------------------------------------------------------------

    def run_micro_batch(self, run_training_step: Callable[[], Any]) -> Any:
        """transformers' `training_step` of a micro-batch, which may wait for the next ones."""
        trainer = self.trainer
        with self.catching_calls():
            if not get_settings().whole_step or trainer.args.gradient_accumulation_steps == 1 or self.refusal:
                return run_training_step()
            compute_loss = functools.partial(self._compute_loss, trainer.compute_loss)
            try:
                with replaced(trainer, "compute_loss", compute_loss), self._measured_memory(), self._skipped_train():
                    loss = run_training_step()
                self._waiting, self._is_run = 0, False
                return loss
            except _Waits:
                self._waiting += 1
                return torch.zeros((), device=trainer.args.device)
            finally:
                self._finished = None

    def recover(self) -> None:
        """An error has ended the training step, and the trainer may stay: with it fall the micro-batches that wait."""
        self.drop_kept()
        if self._is_run and hasattr(self.trainer, "_step"):  # by which GRPO and RLOO take the next micro-batch
            self.trainer._step -= self._waiting
            self._waiting, self._is_run = 0, False

    def _compute_loss(self, compute_loss: Callable[..., Tensor], model: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of the micro-batches so far, or `_Waits`."""
        trainer, state = self.trainer, self._state_reader.read()
        if self.window is None:
            gradient_state = trainer.accelerator.gradient_state
            if self.redirect is not None:
                compute_loss = functools.partial(self._run_directly, compute_loss)
            self.window = Window(
                compute_loss, gradient_state, self._run_joined, self._shares_prompts, self._agree_to_join
            )
            self._first_state = state
        elif state != self._first_state:
            self._first_state, get_measurements(trainer).has_moved = state, True
            warn(
                trainer,
                f"{MOVED}: {self.window.added} micro-batches ran with a later state of the model than in TRL; from the "
                "next optimizer step on each has a forward of its own",
            )
        window, size = self.window, get_size(trainer)
        exchanges = size > 1 and get_settings().even_ranks and can_exchange(trainer.accelerator, model)
        exchanges = exchanges and not self._agrees
        # Another rank may wait with its collectives until the window ends.
        window.waits = (trainer.accelerator.num_processes > 1 and not self._agrees) or self.redirect is not None
        loss = window.add(model, *args, **kwargs)
        # On several ranks it waits, as their windows must end together.
        may_end = self.redirect is not None and trainer.accelerator.num_processes == 1
        ends_alone = may_end and loss is None and window.micro_batches[-1].is_alone
        # A loss is divided by the number of micro-batches of its epoch. Without a length of the data, the optimizer
        # step goes on in the next epoch.
        self._of_epoch += 1
        ends_epoch = self._of_epoch == getattr(trainer, "current_gradient_accumulation_steps", None)
        self._of_epoch = 0 if ends_epoch else self._of_epoch
        if not (trainer.accelerator.sync_gradients or window.added >= size or ends_alone or ends_epoch):
            if loss is None:
                raise _Waits
            return loss
        self._live_tokens, self._is_run = 0, True
        try:
            if exchanges:
                window.exchange(model, trainer.args.device, stays=self._kept is not None)
            if not window.micro_batches:
                return loss
            total = self._sum_losses(window)
        finally:
            self.window = None
        measured = get_measurements(trainer)
        self._finished, measured.largest = window, max([measured.largest, *window.tokens])
        return total if loss is None else total + loss

    def warn_of_waiting(self) -> None:
        """The optimizer step has ended."""
        if self.window is not None and self.window.micro_batches:
            number = len(self.window.micro_batches)
            warn(self.trainer, f"{number} micro-batches have not run: the training step of the last one ran no loss")

    def run_waiting(self) -> None:
        """The losses and metrics of the micro-batches that wait, without gradients. Nothing follows in their step."""
        if self.window is None or not self.window.micro_batches:
            return
        try:
            with torch.no_grad(), self.catching_calls(), self.trainer.compute_loss_context_manager():
                self._sum_losses(self.window)
        finally:
            self.window = None

    def _run_directly(self, compute_loss: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """A loss that runs the model where it calls it: `_sum_losses` is in the forward of the model's wrapper."""

        def run_method(wrapper: Any, model: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        with replaced(self.trainer, "_forward_redirection", run_method):
            return compute_loss(*args, **kwargs)

    def _sum_losses(self, window: Window) -> Tensor:
        if self.redirect is None:
            return window.sum_losses()
        model = self.trainer.accelerator.unwrap_model(self.model)
        return self.redirect(self.model, model, lambda _: window.sum_losses(), model)  # DDP expects an argument

    def _shares_prompts(self, call: dict[str, Any]) -> bool:
        wrapped = self.find_wrapped(self.model)
        assert wrapped is not None
        return can_share_prompts(wrapped, self.read_facts(wrapped), call)

    def _agree_to_join(self, can_join: bool) -> bool:
        """Whether a micro-batch's call can be one with others', in `_agrees` on all ranks."""
        if not self._agrees:
            return can_join
        wanted = Agreement(refuses=not can_join)
        return not agree([torch.distributed.group.WORLD], wanted, self.trainer.args.device).refuses

    @functools.cached_property
    def _agrees(self) -> bool:
        """Whether ranks ask each other before each call, a collective, because no micro-batch alone may wait.

        In a sharded model a rank with a forward for each would wait in it for one with a forward for all. DDP takes one
        graph of reentrant checkpoints for each backward.
        """
        wrapped = self.find_wrapped(self.model)
        if self.trainer.accelerator.num_processes == 1 or wrapped is None:
            return False
        facts = self.read_facts(wrapped)
        return facts.sharding is not None or facts.has_reentrant_checkpoints

    # --- calls of models ----------------------------------------------------------------------------------------------

    def catching_calls(self) -> AbstractContextManager[None]:
        """In this context the trainer's calls of its models are this step's. They may be caught already."""
        is_caught = is_compiled(self.trainer, self.model) or is_catching(self.call)
        return caught_calls([] if is_caught else self._models, self.call)

    def call(self, model: nn.Module, run_model: RunModel, inputs: dict[str, Any]) -> Any:
        """The output of a call of one of the trainer's models in a training step."""
        if not self.trainer.model.training:  # an evaluation
            return run_model(**inputs)
        run = functools.partial(self._run, model, run_model)
        if self.keeps_scores:
            return self._keep_scores(run, inputs)
        if self.window is not None and self.window.is_running:
            return self.window.call(run, inputs, self.idle_rows)
        enough = math.inf if self._kept is None or torch.is_grad_enabled() else self._kept.enough_tokens
        return self._run_with_kept(run, inputs, idle_rows=self.idle_rows, shapes=self.shapes, enough_tokens=enough)

    def _run_joined(
        self,
        run: RunModel,
        inputs: dict[str, Any],
        idle_rows: Tensor | None,
        shapes: Sequence[tuple[int, int]],
        is_more: bool,
    ) -> Any:
        with _without_synchronization(find_ddp(self.model) if is_more else None):
            return self._run_with_kept(
                run,
                inputs,
                idle_rows=idle_rows,
                shapes=shapes,
                activation_tokens=self.activation_tokens if shapes else None,
            )

    def _run_with_kept(self, run: RunModel, inputs: dict[str, Any], **options: Any) -> Any:
        """The output of a call. One with a graph takes what the scores have kept, which has one backward."""
        call, takes = ModelCall(**options), torch.is_grad_enabled() and self._kept is not None
        if takes:
            call.kept, self._kept = self._kept if self._state_reader.read() == self._kept_state else None, None
        output = run(call, **inputs)
        if takes and call.kept is not None:
            get_measurements(self.trainer).kept_failures = 0
        elif takes:
            self._count_failure("the loss is of other sequences, or of a model that has changed since")
        self._live_tokens = self._live_tokens or call.live_tokens
        return output

    def _keep_scores(self, run: RunModel, inputs: dict[str, Any]) -> Any:
        """The output of a call for scores, without a graph; the graph is kept."""
        share = min(get_settings().memory, MOST_MEMORY)
        activation_tokens = _find_activation_tokens(self.trainer, self.model, get_measurements(self.trainer), share)
        call, output = ModelCall(shapes=self.shapes, activation_tokens=activation_tokens, keeps=True), None
        before = _read_random_state(self.trainer.args.device)
        self.drop_kept()
        try:
            with torch.enable_grad(), self._with_checkpoints():
                output = run(call, **inputs)
        except torch.OutOfMemoryError:
            call.kept = None
        if output is None:  # behind the except clause, where the graph of the failed forward is free
            self._count_failure("memory ran out")
            return run(ModelCall(shapes=self.shapes), **inputs)
        if all(map(torch.equal, before, _read_random_state(self.trainer.args.device))):
            self._kept, self._kept_state = call.kept, self._state_reader.read()
        else:  # TRL's loss draws again
            self._count_failure("the model draws random numbers")
        return dataclasses.replace(
            output, **{name: x.detach() for name, x in vars(output).items() if isinstance(x, Tensor)}
        )

    def _count_failure(self, reason: str) -> None:
        get_measurements(self.trainer).kept_failures += 1
        log_once(self.trainer, ModelCall(), f"scores and loss have a forward each: {reason}")

    def drop_kept(self) -> None:
        """Free what the scores have kept."""
        self._kept = None

    @contextmanager
    def _with_checkpoints(self) -> Iterator[None]:
        """TRL turns checkpoints off for scores, which have no graph otherwise."""
        names = "gradient_checkpointing", "_gradient_checkpointing_func"
        before = [(vars(module), [vars(module)[name] for name in names]) for module in self._state_reader.checkpoints]
        for module, function in self._state_reader.checkpoints.items():
            vars(module).update(zip(names, (True, function), strict=True))
        try:
            yield
        finally:
            for attributes, values in before:
                attributes.update(zip(names, values, strict=True))

    @property
    def bounds_kept(self) -> bool:
        """Whether memory is measured. With one micro-batch only recomputed layers are."""
        is_measured = self._state_reader.checkpoints or self.trainer.args.gradient_accumulation_steps > 1
        return bool(is_measured) or self.trainer.args.device.type != "cuda"

    def find_wrapped(self, model: nn.Module) -> nn.Module | None:
        """The module inside one of the trainer's models whose forward is ours."""
        if id(model) not in self._wrapped:
            self._wrapped[id(model)] = find_wrapped(model)
        return self._wrapped[id(model)]

    def _run(self, model: nn.Module, run_model: RunModel, call: ModelCall, **inputs: Any) -> Any:
        if self.find_wrapped(model) is None:
            return run_model(**inputs)
        call.role, call.read_facts = self._find_role(model), self.read_facts
        output = run_model(**inputs, **{CALL: call})
        self.calls += call.records
        return output

    def _find_role(self, model: nn.Module) -> str:
        if model is getattr(self.trainer, "ref_model", None):
            return "reference"
        if model is getattr(self.trainer, "teacher_model", None):
            return "teacher"
        return "policy" if torch.is_grad_enabled() or not runs_as_reference(model) else "reference"

    def read_facts(self, model: nn.Module) -> Facts:
        """The facts of a model, which are asked once for each of its modes."""
        key = id(model), model.training
        if key not in self._facts:
            # A wrapper may put tokens of its own before each sequence.
            wrapper = next((outer for outer in self._models if self.find_wrapped(outer) is model), None)
            with self._with_checkpoints():
                self._facts[key] = read_facts(model, wrapper, joined_hooks=get_settings().joined_hooks)
        return self._facts[key]

    @contextmanager
    def _skipped_train(self) -> Iterator[None]:
        """The first `model.train()`, that of transformers' `training_step`, does nothing if it would change nothing.

        It visits each module. With LoRA that takes 7 ms, and no GPU works while micro-batches wait.
        """
        model, names = self.model, vars(self.model)
        if not (model in (self.trainer.model, find_ddp(model)) and self._state_reader.is_training(model)):
            yield
            return

        def train(mode: bool = True) -> nn.Module:
            del names["train"]  # the loss may call it, too
            return model if mode else model.train(mode)

        names["train"] = train
        try:
            yield
        finally:
            if names.get("train") is train:
                del names["train"]

    @contextmanager
    def _measured_memory(self) -> Iterator[None]:
        """Sets `token_bytes` of a training step on a GPU whose window runs in this context, if it is not known yet."""
        measured, device = get_measurements(self.trainer), self.trainer.args.device
        before = None if measured.token_bytes else read_memory(device, restart_peak=True)
        gradients = 0 if before is None else count_missing_gradients(self.model)
        yield
        if before is not None and self._finished is not None:
            memory = read_memory(device)
            assert memory is not None
            # Gradients stay, and do not grow with the number of tokens.
            peak = memory.peak - before.allocated - (gradients - count_missing_gradients(self.model))
            measured.token_bytes = max(peak, 1) / max(self._live_tokens, 1)


def _read_random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type != "cuda" else [*states, torch.cuda.get_rng_state(device)]


@contextmanager
def _without_synchronization(wrapper: Any) -> Iterator[None]:
    """DDP neither sends buffers in a forward, for which it would wait for the other ranks, nor expects a backward."""
    if wrapper is None:
        yield
        return
    sends_buffers = wrapper.require_forward_param_sync
    wrapper.require_forward_param_sync = False
    try:
        with wrapper.no_sync():
            yield
    finally:
        wrapper.require_forward_param_sync = sends_buffers


def find_step(trainer: Any) -> OptimizerStep | None:
    """The optimizer step whose training step runs, or that waits for micro-batches."""
    return vars(trainer).get("_liger_rl_step")


def runs_as_reference(model: nn.Module) -> bool:
    """Whether the model's adapters are off, or TRL's copy "ref" of them is active."""
    if "peft" not in sys.modules:
        return False
    layer: Any = next((module for module in model.modules() if hasattr(module, "_disable_adapters")), None)
    return layer is not None and (layer.disable_adapters or layer.active_adapters == ["ref"])


def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`transformers.Trainer.training_step`, of TRL's trainers as a part of an `OptimizerStep`."""
    if not (PATCH.patched and is_trl_trainer(self)) or "_liger_rl_in_step" in vars(self):
        return PATCH.pristine(self, *args, **kwargs)
    vars(self)["_liger_rl_in_step"] = True
    try:
        run = functools.partial(PATCH.original, self, *args, **kwargs)
        step = OptimizerStep.of(self, args[0] if args else kwargs["model"])
        try:
            return step.run_micro_batch(run)
        except BaseException:
            step.recover()
            raise
    finally:
        del vars(self)["_liger_rl_in_step"]


# Another package may have wrapped it.
PATCH = Patch("transformers.trainer:Trainer.training_step", training_step, None)


# --- the size of a window ---------------------------------------------------------------------------------------------


def get_size(trainer: Any) -> int:
    """How many micro-batches the trainer's windows have at most."""
    # Where there is a limit of tokens, the first windows have one micro-batch, to measure what it takes.
    has_limit = get_settings().max_tokens is not None or trainer.args.device.type == "cuda"
    return get_measurements(trainer).size or (1 if has_limit else UNMEASURED_SIZE)


def _find_activation_tokens(trainer: Any, model: nn.Module, measured: Measurements, share: float) -> int | None:
    """How many tokens a window may have that takes this share of the free memory, 1 if it is not known yet; None for
    any number."""
    settings = get_settings()
    memory = read_memory(trainer.args.device)
    if settings.max_tokens is not None or memory is None:
        return settings.max_tokens
    count = count_fitting_tokens(model, share)
    if count is None and measured.token_bytes:  # no layer is recomputed, or none has transformers' switch
        count = int(share * (memory.spare - count_missing_gradients(model)) / measured.token_bytes)
    return max(count or 1, 1)


# --- reasons against a window -----------------------------------------------------------------------------------------


def is_compiled(trainer: Any, model: nn.Module) -> bool:
    """Whether torch.compile compiles the model that the trainer calls."""
    return trainer.args.torch_compile or hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


def find_refusal(trainer: Any, model: nn.Module) -> Reason | None:
    """Why each micro-batch has a forward of its own; None if they have one together."""
    wrapped = find_wrapped(trainer.model)
    if wrapped is None:
        if trainer.is_deepspeed_enabled and "_forward_redirection" in vars(trainer):
            return Reason("DistillationTrainer's models run as in TRL under DeepSpeed")
        if any(kind.__module__ in FUSED_TRAINERS for kind in type(trainer).__mro__):
            return BUILT_BEFORE
        return Reason(f"{type(trainer).__name__} does not call TRL's fused head")
    known = find_known_refusal(wrapped)
    if known is not None:
        return known
    own = list_own_methods(trainer, METHODS)
    if own:  # what it does before a call would be done several times, what it does behind it not in between
        return Reason(f"{type(trainer).__name__} has a {own[0]} of its own")
    if PATCH.patched and not is_of(PATCH.original):
        return Reason("another package has a training_step in front of transformers'")
    between = find_own_code(trainer, wrapped)
    if between is not None:
        return between
    measured = get_measurements(trainer)
    if measured.has_moved:
        return MOVED
    if measured.run is trainer.state and measured.accumulation != trainer.args.gradient_accumulation_steps:
        return Reason("gradient_accumulation_steps has changed in this run")  # an optimizer step spans two fetches
    if getattr(getattr(trainer.model, "active_peft_config", None), "is_prompt_learning", False):
        return PROMPT_LEARNING
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
    modules = list(model.modules())
    reason = find_row_reader(model, modules, in_training=True, joined_hooks=get_settings().joined_hooks)
    return reason or find_known_row_reader(model, modules)
