"""One call for a training step of a HuggingFace policy: a batch in, the loss to call backward on and metrics out.

    loss = FusedLinearGRPOLoss("dapo", epsilon_high=0.28, beta=0.01)
    batch["old_per_token_logps"] = completion_logps(model, batch, loss)
    step = policy_step(model, batch, loss)
    step.loss.backward()

Every per-token column has the shape of `input_ids`: entry t belongs to token t, not to the position that predicts it.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_rl.grpo import FusedLinearGRPOLoss
from liger_rl.integrations.transformers import HEAD_OPTIONS, IGNORE_INDEX, router_loss, swap_lm_head, swapped_inside
from liger_rl.policy.batch import PolicyBatch
from liger_rl.policy.fused import evaluate
from liger_rl.policy.metrics import Metric

__all__ = ["PolicyStep", "completion_logps", "policy_step"]

POLICY_COLUMNS = tuple(field.name for field in fields(PolicyBatch))
PER_TOKEN = ("advantages", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_ratio")
# They would be computed a second time, or in another way than here.
RESERVED = ("labels", "shift_labels", "num_logits_to_keep", "logits_to_keep", "return_dict", "temperature")


class PolicyStep(NamedTuple):
    """A step's loss, and what to log of it."""

    loss: Tensor
    """() float32, to call backward on; with a mixture of experts' weighted router loss where the model returns one."""
    metrics: dict[str, Metric]
    """By name, without gradient; see `liger_rl.policy.metrics`."""
    per_token_logps: Tensor
    """(B, T) float32 in nats, without gradient; 0 outside the completions."""
    entropy: Tensor | None
    """(B, T) float32 in nats, without gradient; None unless the loss needs it."""


def policy_step(
    model: nn.Module, batch: Mapping[str, Any], loss: FusedLinearGRPOLoss, **model_inputs: Any
) -> PolicyStep:
    """The policy loss of one (micro-)batch, from token ids. Only positions that predict a completion token are
    projected on the vocabulary.

    With a support, log-probabilities and entropies are over the listed ids alone, and the share of completion tokens
    whose own id was not listed is the metric `missing_target`. `Support.take` gives a micro-batch its rows.

    Args:
        model: a HuggingFace causal LM or a `peft.PeftModel` of one, whose head is swapped at the first call
            (`swap_lm_head`); or anything that wraps one whose head has been swapped before (DDP, torch.compile).
        batch: by name,
            input_ids (B, T) integers, prompt and completion; completion_mask (B, T) bool or 0/1, the sampled tokens
            that count (never the first of a row, which nothing predicts); advantages (B,) or (B, T); if wanted
            old_per_token_logps, ref_per_token_logps, sampling_per_token_logps (B, T), importance_ratio (B,) or (B, T),
            num_items_in_batch, num_sequences, as in `PolicyBatch`; support, a `Support` of B T rows in the order of
            input_ids, whose row of a completion token holds the ids from which it was drawn; and what else the model's
            forward takes by name: attention_mask, position_ids, pixel_values, ... For a packed row, B = 1, with
            position_ids and `segments`.
        loss: the objective with its options. Its temperature divides the logits; softcap and scale are the model's.
        model_inputs: further arguments for the model that its signature does not name; see `swap_lm_head` for which.

    Raises:
        TypeError, ValueError: before the model runs, a column that is missing, unknown or does not fit, or a softcap
            or scale of the loss that is not the model's.
    """
    swapped = _swapped(model)
    inputs = _model_inputs(swapped, batch, model_inputs)
    _check_loss(loss, swapped)
    if loss.terms.kl.exact:
        raise ValueError(
            'kl_estimator must not be "exact" here, where the model\'s head returns log-probabilities; call the loss '
            "with hidden states and a reference"
        )
    if loss.passes == "one":
        raise ValueError('passes must be "auto" or "two" here, where the model\'s head returns log-probabilities')
    ids, mask = _tokens(batch)
    columns: dict[str, Any] = {name: batch.get(name) for name in POLICY_COLUMNS}
    packed = columns["segments"] is not None
    if packed:
        if ids.shape[0] != 1:
            raise ValueError(f"input_ids must be one packed row, (1, T), with segments, got {tuple(ids.shape)}")
        columns |= {name: columns[name].reshape(-1) for name in PER_TOKEN if isinstance(columns[name], Tensor)}
    columns["completion_mask"] = mask.reshape(-1) if packed else mask
    shape = columns["completion_mask"].shape
    given = loss.terms.check(PolicyBatch(**columns), shape, ids.device)

    output = _fused(model, ids, mask, loss, inputs, entropy=loss.terms.needs_entropy)
    logps = _aligned(output.per_token_logps, ids)
    entropy = None if output.entropy is None else _aligned(output.entropy, ids)
    prepared = loss.terms.prepared(given, torch.float32)
    total, metrics = evaluate(prepared, logps.reshape(shape), None if entropy is None else entropy.reshape(shape))
    if output.missing_target is not None and loss.terms.metrics != "none":
        metrics["missing_target"] = Metric(_aligned(output.missing_target, ids).sum().float(), count=mask.sum())
    if output.aux_loss is not None:
        total = total + router_loss(swapped, output.aux_loss).to(total.device)
    return PolicyStep(total, metrics, logps.detach(), None if entropy is None else entropy.detach())


@torch.no_grad()
def completion_logps(
    model: nn.Module, batch: Mapping[str, Any], loss: FusedLinearGRPOLoss, **model_inputs: Any
) -> Tensor:
    """(B, T) float32 log-probabilities in nats of the completion tokens, 0 elsewhere, without gradient.

    For old and reference log-probabilities, at the loss's temperature. Arguments and errors as for `policy_step`; of
    the batch only the completion_mask, the support and the model's inputs are read. The model stays in the mode that
    it is in.
    """
    swapped = _swapped(model)
    inputs = _model_inputs(swapped, batch, model_inputs)
    _check_loss(loss, swapped)
    ids, mask = _tokens(batch)
    return _aligned(_fused(model, ids, mask, loss, inputs, entropy=False).per_token_logps, ids)


def _fused(model: nn.Module, ids: Tensor, mask: Tensor, loss: FusedLinearGRPOLoss, inputs: dict, *, entropy: bool):
    return model(
        input_ids=ids,
        labels=torch.where(mask, ids, IGNORE_INDEX),
        fused=True,
        entropy=entropy,
        temperature=loss.transform.temperature,
        **{name: getattr(loss.options, name) for name in HEAD_OPTIONS if name != "weight_grad"},
        **inputs,
    )


def _aligned(values: Tensor, ids: Tensor) -> Tensor:
    """(B, T) like the token ids, on their device, without the virtual tokens that prompt tuning puts before them."""
    return values[:, -ids.shape[1] :].to(ids.device)


def _swapped(model: nn.Module) -> Any:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a causal LM of transformers, got {type(model).__name__}")
    swapped = swapped_inside(model)
    return swapped_inside(swap_lm_head(model)) if swapped is None else swapped


def _model_inputs(swapped: Any, batch: Mapping[str, Any], model_inputs: dict[str, Any]) -> dict[str, Any]:
    """What goes to the model beside the token ids; an unknown name would be swallowed by its **kwargs."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a mapping of columns by name, got {type(batch).__name__}")
    accepted = inspect.signature(swapped.forward).parameters
    known = {"input_ids", *POLICY_COLUMNS}
    others = {name for name in accepted if name not in RESERVED} | {"support"}  # which the fused call takes
    unknown = [name for name in batch if name not in known and name not in others]
    unknown += [name for name in model_inputs if name in known or name in RESERVED]
    if unknown:
        raise ValueError(
            f"batch has no column {', '.join(map(repr, unknown))}; it has input_ids, support, "
            f"{', '.join(POLICY_COLUMNS)} and what the forward of {type(swapped).__name__} takes beside labels and "
            "what follows the head"
        )
    inputs = {name: value for name, value in batch.items() if name not in known} | model_inputs
    if "use_cache" in accepted:
        inputs.setdefault("use_cache", False)
    return inputs


def _tokens(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """-> input_ids (B, T), and their completion_mask as bool, False in the first column."""
    for name in ("input_ids", "completion_mask"):
        if not isinstance(batch.get(name), Tensor):
            raise TypeError(f"{name} must be a tensor in the batch, got {type(batch.get(name)).__name__}")
    ids, mask = batch["input_ids"], batch["completion_mask"]
    if ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(f"input_ids must be (B, T) integers, got {tuple(ids.shape)} {ids.dtype}")
    if mask.shape != ids.shape or mask.device != ids.device:
        raise ValueError(
            f"completion_mask must be (B, T) = {tuple(ids.shape)} on {ids.device} from input_ids, "
            f"got {tuple(mask.shape)} on {mask.device}"
        )
    return ids, nn.functional.pad(mask[:, 1:] != 0, (1, 0))


def _check_loss(loss: Any, swapped: Any) -> None:
    if not isinstance(loss, FusedLinearGRPOLoss):
        raise TypeError(f"loss must be a FusedLinearGRPOLoss, got {type(loss).__name__}")
    own = swapped._fused_transform
    for name, unset in (("softcap", None), ("scale", 1.0)):
        given = getattr(loss.transform, name)
        if given not in (unset, getattr(own, name)):
            raise ValueError(
                f"{name} must be left out of the loss, the model's own is used: {getattr(own, name)} for "
                f"{type(swapped).__name__}, got {given}"
            )
