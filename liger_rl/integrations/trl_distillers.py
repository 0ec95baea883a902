"""TRL's experimental GKDTrainer and GOLDTrainer without logits.

Two methods of each are replaced. `compute_loss` runs TRL's own, while both models' heads give up their hidden states in
place of logits. `generalized_jsd_loss`, which TRL's own calls, then makes the divergence from both hidden states. Where
a head cannot be taken apart, and wherever logits are read, TRL's own methods run.
"""

import importlib
import warnings
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import local
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_rl.call.options import HeadOptions
from liger_rl.engines.pair.run import DivergenceCall, in_one_pass_if_free, measure_of
from liger_rl.integrations.head import Head, Request, asking, checked_head, current_head, listen, probed_transform
from liger_rl.integrations.patching import Patch, parameters_of
from liger_rl.integrations.peft import base_model
from liger_rl.integrations.transformers import IGNORE_INDEX, is_swapped
from liger_rl.integrations.trl_batches import zero_3
from liger_rl.integrations.trl_step import tell
from liger_rl.kernels.transform import LogitTransform

# Of each model that was tried: what it does to its logits; None if it must make them itself.
_transforms: WeakKeyDictionary[nn.Module, LogitTransform | None] = WeakKeyDictionary()


class Side(NamedTuple):
    """One model of a loss."""

    head: Head
    transform: LogitTransform
    request: Request


class _Pending(local):
    sides: "tuple[Side, Side, Any] | None" = None  # student, teacher and trainer of the loss that is computed now


_pending = _Pending()


def _head(trainer: Any, model: Any) -> Head | None:
    """The head of a model that need not make its logits. It is tried out at the first call."""
    try:
        if model not in _transforms:
            _transforms[model] = None
            if trainer.is_fsdp_enabled or zero_3(model) or trainer.args.n_gpu > 1 or is_swapped(model):
                raise ValueError("the model is sharded, or replicated by DataParallel, or has a fused head")
            if getattr(getattr(trainer.model, "active_peft_config", None), "is_prompt_learning", False):
                raise ValueError("the adapter puts tokens of its own before each row")
            head = checked_head(model)
            listen(head.module)
            _transforms[model] = probed_transform(model, head)
        return None if _transforms[model] is None else current_head(model, nn.Linear)
    except (AttributeError, TypeError, ValueError) as error:
        tell(model, f"full logits, as without the patch: {error}")
        return None


def _no_logits(hidden: Tensor) -> Tensor:
    return hidden.new_zeros(*hidden.shape[:-1], 0)


def _rows(trainer: str) -> tuple[Patch, Patch]:
    """The rows of a trainer, "module:Class"."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        models = [base_model(self.accelerator.unwrap_model(part)) for part in (model, self.teacher_model)]
        logits_are_read = return_outputs or getattr(self, "use_uld_loss", False) or models[0] is models[1]
        own = type(self).generalized_jsd_loss is not generalized_jsd_loss
        heads = [None] if logits_are_read or own else [_head(self, part) for part in models]
        if any(head is None or (head.adapters and head is not heads[0]) for head in heads):
            return step.original(self, model, inputs, return_outputs, num_items_in_batch)
        with ExitStack() as stack:
            sides = []
            for part, head in zip(models, heads, strict=True):
                transform = _transforms[part]
                assert head is not None
                assert transform is not None
                sides.append(Side(head, transform, stack.enter_context(asking(head.module, _no_logits))))
            _pending.sides = (sides[0], sides[1], self)
            try:
                return step.original(self, model, inputs, return_outputs, num_items_in_batch)
            finally:
                _pending.sides = None

    def generalized_jsd_loss(
        student_logits: Tensor, teacher_logits: Tensor, labels: Tensor | None = None, beta: float = 0.5,
        temperature: float = 1.0, reduction: str = "batchmean", num_items_in_batch: Any = None, **more: Any,
    ) -> Tensor:  # fmt: skip
        if _pending.sides is None:
            given = {"labels": labels, "beta": beta, "temperature": temperature, "reduction": reduction}
            return loss.original(student_logits, teacher_logits, **given, num_items_in_batch=num_items_in_batch, **more)
        assert labels is not None
        return _divergence(*_pending.sides, labels, beta, temperature, num_items_in_batch)

    names = parameters_of(generalized_jsd_loss).replace(" num_items_in_batch more", "")
    loss = Patch(
        f"{trainer}.generalized_jsd_loss", staticmethod(generalized_jsd_loss),
        f"{names} logits_are_probs? num_items_in_batch", needed=_importable,
    )  # fmt: skip
    step = Patch(f"{trainer}.compute_loss", compute_loss, needed=_importable)
    return step, loss


def _divergence(
    student: Side, teacher: Side, trainer: Any, labels: Tensor, beta: float, temperature: float, items: Any
) -> Tensor:
    """The sum of the divergences of the labels' tokens over `items`, or over their number."""
    counted = labels != IGNORE_INDEX
    hidden, teacher_hidden = (side.request.hidden[:, : labels.shape[1]] for side in (student, teacher))  # type: ignore[index]
    divisor = torch.as_tensor(counted.sum().clamp(min=1) if items is None else items, device=labels.device).float()
    with trainer.accelerator.autocast():
        call = DivergenceCall(
            hidden=hidden, weight=student.head.linear.weight, bias=student.head.bias(),
            low_rank=student.head.low_rank(hidden), teacher_hidden=teacher_hidden,
            teacher_weight=teacher.head.linear.weight, teacher_bias=teacher.head.bias(),
            teacher_transform=replace(teacher.transform, temperature=temperature), teacher_may_require_grad=True,
            measure=measure_of("jsd", beta), mask=counted,
            options=HeadOptions(transform=replace(student.transform, temperature=temperature)),
        )  # fmt: skip
        result, one_pass_loss = in_one_pass_if_free(call, 1.0 / divisor)
    loss = result.divergence.sum() / divisor
    return loss if one_pass_loss is None else loss + one_pass_loss


def _importable() -> bool:
    """Imports the trainers, without the warning that they are experimental: users of other trainers need none."""
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        for name in ("gkd", "gold"):
            importlib.import_module(f"trl.experimental.{name}.{name}_trainer")
        return True
    return False


ROWS = (
    *_rows("trl.experimental.gkd.gkd_trainer:GKDTrainer"),
    *_rows("trl.experimental.gold.gold_trainer:GOLDTrainer"),
)
