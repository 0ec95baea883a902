"""TRL's experimental GKD, GOLD, SDFT and SDPO trainers without logits.

GKDTrainer and GOLDTrainer: `compute_loss` runs TRL's own, while both models' heads give up their hidden states in place
of logits. `generalized_jsd_loss`, which TRL's own calls, then makes the divergence from both hidden states.

SDFTTrainer and SDPOTrainer: `_forward_logits` returns `HiddenLogits`, and TRL's functions of logits take them.

Where a head cannot be taken apart, and wherever else logits are read, TRL's own code runs.
"""

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from threading import local
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_rl.call.options import HeadOptions
from liger_rl.divergence import linear_divergence
from liger_rl.engines.pair.run import DivergenceCall, in_one_pass_if_free, measure_of
from liger_rl.integrations.head import Head, Request, asking, checked_head, current_head, listen, probed_transform
from liger_rl.integrations.patching import Patch, parameters_of
from liger_rl.integrations.peft import base_model
from liger_rl.integrations.transformers import IGNORE_INDEX, is_swapped
from liger_rl.integrations.trl_batches import zero_3
from liger_rl.integrations.trl_step import tell
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import linear_logprobs
from liger_rl.topk import topk_divergence

SINCE = (1, 16)  # of TRL
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
        f"{names} logits_are_probs? num_items_in_batch", since=SINCE, needed=_importable,
    )  # fmt: skip
    step = Patch(f"{trainer}.compute_loss", compute_loss, since=SINCE, needed=_importable)
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
        for name in ("gkd", "gold", "sdft", "sdpo"):
            importlib.import_module(f"trl.experimental.{name}.{name}_trainer")
        return True
    return False


class HiddenLogits(NamedTuple):
    """Logits of tokens (B, T) that are not made."""

    hidden: Tensor  # (B, T, H)
    weight: Tensor
    bias: Tensor | None
    transform: LogitTransform
    autocast: Callable[[], AbstractContextManager]

    def sum(self) -> Tensor:
        """A number that depends on the model, as TRL's loss of no tokens does."""
        return self.hidden.sum()

    def made(self) -> Tensor:
        scale, cap = self.transform.scale, self.transform.softcap
        x = nn.functional.linear(self.hidden, self.weight, self.bias) * scale
        return (x if cap is None else cap * torch.tanh(x / cap)) / self.transform.temperature

    def logps(self, ids: Tensor) -> Tensor:
        with self.autocast():
            return linear_logprobs(self.hidden, self.weight, ids, bias=self.bias, transform=self.transform).logps


def selective_log_softmax(logits: Any, index: Tensor, *args: Any, **options: Any) -> Tensor:
    """TRL's. Its trainers of self-distillation ask for one id of each token, without options."""
    if isinstance(logits, HiddenLogits):
        assert not args
        assert not options
        return logits.logps(index)
    return SELECTIVE.original(logits, index, *args, **options)


def _without_logits(student: Any, teacher: Any) -> bool:
    return isinstance(student, HiddenLogits) and isinstance(teacher, HiddenLogits)


def _made(logits: Any) -> Tensor:
    return logits.made() if isinstance(logits, HiddenLogits) else logits


def _self_rows(package: str, trainer: str) -> tuple[Patch, Patch, Patch]:
    """The rows of a trainer of self-distillation, by its package and its class."""

    def _forward_logits(
        self: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int
    ) -> Tensor | HiddenLogits:
        inner = base_model(self.accelerator.unwrap_model(model))
        head, given = None if self.use_teacher_server else _head(self, inner), (input_ids, attention_mask)
        transform = _transforms.get(inner)
        if head is None or transform is None or head.adapters:
            return forward.original(self, model, *given, logits_to_keep)
        with asking(head.module, _no_logits) as request:
            forward.original(self, model, *given, logits_to_keep)
        assert request.hidden is not None
        weight, bias = head.linear.weight, head.bias()
        if not torch.is_grad_enabled():
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        hidden, transform = (
            request.hidden[:, :-1][:, -logits_to_keep:],
            replace(transform, temperature=self.temperature),
        )
        return HiddenLogits(hidden, weight, bias, transform, self.accelerator.autocast)

    def compute_topk_self_distillation_loss(
        student_logits: Any, teacher_logits: Any, *, distillation_topk: int, distillation_alpha: float,
        distillation_add_tail: bool,
    ) -> Tensor:  # fmt: skip
        if not _without_logits(student_logits, teacher_logits):
            return topk.original(
                _made(student_logits), _made(teacher_logits), distillation_topk=distillation_topk,
                distillation_alpha=distillation_alpha, distillation_add_tail=distillation_add_tail,
            )  # fmt: skip
        hidden, weight, bias, transform, autocast = student_logits
        with autocast():
            return topk_divergence(
                hidden, weight, None, teacher_logits.logps, lists="student", topk=distillation_topk, kind="jsd",
                beta=float(distillation_alpha), tail="bucket" if distillation_add_tail else "renormalized", bias=bias,
                transform=transform,
            ).divergence  # fmt: skip

    def compute_full_logit_self_distillation_loss(
        student_logits: Any, teacher_logits: Any, *, distillation_alpha: float
    ) -> Tensor:
        if not _without_logits(student_logits, teacher_logits):
            logits = _made(student_logits), _made(teacher_logits)
            return full.original(*logits, distillation_alpha=distillation_alpha)
        hidden, weight, bias, transform, autocast = student_logits
        teacher = teacher_logits
        with autocast():
            return linear_divergence(
                hidden, weight, teacher.hidden, teacher.weight, kind="jsd", beta=float(distillation_alpha), bias=bias,
                teacher_bias=teacher.bias, transform=transform, teacher_transform=teacher.transform,
            ).divergence  # fmt: skip

    def row(place: str, replacement: Any) -> Patch:
        return Patch(f"{package}.{place}", replacement, modules=(package,), since=SINCE, needed=_importable)

    forward = row(f"{package.rpartition('.')[2]}_trainer:{trainer}._forward_logits", _forward_logits)
    topk = row("loss_utils:compute_topk_self_distillation_loss", compute_topk_self_distillation_loss)
    full = row("loss_utils:compute_full_logit_self_distillation_loss", compute_full_logit_self_distillation_loss)
    return forward, topk, full


SELF = {"trl.experimental.sdft": "SDFTTrainer", "trl.experimental.sdpo": "SDPOTrainer"}
SELECTIVE = Patch(
    "trl.experimental.sdft.loss_utils:selective_log_softmax", selective_log_softmax,
    "logits index temperature? row_mask?",
    modules=tuple(SELF), since=SINCE, needed=_importable,
)  # fmt: skip
ROWS = (
    *_rows("trl.experimental.gkd.gkd_trainer:GKDTrainer"),
    *_rows("trl.experimental.gold.gold_trainer:GOLDTrainer"),
    SELECTIVE,
    *(row for package, trainer in SELF.items() for row in _self_rows(package, trainer)),
)
