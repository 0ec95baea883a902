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
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_rl.call.dtensors import is_dtensor
from liger_rl.integrations import trl_batches
from liger_rl.integrations.transformers import IGNORE_INDEX
from liger_rl.step.live_rows import MicroBatch, Plan, RowOptions, inputs_of, placed, planned
from liger_rl.step.model_body import Body, body_of, is_plain
from liger_rl.step.trials import after_trial, needs_trial

# Outputs of a value for each token.
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
ROWS = RowOptions(packing=False)

logger = logging.getLogger("liger_rl")
_told: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def on_live_tokens(fused_forward: Callable, wanted: Callable[[], bool]) -> Callable:
    """TRL's fused forward, which lays its batch out anew while `wanted()`."""

    @functools.wraps(fused_forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head and wanted() and not args and _is_text(kwargs):
            output = _run(functools.partial(fused_forward, self, fused_lm_head=True), self, **kwargs)
            if output is not None:
                return output
        return fused_forward(self, *args, fused_lm_head=fused_lm_head, **kwargs)

    return forward


def _is_text(kwargs: Mapping[str, Any]) -> bool:
    """Whether these are token ids with labels, and nothing else of single tokens."""
    ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
    if not (isinstance(ids, Tensor) and isinstance(labels, Tensor) and ids.dim() == 2 and ids.shape == labels.shape):
        return False
    return ids.numel() > 0 and all(is_plain(value) for name, value in kwargs.items() if name not in _COLUMNS)


_COLUMNS = ("input_ids", "attention_mask", "labels", "num_items_in_batch")


def _run(
    fused_forward: Callable,
    model: Any,
    *,
    input_ids: Tensor,  # (B, T)
    labels: Tensor,  # (B, T)
    num_items_in_batch: Any = None,
    **inputs: Any,
) -> Any:
    """TRL's output of the batch; None if the batch has to run as it is."""
    body = body_of(model, model, inputs, input_ids, None)
    if body.obstacle is not None or body.router or inputs.get("attention_mask") is None:
        return None
    mask = nn.functional.pad(labels[:, 1:] != IGNORE_INDEX, (1, 0))
    plan, body = _plan(fused_forward, model, input_ids, mask, inputs, body)
    if _told.get(model) != plan.layout.partition(";")[2]:
        _told[model] = plan.layout.partition(";")[2]
        logger.info("%s: %s", type(model).__name__, plan.layout)

    def run(micro: MicroBatch) -> Any:
        laid_out = inputs_of(micro, input_ids, mask, inputs, body)
        chosen = torch.where(laid_out.pop("counted"), laid_out["input_ids"], IGNORE_INDEX)
        return fused_forward(labels=chosen, **laid_out)

    with torch.no_grad():
        idle = [run(micro) for micro in plan.idle]
    outputs = [run(micro) for micro in plan.live] + idle
    source = placed([*plan.live, *plan.idle], input_ids.shape, labels.device)
    if source is None:
        return outputs[0]
    # The first token of a row has no prediction.
    flat = {name: [_flat(getattr(output, name)) for output in outputs] for name in PER_TOKEN}
    missing = ~mask[:, 1:]
    values = {name: None if parts[0] is None else _back(parts, source[:, 1:], missing) for name, parts in flat.items()}
    log_probs = values["log_probs"]
    assert log_probs is not None
    items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return type(outputs[0])(**{**outputs[0], **values, "loss": -log_probs.sum() / items})


def _flat(values: Tensor | None) -> Any:
    """(b, n - 1) -> (b n,), with 0 for the first token of each row."""
    return None if values is None else nn.functional.pad(values, (1, 0)).reshape(-1)


def _back(parts: list[Tensor], source: Tensor, missing: Tensor) -> Tensor:
    device = parts[0].device
    together = torch.cat([*parts, parts[0].new_zeros(1)])
    return together[source.to(device)].masked_fill(missing.to(device), 0)


def _plan(
    fused_forward: Callable, model: Any, ids: Tensor, mask: Tensor, inputs: dict[str, Any], body: Body
) -> tuple[Plan, Body]:
    # Every rank of a sharded model must run its layers equally often.
    sharded = _is_sharded(model)
    advantages = None
    if torch.is_grad_enabled() and not sharded:
        without = trl_batches.idle_rows()
        if without is not None and without.shape == ids.shape[:1]:
            advantages = (~without).to(ids.device)[:, None]

    def after(body: Body) -> Body:
        def run(tried: dict[str, Any]) -> Tensor:
            labels = torch.where(tried.pop("counted"), tried["input_ids"], IGNORE_INDEX)
            return nn.functional.pad(fused_forward(labels=labels, **tried).log_probs, (1, 0))

        return after_trial(run, model, body, ids.device, "trees", again=False)

    untried = body.no_tree is None and needs_trial(model, body, "trees")
    if body.no_tree is None and (sharded or not untried):
        body, untried = after(body), False
    plan = planned(ids, mask, inputs, body, ROWS, advantages=advantages, runs_idle=True, together=None)
    if plan.has_trees and untried:
        body = after(body)
        plan = planned(ids, mask, inputs, body, ROWS, advantages=advantages, runs_idle=True, together=None)
    return plan, body


def _is_sharded(model: nn.Module) -> bool:
    """FSDP2, FSDP1 or ZeRO-3."""
    return any(
        is_dtensor(parameter) or hasattr(parameter, "ds_id") or hasattr(parameter, "_is_flat_param")
        for parameter in model.parameters()
    ) or any("FullyShardedDataParallel" in type(module).__name__ for module in model.modules())
