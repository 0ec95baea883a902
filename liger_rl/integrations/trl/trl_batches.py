"""Micro-batches of TRL's GRPOTrainer and RLOOTrainer, so that the model runs the prompt of a group once.

Two methods are replaced. After TRL's shuffle and split, `_prepare_inputs` moves the completions of one prompt into one
micro-batch where it can. A sequence stays in its optimizer step, so the step's gradient is the same to rounding.
Metrics that TRL averages over micro-batches, such as the KL or a clip ratio, may change. `_compute_loss` records which
sequences have no gradient, for `get_idle_rows`.

TRL's order stays if the gradient of a sequence depends on the other sequences of its micro-batch: loss_type "bnpo" and
an entropy bonus (means over the micro-batch's tokens), top_entropy_quantile below 1 (the micro-batch's quantile), and
the auxiliary loss of a router. It also stays for batches with images, under ZeRO-3, and for a subclass with its own
loss or call of the model.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from liger_rl.integrations.patching import Patch

# Losses of GRPOTrainer that are sums over the sequences of an optimizer step, in any split into micro-batches.
SUMS_OVER_SEQUENCES = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")

whole_step = True  # False: the replaced methods do what TRL's do

_TrainerTest = Callable[[Any], bool]

_idle_rows: ContextVar[Tensor | None] = ContextVar("liger_rl_trl_idle_rows", default=None)


def get_idle_rows() -> Tensor | None:
    """(B,) bool, the sequences of the micro-batch whose log-probabilities and entropies have no gradient.

    None outside of `_compute_loss`, and if every sequence may have a gradient. The forward must still return the values
    of idle sequences, because metrics, the entropy quantile and ratios read them.
    """
    return _idle_rows.get()


def uses_zero_3(model: Any) -> bool:
    """Whether ZeRO-3 shards the parameters. It records the order in which a forward uses them."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def order_by_prompt(prompts: Sequence[bytes], size: int) -> list[int]:
    """An order of the sequences in which micro-batches of `size` keep equal prompts together.

    The largest group that fits into the current micro-batch comes next. If none fits, the largest group is split.
    """
    members: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(index)
    groups, order = list(members.values()), list[int]()
    while groups:
        room = size - len(order) % size
        group = max([group for group in groups if len(group) <= room] or groups, key=len)
        order += group[:room]
        del group[:room]
        groups = [group for group in groups if group]
    return order


def _regroup_batches(batches: list[dict[str, Any]], window: int) -> list[dict[str, Any]]:
    """Micro-batches of one generation, with equal prompts together. `window` successive ones are an optimizer step."""
    ids, mask = (torch.cat([batch[name] for batch in batches]) for name in ("prompt_ids", "prompt_mask"))
    prompts = [row.tobytes() for row in ids.masked_fill(mask == 0, -1).cpu().numpy()]  # the one copy to the host
    size = len(prompts) // len(batches)
    steps = range(0, len(prompts), window * size)
    order = [start + row for start in steps for row in order_by_prompt(prompts[start : start + window * size], size)]
    columns = {name: _reorder_column([batch[name] for batch in batches], order) for name in batches[0]}
    return importlib.import_module("trl.trainer.utils").split_tensor_dict(columns, len(batches))


def _reorder_column(parts: list[Any], order: list[int]) -> Any:
    """One column of all micro-batches in a new order. A scalar, which all sequences share, stays."""
    if parts[0] is None or getattr(parts[0], "ndim", 1) == 0:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)[torch.tensor(order)]
    values = [value for part in parts for value in part]
    return [values[row] for row in order]


def _grpo_is_a_sum(trainer: Any) -> bool:
    shares_tokens = trainer.top_entropy_quantile < 1.0 or trainer._entropy_bonus_enabled
    return trainer.loss_type in SUMS_OVER_SEQUENCES and not shares_tokens


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


def _make_patches(trainer: str, is_a_sum: _TrainerTest, has_other_gradients: _TrainerTest) -> tuple[Patch, Patch]:
    """The two patches of a trainer, "module:Class"."""

    def applies(self: Any) -> bool:
        """Whether the loss and its call of the model are TRL's, not a subclass's, and there is no router loss."""
        methods = (self.compute_loss, self._get_per_token_logps_and_entropies)
        is_trls = all(method.__module__ == loss.module for method in methods)
        is_trls = is_trls and getattr(self._compute_loss, "__func__", None) is _compute_loss
        return whole_step and is_trls and not self.aux_loss_enabled and not uses_zero_3(self.model)

    def _prepare_inputs(self: Any, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = prepare.original(self, generation_batch)
        batches, count = self._buffered_inputs, self.args.steps_per_generation
        # Within a generation an optimizer step begins at a multiple of this number of micro-batches.
        window = math.gcd(count, self.args.gradient_accumulation_steps)
        if batches is before or window == 1 or not (applies(self) and is_a_sum(self)):
            return inputs
        if not batches[0].keys().isdisjoint({"pixel_values", "num_images"}):
            return inputs
        self._buffered_inputs = _regroup_batches(batches, window)
        return self._buffered_inputs[self._step % count]

    def _compute_loss(self: Any, model: Any, inputs: Any) -> Any:
        token = _idle_rows.set(_find_idle_rows(inputs) if applies(self) and not has_other_gradients(self) else None)
        try:
            return loss.original(self, model, inputs)
        finally:
            _idle_rows.reset(token)

    prepare = Patch(f"{trainer}._prepare_inputs", _prepare_inputs)
    loss = Patch(f"{trainer}._compute_loss", _compute_loss)
    return prepare, loss


PATCHES = (
    *_make_patches("trl.trainer.grpo_trainer:GRPOTrainer", _grpo_is_a_sum, _grpo_has_other_gradients),
    # The loss of RLOO is a mean over sequences, and its KL is in the reward.
    *_make_patches("trl.trainer.rloo_trainer:RLOOTrainer", lambda trainer: True, lambda trainer: False),
)
