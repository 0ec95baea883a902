"""TRL's fused forward on live tokens only: no padding, no prefix twice, no graph of sequences without a gradient.

TRL's trainers call `model(input_ids, attention_mask, labels, fused_lm_head=True)` for the policy, the old policy and
the reference, and read values (B, T - 1) of the tokens with a label. `on_live_tokens` wraps that forward:

1. `step.live_rows` lays the tokens out, as `policy_steps` does. Sequences that `trl_batches.idle_rows` names run
   without a graph.
2. TRL's own forward runs on that layout, once or, with idle sequences, twice.
3. Its outputs go back to the places of the padded batch, with 0 where no label is.

A batch or a model that does not allow it runs as it is; the log "liger_rl" says why, at the level INFO.
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
from liger_rl.step.live_rows import MicroBatch, Plan, RowOptions, inputs_of, placed, planned
from liger_rl.step.model_body import INVOCATIONS, Body, body_of, has_invocations, no_graph
from liger_rl.step.trials import after_trial, needs_trial

# Outputs of a value for each token.
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
ROWS = RowOptions(packing=False)

logger = logging.getLogger("liger_rl")
# The texts that were logged of each model, without their numbers.
_told: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def on_live_tokens(fused_forward: Callable, wanted: Callable[[], bool]) -> Callable:
    """TRL's fused forward, which lays its batch out anew while `wanted()`."""

    @functools.wraps(fused_forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        # A compiled forward would be compiled again for each layout.
        if fused_lm_head and wanted() and not torch.compiler.is_compiling():
            run = functools.partial(fused_forward, self, fused_lm_head=True)
            output = _refusal(self, args, kwargs) or _run(run, self, **kwargs)
            if not isinstance(output, str):
                return output
            tell(self, f"the batch as it is: {output}")
        return fused_forward(self, *args, fused_lm_head=fused_lm_head, **kwargs)

    return forward


def tell(model: Any, text: str) -> None:
    """Log a text once for each model; texts that differ in their numbers are one."""
    told, key = _told.setdefault(model, set()), re.sub(r"[\d,]+", "", text)
    if key not in told:
        told.add(key)
        logger.info("%s: %s", type(model).__name__, text)


def _refusal(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why `_run` cannot read the batch."""
    ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
    if args or not (isinstance(ids, Tensor) and isinstance(labels, Tensor)):
        return "the call has no input_ids or no labels by name"
    if ids.dim() != 2 or ids.shape != labels.shape:
        return "input_ids and labels are not both (B, T)"
    if has_invocations(model):
        return INVOCATIONS
    return "the model is sharded by ZeRO-3" if trl_batches.zero_3(model) else None


def _run(
    fused_forward: Callable,
    model: Any,
    *,
    input_ids: Tensor,  # (B, T)
    labels: Tensor,  # (B, T)
    num_items_in_batch: Any = None,
    **inputs: Any,
) -> Any:
    """TRL's output of the batch, or why the batch has to run as it is."""
    body = body_of(model, model, inputs, input_ids, None)
    sharded = _is_sharded(model)
    if sharded and body.no_tree is None:
        # Before this rank's batch is read: every rank of a sharded model must run its layers equally often.
        body = _after_trial(fused_forward, model, input_ids.device, body)
    if body.obstacle is not None:
        return body.obstacle
    if body.router:
        return "the router loss is of all tokens"
    if inputs.get("attention_mask") is None:
        return "it has no attention_mask"
    counted = labels[:, 1:] != IGNORE_INDEX
    if bool((counted & (labels != input_ids)[:, 1:]).any()):
        return "its labels are not its input_ids"
    mask = nn.functional.pad(counted, (1, 0))
    plan, body = _plan(fused_forward, model, input_ids, mask, inputs, body, sharded)
    tell(model, plan.layout)

    def run(micro: MicroBatch) -> Any:
        laid_out = inputs_of(micro, input_ids, mask, inputs, body)
        chosen = torch.where(laid_out.pop("counted"), laid_out["input_ids"], IGNORE_INDEX)
        return fused_forward(labels=chosen, **laid_out)

    with no_graph():
        idle = [run(micro) for micro in plan.idle]
    outputs = [run(micro) for micro in plan.live] + idle
    source = placed([*plan.live, *plan.idle], input_ids.shape, labels.device)
    values = {name: getattr(outputs[0], name) for name in PER_TOKEN}
    if source is not None:
        # The first token of a row has no prediction.
        flat = {name: [_flat(getattr(output, name)) for output in outputs] for name in PER_TOKEN}
        values = {
            name: None if parts[0] is None else _back(parts, source[:, 1:], ~counted) for name, parts in flat.items()
        }
    log_probs = values["log_probs"]
    counted = counted.to(log_probs.device)
    items = counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return type(outputs[0])(loss=-log_probs.sum() / items, **values, label_mask=counted)


def _flat(values: Tensor | None) -> Any:
    """(b, n - 1) -> (b n,), with 0 for the first token of each row."""
    return None if values is None else nn.functional.pad(values, (1, 0)).reshape(-1)


def _back(parts: list[Tensor], source: Tensor, missing: Tensor) -> Tensor:
    device = parts[0].device
    together = torch.cat([*parts, parts[0].new_zeros(1)])
    return together[source.to(device)].masked_fill(missing.to(device), 0)


def _after_trial(fused_forward: Callable, model: Any, device: torch.device, body: Body) -> Body:
    def run(tried: dict[str, Any]) -> Tensor:
        labels = torch.where(tried.pop("counted"), tried["input_ids"], IGNORE_INDEX)
        return nn.functional.pad(fused_forward(labels=labels, **tried).log_probs, (1, 0))

    return after_trial(run, model, body, device, "trees", again=False)


def _plan(
    fused_forward: Callable,
    model: Any,
    ids: Tensor,
    mask: Tensor,
    inputs: dict[str, Any],
    body: Body,
    sharded: bool,
) -> tuple[Plan, Body]:
    advantages = None
    if torch.is_grad_enabled() and not sharded:
        without = trl_batches.idle_rows()
        if without is not None and without.shape == ids.shape[:1]:
            advantages = (~without).to(ids.device)[:, None]
    known: dict[str, Any] = {"advantages": advantages, "runs_idle": True, "together": None}
    untried = body.no_tree is None and needs_trial(model, body, "trees")
    if body.no_tree is None and not untried:
        body = _after_trial(fused_forward, model, ids.device, body)
    plan = planned(ids, mask, inputs, body, ROWS, **known)
    if plan.has_trees and untried:
        body = _after_trial(fused_forward, model, ids.device, body)
        plan = planned(ids, mask, inputs, body, ROWS, **known)
    return plan, body


def _is_sharded(model: nn.Module) -> bool:
    """By FSDP2, FSDP1 or tensor parallelism."""
    return any(is_dtensor(parameter) for parameter in model.parameters()) or any(
        "FullyShardedDataParallel" in type(module).__name__ for module in model.modules()
    )
