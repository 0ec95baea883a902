"""TRL's fused forward on live tokens only: no padding, no prefix twice, no graph of sequences without a gradient.

TRL's trainers call `model(input_ids, attention_mask, labels, fused_lm_head=True)` for the policy, the old policy and
the reference, and read values (B, T - 1) of the tokens with a label. `wrap_forward` wraps that forward:

1. `step.live_rows` lays the tokens out, as `policy_steps` does. The rows of `trl_batches.get_idle_rows` run without a
   graph.
2. TRL's own forward runs on that layout: once, or twice with idle sequences.
3. Its outputs go back to (B, T - 1), with 0 where there is no label.

A batch or a model that does not allow it runs as it is. The log "liger_rl" says why, at the level INFO.
"""

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_rl.integrations.trl import trl_batches
from liger_rl.models.local_tensors import is_dtensor
from liger_rl.models.swap import IGNORE_INDEX
from liger_rl.step.live_rows import BatchPlan, LayoutOptions, MicroBatch, index_outputs, make_inputs, plan_batch
from liger_rl.step.model_body import ACTIVATED_LORA, ROUTER_LOSS, Body, has_activated_lora, no_graph, read_body
from liger_rl.step.reason import Reason
from liger_rl.step.trials import apply_trial, needs_trial

# Outputs with a value for each token.
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
LAYOUT_OPTIONS = LayoutOptions(packing=False)

logger = logging.getLogger("liger_rl")
# The texts that were logged for each model, without their numbers.
_logged_texts: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def wrap_forward(fused_forward: Callable, is_enabled: Callable[[], bool]) -> Callable:
    """TRL's fused forward, on live tokens only while `is_enabled()`."""

    @functools.wraps(fused_forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        # A compiled forward would be compiled again for each layout.
        if fused_lm_head and is_enabled() and not torch.compiler.is_compiling():
            run = functools.partial(fused_forward, self, fused_lm_head=True)
            body = _find_unreadable(self, args, kwargs) or _read_body(run, self, **kwargs)
            if isinstance(body, Body):
                return _run_live_tokens(run, self, body, **kwargs)
            log_once(self, f"the batch as it is: {body}")
        return fused_forward(self, *args, fused_lm_head=fused_lm_head, **kwargs)

    return forward


def log_once(model: Any, text: str) -> None:
    """Log a text once for each model; texts that differ in their numbers are one."""
    texts, key = _logged_texts.setdefault(model, set()), re.sub(r"[\d,]+", "", text)
    if key not in texts:
        texts.add(key)
        logger.info("%s: %s", type(model).__name__, text)


def _find_unreadable(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reason | None:
    """Why the arguments of a call cannot be read as a batch of text."""
    ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
    if args or not (isinstance(ids, Tensor) and isinstance(labels, Tensor)):
        return Reason("the call has no input_ids or no labels by name")
    if ids.dim() != 2 or ids.shape != labels.shape:
        return Reason("input_ids and labels are not both (B, T)")
    if has_activated_lora(model):
        return ACTIVATED_LORA
    return Reason("the model is sharded by ZeRO-3") if trl_batches.uses_zero_3(model) else None


def _read_body(
    fused_forward: Callable,
    model: Any,
    *,
    input_ids: Tensor,  # (B, T)
    labels: Tensor,  # (B, T)
    num_items_in_batch: Any = None,
    **inputs: Any,
) -> Body | Reason:
    """How the batch may be rearranged, or why it has to run as it is."""
    body = read_body(model, model, inputs, input_ids, None)
    if body.no_tree is None and _is_sharded(model):
        # Before this rank's batch is read: every rank of a sharded model must run its layers equally often.
        body = _apply_trial(fused_forward, model, input_ids.device, body)
    if body.obstacle is not None:
        return body.obstacle
    if body.has_router_loss:
        return ROUTER_LOSS
    if inputs.get("attention_mask") is None:
        return Reason("it has no attention_mask")
    if bool(((labels != IGNORE_INDEX) & (labels != input_ids))[:, 1:].any()):
        return Reason("its labels are not its input_ids")
    return body


def _run_live_tokens(
    fused_forward: Callable,
    model: Any,
    body: Body,
    *,
    input_ids: Tensor,  # (B, T)
    labels: Tensor,  # (B, T)
    num_items_in_batch: Any = None,
    **inputs: Any,
) -> Any:
    """TRL's output of the batch."""
    counted = labels[:, 1:] != IGNORE_INDEX
    mask = nn.functional.pad(counted, (1, 0))
    plan, body = _plan_batch(fused_forward, model, input_ids, mask, inputs, body)
    log_once(model, plan.describe())

    def run(micro: MicroBatch) -> Any:
        laid_out = make_inputs(micro, input_ids, mask, inputs, body)
        chosen = torch.where(laid_out.pop("counted"), laid_out["input_ids"], IGNORE_INDEX)
        return fused_forward(labels=chosen, **laid_out)

    with no_graph():
        idle = [run(micro) for micro in plan.idle]
    outputs = [run(micro) for micro in plan.live] + idle
    source = index_outputs([*plan.live, *plan.idle], input_ids.shape, labels.device)
    values = {name: getattr(outputs[0], name) for name in PER_TOKEN}
    if source is not None:
        for name in PER_TOKEN:
            if values[name] is not None:
                flat = [_flatten_tokens(getattr(output, name)) for output in outputs]
                values[name] = _gather_to_batch(flat, source[:, 1:], ~counted)
    log_probs = values["log_probs"]
    counted = counted.to(log_probs.device)
    items = counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return type(outputs[0])(loss=-log_probs.sum() / items, **values, label_mask=counted)


def _flatten_tokens(values: Tensor) -> Tensor:
    """(b, n - 1) -> (b n,), with 0 for the first token of each row, which has no prediction."""
    return nn.functional.pad(values, (1, 0)).reshape(-1)


def _gather_to_batch(outputs: list[Tensor], index: Tensor, missing: Tensor) -> Tensor:
    """Flat outputs -> (B, T - 1), by the index of `index_outputs`; 0 where `missing`."""
    device = outputs[0].device
    values = torch.cat([*outputs, outputs[0].new_zeros(1)])
    return values[index.to(device)].masked_fill(missing.to(device), 0)


def _apply_trial(fused_forward: Callable, model: Any, device: torch.device, body: Body) -> Body:
    def run(inputs: dict[str, Any]) -> Tensor:
        labels = torch.where(inputs.pop("counted"), inputs["input_ids"], IGNORE_INDEX)
        return nn.functional.pad(fused_forward(labels=labels, **inputs).log_probs, (1, 0))

    return apply_trial(run, model, body, device, "trees", again=False)


def _plan_batch(
    fused_forward: Callable,
    model: Any,
    ids: Tensor,
    mask: Tensor,
    inputs: dict[str, Any],
    body: Body,
) -> tuple[BatchPlan, Body]:
    """The plan, and the body after a trial of trees, which runs only if the plan has trees."""
    advantages = None
    if torch.is_grad_enabled() and not _is_sharded(model):
        idle = trl_batches.get_idle_rows()
        if idle is not None and idle.shape == ids.shape[:1]:
            advantages = (~idle).to(ids.device)[:, None]
    options: dict[str, Any] = {"advantages": advantages, "runs_idle": True, "one_micro_batch": None}
    needs_tree_trial = body.no_tree is None and needs_trial(model, body, "trees")
    if body.no_tree is None and not needs_tree_trial:
        body = _apply_trial(fused_forward, model, ids.device, body)
    plan = plan_batch(ids, mask, inputs, body, LAYOUT_OPTIONS, **options)
    if plan.has_trees and needs_tree_trial:
        body = _apply_trial(fused_forward, model, ids.device, body)
        plan = plan_batch(ids, mask, inputs, body, LAYOUT_OPTIONS, **options)
    return plan, body


def _is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2, FSDP1 or tensor parallelism shards the parameters."""
    return any(is_dtensor(parameter) for parameter in model.parameters()) or any(
        "FullyShardedDataParallel" in type(module).__name__ for module in model.modules()
    )
