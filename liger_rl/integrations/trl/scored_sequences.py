"""What is particular to TRL's GRPOTrainer and RLOOTrainer, which train on sequences with advantages.

`_compute_loss` tells the trainer's `OptimizerStep` which sequences have no gradient. The log-probabilities of the old
policy and of the reference, which TRL computes without a graph in a loop, take as many micro-batches in one forward as
an optimizer step does. Where the sequences are those of the optimizer step, the forward of the old policy is that of
the training, too. None of it is done for a subclass with its own loss or calls of the model.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.integrations.patching import Patch
from liger_rl.integrations.trl.between import METHODS, list_own_methods
from liger_rl.integrations.trl.caught_calls import caught_calls
from liger_rl.integrations.trl.forward import CALL, ModelCall, find_wrapped
from liger_rl.integrations.trl.optimizer_step import (
    find_step,
    find_trained_row_reader,
    get_measurements,
    get_size,
    is_compiled,
    runs_as_reference,
)
from liger_rl.integrations.trl.settings import get_settings
from liger_rl.step.ranks import find_ddp

MOST_FAILURES = 2  # in a row, after which nothing is kept any more
OPTIONS = {"compute_entropy", "compute_aux_loss", "num_images", "num_tiles"}  # without a value for each token


def _grpo_has_other_gradients(trainer: Any) -> bool:
    """Whether the KL term has a gradient, or the entropy bonus, which an adaptive controller turns on and off."""
    bonus_is_on = not trainer.use_adaptive_entropy or trainer._last_world_entropy <= trainer.args.entropy_target
    return trainer.beta != 0.0 or (bonus_is_on and trainer.entropy_coef != 0.0)


def _find_idle_rows(inputs: dict[str, Any]) -> Tensor:
    """(B,) bool, rows without a gradient: every loss multiplies tokens by advantages, (B,) or (B, T), and by masks."""
    advantages = inputs["advantages"]
    live = (advantages if advantages.ndim > 1 else advantages[:, None]) != 0
    for name in {"completion_mask", "tool_mask"} & inputs.keys():
        live = live & (inputs[name] != 0)
    return ~live.any(-1)


def _make_patches(trainer: str, has_other_gradients: Callable[[Any], bool]) -> tuple[Patch, Patch]:
    """The two patches of a trainer, "module:Class"."""

    def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
        step = find_step(self)
        applies = step is not None and get_settings().whole_step and not step.own_methods
        if step is None or not applies or self.aux_loss_enabled or has_other_gradients(self):
            return loss.original(self, model, inputs)
        step.idle_rows = _find_idle_rows(inputs)
        try:
            return loss.original(self, model, inputs)
        finally:
            step.idle_rows = None

    def _get_per_token_logps_and_entropies(
        self: Any,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        def run(batch_size: int | None) -> Any:
            return logps.original(self, model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **options)

        # The loss has a graph, and a forward of its own.
        if batch_size is None or torch.is_grad_enabled() or not _may_join(self, model, options):
            return run(batch_size)
        shape, joined = (batch_size, input_ids.shape[1]), min(batch_size * get_size(self), len(input_ids))
        shapes = (shape,) * -(-joined // batch_size)
        keeps = joined == len(input_ids) and _may_keep_scores(self, model, joined)
        with _called_with(self, model, shapes, keeps):
            return run(joined)

    loss = Patch(f"{trainer}._compute_loss", _compute_loss)
    logps = Patch(f"{trainer}._get_per_token_logps_and_entropies", _get_per_token_logps_and_entropies, None)
    return loss, logps


def _may_join(trainer: Any, model: Any, options: dict[str, Any]) -> bool:
    """Whether several micro-batches of scores can be one forward."""
    step = find_step(trainer)
    if step is not None and step.refusal is not None:  # of any rank
        return False
    if not get_settings().whole_step or find_wrapped(trainer.model) is None or list_own_methods(trainer):
        return False
    has_images = any(options.get(name) is not None for name in options.keys() - OPTIONS)
    return not (has_images or is_compiled(trainer, model)) and find_trained_row_reader(trainer) is None


def _may_keep_scores(trainer: Any, model: Any, rows: int) -> bool:
    """Whether so many sequences are those that the optimizer step trains on, with the model that scores them."""
    step, args = find_step(trainer), trainer.args
    if step is None or model is not trainer.model or not model.training or torch.is_inference_mode_enabled():
        return False
    is_whole = rows == args.per_device_train_batch_size * args.gradient_accumulation_steps
    # `memory=0` is for as little as possible.
    is_cheap = get_settings().memory > 0 and step.bounds_kept and not any(map(_has_model, trainer.reward_funcs))
    is_whole_model = trainer.accelerator.num_processes == 1 or find_ddp(step.model) is not None
    is_whole_model = is_whole_model and not trainer.is_deepspeed_enabled
    is_plain = trainer.num_iterations == 1 and not trainer.aux_loss_enabled and not runs_as_reference(model)
    if not (is_whole and is_cheap and is_whole_model and is_plain):
        return False
    # A method of its own may give the training another model than the scores.
    return get_measurements(trainer).kept_failures < MOST_FAILURES and not list_own_methods(trainer, METHODS)


def _has_model(reward: Any) -> bool:
    """Whether a reward runs a model, as far as can be seen, which needs memory between the scores and the training."""
    function = inspect.unwrap(getattr(reward, "__func__", reward))
    owner = getattr(reward, "__self__", reward)
    held = [owner, *getattr(owner, "__dict__", {}).values()]
    if inspect.isfunction(function):
        held += [function.__globals__.get(name) for name in function.__code__.co_names]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty one
                held.append(cell.cell_contents)
    return any(isinstance(value, nn.Module) for value in held)


@contextmanager
def _called_with(trainer: Any, model: Any, shapes: Sequence[tuple[int, int]], keeps: bool) -> Iterator[None]:
    """Calls of the model in this context are for micro-batches of these shapes. `keeps`: for the training, too."""
    step = find_step(trainer)
    if step is not None:
        step.shapes, step.keeps_scores = shapes, keeps
        try:
            yield
        finally:
            step.shapes, step.keeps_scores = (), False
        return

    def call(_: Any, run_model: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        return run_model(**inputs, **{CALL: ModelCall(shapes=shapes)})

    with caught_calls([model], call):  # an evaluation
        yield


PATCHES = (
    *_make_patches("trl.trainer.grpo_trainer:GRPOTrainer", _grpo_has_other_gradients),
    # RLOO's KL is in the reward.
    *_make_patches("trl.trainer.rloo_trainer:RLOOTrainer", lambda trainer: False),
)
