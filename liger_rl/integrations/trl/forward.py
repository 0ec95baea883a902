"""TRL's fused forward on live tokens only: no padding, no prefix twice, no graph of sequences without a gradient.

TRL's trainers call `model(input_ids, attention_mask, labels, fused_lm_head=True)` for the policy, the old policy and
the reference, and read values (B, T - 1) of the tokens with a label. `wrap_forward` wraps that forward in the three
functions of a step: `read_sequences`, `lay_out` and `run`, whose forward is TRL's own. Values are 0 where there is no
label.

A batch or a model that does not allow it runs as it is. The log "liger_rl" says why, at the level INFO.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from liger_rl.integrations.trl.call_record import find_role, record_call
from liger_rl.integrations.trl.settings import get_settings
from liger_rl.models.modules import walked_once
from liger_rl.models.swap import IGNORE_INDEX
from liger_rl.step.body import ACTIVATED_LORA, Body, find_sharding, has_activated_lora, has_router_loss, read_body
from liger_rl.step.layout import AS_IT_IS, Layout, LayoutOptions, count_padded_groups, lay_out
from liger_rl.step.memory import has_reentrant_checkpoints, run_with_kept_layers, without_idle_checkpoints
from liger_rl.step.ranks import agree_on_counts, agree_on_minimum, find_rank_groups
from liger_rl.step.reason import Reason
from liger_rl.step.router import compute_router_losses, recorded_router_calls
from liger_rl.step.run import Output, run
from liger_rl.step.sequences import Sequences, TokenBatch, read_sequences
from liger_rl.step.trial import apply_trial, needs_trial, tries_rows

# Outputs with a value for each token.
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
BUILT_BEFORE = Reason("the trainer was built before patch_trl()", "call patch_trl() before the trainer is built")
LAYOUT_OPTIONS = LayoutOptions(packing=False)

logger = logging.getLogger("liger_rl")
# The texts that were logged for each model, without their numbers.
_logged_texts: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
WRAPPED_MODELS: WeakSet[Any] = WeakSet()  # whose forward is one of `wrap_forward`


@dataclass(frozen=True)
class WindowCall:
    """What is known of a call of the model."""

    # (B,) bool, the sequences whose log-probabilities and entropies have no gradient; None if each may have one. Their
    # values are still read, by metrics, the entropy quantile and ratios.
    idle_rows: Tensor | None = None
    # (B, T) of each micro-batch whose sequences are in the call, below each other and padded on the right; as many on
    # all ranks. (): one micro-batch.
    shapes: tuple[tuple[int, int], ...] = ()
    max_tokens: int | None = None  # how many live tokens may keep activations; None: any number
    live_tokens: list[int] = field(default_factory=list)  # grows by those that a forward runs with a graph


_NO_WINDOW = WindowCall()
_window_call: ContextVar[WindowCall] = ContextVar("liger_rl_trl_window_call", default=_NO_WINDOW)
get_window_call = _window_call.get


@contextmanager
def set_window_call(call: WindowCall) -> Iterator[None]:
    """`get_window_call()` is `call` in this context."""
    token = _window_call.set(call)
    try:
        yield
    finally:
        _window_call.reset(token)


def wrap_forward(fused_forward: Callable, is_enabled: Callable[[], bool]) -> Callable:
    """TRL's fused forward, on live tokens only while `is_enabled()`."""

    @functools.wraps(fused_forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        # A compiled forward would be compiled again for each layout.
        if not (fused_lm_head and is_enabled()) or torch.compiler.is_compiling():
            return fused_forward(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        return _run_forward(functools.partial(fused_forward, self, fused_lm_head=True), self, *args, **kwargs)

    return forward


@walked_once()
def _run_forward(fused_forward: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    reason = find_unreadable(model, args, kwargs)
    if reason is None:
        return _run_live_tokens(fused_forward, model, **kwargs)
    log_once(model, f"{AS_IT_IS}: {reason}")
    return _run_as_it_is(fused_forward, model, AS_IT_IS, reason, *args, **kwargs)


def find_wrapped(model: nn.Module) -> nn.Module | None:
    """The module inside `model` whose fused forward is `wrap_forward`'s; None if there is none."""
    # Without `list_modules`: it is one of the first modules, and a trainer asks dozens of times in an optimizer step.
    return next((module for module in model.modules() if module in WRAPPED_MODELS), None)


def _count_padded_tokens(ids: Tensor) -> int:
    """How many tokens the forwards of TRL have, in place of which a call has `ids`, (B, T) or (B, T, H)."""
    shapes, (rows, width) = get_window_call().shapes, ids.shape[:2]
    is_joined = (rows, width) == (sum(b for b, _ in shapes), max((t for _, t in shapes), default=0))
    return sum(b * t for b, t in shapes) if is_joined else rows * width


def _run_as_it_is(
    fused_forward: Callable, model: Any, text: str, reason: Reason | None, *args: Any, **inputs: Any
) -> Any:
    """TRL's output of a batch. Micro-batches of different widths run apart, because padding would make them longer."""
    shapes, attention = get_window_call().shapes, inputs.get("attention_mask")
    ids = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
    padded = 0 if ids is None else _count_padded_tokens(ids)
    # A rank of a sharded model does not know whether the widths of another rank differ. Prompt tuning has no input_ids.
    runs_once = find_sharding(model) is not None or has_reentrant_checkpoints(model)
    runs_once = runs_once or inputs.get("input_ids") is None or len({width for _, width in shapes}) <= 1
    body_tokens = padded if ids is None or not runs_once else ids.shape[:2].numel()
    record_call(model, padded, body_tokens, text, reason)
    _note_live_tokens(body_tokens)
    if runs_once:
        with recorded_router_calls(_find_router(model, inputs) if shapes else None) as calls:
            output = fused_forward(*args, **inputs)
        if attention is None or not calls:
            return output
        cells = torch.arange(attention.numel()).view(attention.shape)
        return replace(output, aux_loss=compute_router_losses(calls, cells, attention, _list_sizes(len(attention))))
    width, row, outputs = inputs["input_ids"].shape[1], 0, []
    for rows, columns in shapes:
        index = slice(row, row := row + rows), slice(columns)
        outputs.append(
            fused_forward(**{n: x[index] if isinstance(x, Tensor) and x.dim() == 2 else x for n, x in inputs.items()})
        )

    def join(name: str) -> Tensor | None:
        values = [getattr(output, name) for output in outputs]
        if values[0] is None:
            return None
        return torch.cat(
            [nn.functional.pad(value, (0, width - columns)) for value, (_, columns) in zip(values, shapes, strict=True)]
        )

    aux_loss = None if outputs[0].aux_loss is None else torch.stack([output.aux_loss for output in outputs])
    return replace(outputs[0], **{name: join(name) for name in (*PER_TOKEN, "label_mask")}, aux_loss=aux_loss)


def _note_live_tokens(tokens: int) -> None:
    call = get_window_call()
    if call.shapes and torch.is_grad_enabled():
        call.live_tokens.append(tokens)


def _list_sizes(rows: int) -> list[int]:
    """The number of rows of each micro-batch in a call of so many rows."""
    sizes = [size for size, _ in get_window_call().shapes]
    return sizes if sum(sizes) == rows else [rows]  # the last call for scores may have fewer rows


def _find_router(model: Any, inputs: Mapping[str, Any]) -> ModuleType | None:
    """The Python module whose function TRL calls for every mixture of experts; None if TRL computes no router loss."""
    if not has_router_loss(model.config.get_text_config(), inputs):
        return None
    from transformers.models.mixtral import modeling_mixtral

    return modeling_mixtral


def log_once(model: Any, text: str) -> None:
    """Log a text once for each model and its role, on the main process; texts that differ in their numbers are one."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    role = find_role(model)
    text = f"{type(model).__name__}{'' if role is None else f' ({role})'}: {text}"
    texts, key = _logged_texts.setdefault(model, set()), re.sub(r"[\d,]+", "", text)
    if key not in texts:
        texts.add(key)
        logger.info(text)


def find_unreadable(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reason | None:
    """Why the arguments of a call cannot be read as a batch of text."""
    ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
    if args or not (isinstance(ids, Tensor) and isinstance(labels, Tensor)):
        return Reason("the call has no input_ids or no labels by name")
    if ids.dim() != 2 or ids.shape != labels.shape:
        return Reason("input_ids and labels are not both (B, T)")
    return ACTIVATED_LORA if has_activated_lora(model) else None


def _run_live_tokens(
    fused_forward: Callable,
    model: Any,
    *,
    input_ids: Tensor,  # (B, T)
    labels: Tensor,  # (B, T)
    num_items_in_batch: Any = None,
    **inputs: Any,
) -> Any:
    """TRL's output of the batch."""
    counted = labels[:, 1:] != IGNORE_INDEX
    batch = TokenBatch(input_ids, nn.functional.pad(counted, (1, 0)), inputs)
    layout, has_parts = _lay_out(fused_forward, model, batch, labels)
    if layout.live[0].cells is None:  # the batch as it is, whose labels may not be its ids
        log_once(model, layout.describe())
        inputs |= {"input_ids": input_ids, "labels": labels, "num_items_in_batch": num_items_in_batch}
        text = AS_IT_IS if layout.text == AS_IT_IS else "no prefix shared, no padding"
        return _run_as_it_is(fused_forward, model, text, layout.reason, **inputs)

    def run_rows(row_inputs: dict[str, Any]) -> Output:
        chosen = torch.where(row_inputs.pop("counted"), row_inputs["input_ids"], IGNORE_INDEX)
        with without_idle_checkpoints(model), recorded_router_calls(router) as calls:
            output = fused_forward(labels=chosen, **row_inputs)
        values = {name: value for name in PER_TOKEN if (value := getattr(output, name)) is not None}
        # The first token of a row has no prediction.
        values = {name: nn.functional.pad(value, (1, 0)) for name, value in values.items()}
        return Output(values, type(output), calls[0] if calls else None)

    clauses, router = [layout.describe()], _find_router(model, inputs)
    _note_live_tokens(layout.live_tokens)

    def run_with_graph(forward: Callable[[], Any], tokens: int) -> Any:
        if has_parts:
            clauses.append(f"{len(layout.live)} parts, each recomputed: more tokens than fit together")
            return forward()
        agree = _make_agreement(model, input_ids.device) if find_sharding(model) else None
        share = get_settings().memory
        outputs, clause = run_with_kept_layers(model, forward, tokens, share=share, agree=agree)
        clauses.extend([] if clause is None else [clause])
        return outputs

    outputs = run(layout, batch, run_rows, recomputes=has_parts, with_graph=run_with_graph)
    aux_loss = outputs.compute_router_losses(inputs.get("attention_mask"), _list_sizes(len(input_ids)))
    outputs = outputs.take((slice(None), slice(1, None)))
    log_once(model, "; ".join(clauses))
    text = "prompts once, no padding" if layout.has_trees else "no prefix shared, rows of similar length"
    tokens = sum(micro.tokens for micro in (*layout.live, *layout.idle))
    record_call(model, _count_padded_tokens(input_ids), tokens, "; ".join([text, *clauses[1:]]), layout.reason)
    values = {name: outputs.get(name) for name in PER_TOKEN}
    log_probs = values["log_probs"]
    assert log_probs is not None
    counted = counted.to(log_probs.device)
    items = counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -log_probs.sum() / items
    if aux_loss is not None and not get_window_call().shapes:
        aux_loss = aux_loss[0]
        loss = loss + getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
    # Of a window, one router loss for each micro-batch.
    return outputs.outputs[0].extra(loss=loss, **values, label_mask=counted, aux_loss=aux_loss)


def _make_agreement(model: nn.Module, device: torch.device) -> Callable[[int], int]:
    """The smallest number of all ranks that shard the model."""
    groups = find_rank_groups(model, None) or [torch.distributed.group.WORLD]  # FSDP1 has no DTensors
    return lambda number: agree_on_minimum(groups, number, device)


def _lay_out(fused_forward: Callable, model: Any, batch: TokenBatch, labels: Tensor) -> tuple[Layout, bool]:
    """The layout of a call, and whether its live micro-batches are parts that do not fit into memory together.

    A trial of trees runs before it if it has trees, and before all else in a sharded model.
    """
    obstacle = Reason("it has no attention_mask") if batch.inputs.get("attention_mask") is None else None
    body = read_body(model, model, batch.inputs, batch.ids, obstacle)
    is_sharded, device, call = find_sharding(model) is not None, batch.ids.device, get_window_call()
    if tries_rows(model):
        body = _apply_trial(fused_forward, model, device, body, "rows")
    needs_tree_trial = body.no_tree is None and needs_trial(model, body, "trees")
    # Every rank of a sharded model must run its layers equally often.
    if body.no_tree is None and (is_sharded or not needs_tree_trial):
        body, needs_tree_trial = _apply_trial(fused_forward, model, device, body, "trees"), False
    weights, idle = None, call.idle_rows
    if torch.is_grad_enabled() and not is_sharded and idle is not None and idle.shape == batch.ids.shape[:1]:
        weights = (~idle).to(device)[:, None]
    sequences = read_sequences(batch, body, weights=weights, labels=labels)
    padded_groups = 1
    if not (has_reentrant_checkpoints(model) or sequences.obstacle is not None):
        padded_groups = count_padded_groups(sequences, [rows for rows, _ in call.shapes])
    if is_sharded:
        return _lay_out_equally(model, device, sequences, body, padded_groups), False
    budget = math.inf if has_reentrant_checkpoints(model) else _find_budget(sequences)
    layout = _lay_out_within(budget, sequences, body, padded_groups)
    if layout.has_trees and needs_tree_trial:
        body = _apply_trial(fused_forward, model, device, body, "trees")
        layout = _lay_out_within(budget, sequences, body, padded_groups)
    return layout, layout.live_tokens > budget


def _lay_out_within(budget: float, sequences: Sequences, body: Body, padded_groups: int) -> Layout:
    """The layout of a batch, whose live micro-batches have at most so many tokens each if they have more together."""
    layout = lay_out(sequences, body, LAYOUT_OPTIONS, padded_groups=padded_groups)
    if layout.live_tokens <= budget:
        return layout
    return lay_out(sequences, body, replace(LAYOUT_OPTIONS, max_tokens=int(budget)))


def _find_budget(sequences: Sequences) -> float:
    """How many live tokens may keep activations: at least those of the largest micro-batch, as TRL would run it."""
    call, row, budget = get_window_call(), 0, math.inf
    is_window = len(call.shapes) > 1 and sequences.obstacle is None
    if call.max_tokens is not None and is_window and torch.is_grad_enabled():
        budget = call.max_tokens
        for rows, _ in call.shapes:
            longest = max((span.length for span in sequences.spans[row : row + rows]), default=0)
            budget, row = max(budget, rows * longest), row + rows
    return budget


def _lay_out_equally(model: Any, device: torch.device, sequences: Sequences, body: Body, padded_groups: int) -> Layout:
    """The layout of a rank of a sharded model: one micro-batch, or the same number of padded groups on each rank."""
    groups = find_rank_groups(model, None) if len(get_window_call().shapes) > 1 else []
    if groups:
        with agree_on_counts(groups, device) as counts:
            counts[0] = padded_groups
        most = counts[0]
        with agree_on_counts(groups, device) as counts:
            layout = lay_out(sequences, body, LAYOUT_OPTIONS, padded_groups=most)
            counts[0] = len(layout.live) != most
        if not counts[0]:
            return layout
    return lay_out(sequences, body, LAYOUT_OPTIONS)


def _apply_trial(fused_forward: Callable, model: Any, device: torch.device, body: Body, layout: str) -> Body:
    def run_row(inputs: dict[str, Any]) -> Tensor:
        labels = torch.where(inputs.pop("counted"), inputs["input_ids"], IGNORE_INDEX)
        with recorded_router_calls(_find_router(model, {})):
            return nn.functional.pad(fused_forward(labels=labels, **inputs).log_probs, (1, 0))

    return apply_trial(run_row, model, body, device, layout, again=False)
