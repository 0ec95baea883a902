"""What is particular to TRL's GRPOTrainer and RLOOTrainer, which train on sequences with advantages.

`_compute_loss` records which sequences have no gradient, in a `WindowCall`. The log-probabilities of the old policy
and of the reference, which TRL computes without a graph in a loop, take as many micro-batches in one forward as an
optimizer step does (`window`). Neither is done for a subclass with its own loss or calls of the model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_rl.integrations.patching import Patch
from liger_rl.integrations.trl import window
from liger_rl.integrations.trl.forward import WindowCall, find_wrapped, get_window_call, set_window_call
from liger_rl.integrations.trl.settings import get_settings

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

    def applies(self: Any) -> bool:
        return get_settings().whole_step and not (find_wrapped(self.model) is None or window.list_own_methods(self))

    def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
        knows_rows = applies(self) and not (self.aux_loss_enabled or has_other_gradients(self))
        with set_window_call(WindowCall(_find_idle_rows(inputs) if knows_rows else None)):
            return loss.original(self, model, inputs)

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
        has_images = any(options.get(name) is not None for name in options.keys() - OPTIONS)
        may_join = applies(self) and not (has_images or torch.is_grad_enabled())
        call = get_window_call()
        if batch_size is not None and may_join and window.find_trained_row_reader(self) is None:
            shape, size = (batch_size, input_ids.shape[1]), window.get_size(self)
            batch_size = int(min(batch_size * size, len(input_ids)))
            call = WindowCall(shapes=(shape,) * -(-batch_size // shape[0]))
        with set_window_call(call):
            return logps.original(self, model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **options)

    loss = Patch(f"{trainer}._compute_loss", _compute_loss)
    logps = Patch(f"{trainer}._get_per_token_logps_and_entropies", _get_per_token_logps_and_entropies, None)
    return loss, logps


PATCHES = (
    *_make_patches("trl.trainer.grpo_trainer:GRPOTrainer", _grpo_has_other_gradients),
    # RLOO's KL is in the reward.
    *_make_patches("trl.trainer.rloo_trainer:RLOOTrainer", lambda trainer: False),
)
