"""TRL's fused forward on live tokens only: no padding, no prefix twice, no graph of sequences without a gradient.

TRL's trainers call `model(input_ids, attention_mask, labels, fused_lm_head=True)` for the policy, the old policy and
the reference, and read values (B, T - 1) of the tokens with a label. `wrap_forward` puts `project` and a step's plan
in place of the forward behind this call. Values are 0 where there is no label. DistillationTrainer calls the body
alone, in whose place `run_body` gives the hidden states behind the same plan.

A batch or a model that does not allow it runs as it is. The log "liger_rl" says why, at the level INFO.
"""

import functools
import importlib
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from liger_rl.distributed import has_ranks
from liger_rl.integrations.trl import kept_scores
from liger_rl.integrations.trl.kept_scores import KeptScores
from liger_rl.integrations.trl.settings import get_settings
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.models.project import (
    IGNORE_INDEX,
    find_backbone,
    find_difference,
    get_hidden,
    project,
    project_labels,
    read_transform,
)
from liger_rl.models.router import compute_router_losses, find_router_loss, has_router_loss
from liger_rl.step.facts import ACTIVATED_LORA, PACKED_INPUTS, PROMPT_LEARNING, Facts, fit_facts, read_facts
from liger_rl.step.layout import AS_IT_IS
from liger_rl.step.memory import resume_measurement, run_with_kept_layers, without_idle_checkpoints
from liger_rl.step.ranks import Agreement, agree, find_rank_groups
from liger_rl.step.reason import Reason
from liger_rl.step.run import Output, Outputs, run
from liger_rl.step.sequences import TokenBatch
from liger_rl.step.step import Plan, StepInputs, count_enough_tokens, plan_step

# Outputs with a value for each token.
PER_TOKEN = ("log_probs", "entropy", *EXTRAS)
AS_TRL = "as TRL runs it"
CALL = "liger_rl_call"  # the keyword by which a `ModelCall` goes through the wrappers of a model

logger = logging.getLogger("liger_rl")
# The texts that were logged for each model, without their numbers.
_logged_texts: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
DISTILLED_MODELS: WeakSet[Any] = WeakSet()  # whose body TRL calls alone


@dataclass(frozen=True)
class CallRecord:
    """How one call of a model ran, in place of one or more of TRL's forwards."""

    role: str  # "policy", "reference" or "teacher"
    has_graph: bool
    padded_tokens: int  # that TRL's forwards run
    body_tokens: int  # that the model's body ran, padding included
    micro_batches: int  # that ran together in each forward
    text: str  # how it ran, a clause
    reason: Reason | None  # why the batch ran as it is, or why no prefix was shared


class ModelCall:
    """One call of a model: what its caller knows, and how it ran.

    No dataclass: FSDP copies these, and what a copy records is lost.
    """

    def __init__(
        self,
        role: str | None = None,  # as of `CallRecord`; None outside of training
        *,
        # (B,) bool, the sequences whose log-probabilities and entropies have no gradient; None if each may have one.
        # Their values are still read, by metrics, the entropy quantile and ratios.
        idle_rows: Tensor | None = None,
        # (B, T) of each micro-batch whose sequences are in the call, below each other and padded on the right; as many
        # on all ranks. (): one micro-batch.
        shapes: Sequence[tuple[int, int]] = (),
        activation_tokens: int | None = None,  # how many live tokens may keep activations; None: any number
        keeps: bool = False,  # of scores: whether `kept` will be what a training may take in place of a forward
        kept: KeptScores | None = None,  # of a training: what the scores have kept; None afterwards if it does not fit
        # Of a reference beside kept scores: theirs, by which both are laid out alike and may agree to the bit.
        enough_tokens: float = math.inf,
        read_facts: Callable[[nn.Module], Facts] = read_facts,
    ) -> None:
        self.role, self.idle_rows, self.shapes, self.activation_tokens = role, idle_rows, shapes, activation_tokens
        self.keeps, self.kept, self.enough_tokens, self.read_facts = keeps, kept, enough_tokens, read_facts
        self.records: list[CallRecord] = []
        self.live_tokens = 0  # that ran with a graph, of several micro-batches

    def record(
        self, ids: Tensor | None, body_tokens: int, text: str, reason: Reason | None, *, together: bool = True
    ) -> None:
        """`together`: whether the call's micro-batches ran in one forward."""
        padded = 0 if ids is None else self._count_padded_tokens(ids)
        number = max(len(self.shapes), 1) if together else 1
        if self.role is not None:
            self.records.append(
                CallRecord(self.role, torch.is_grad_enabled(), padded, body_tokens, number, text, reason)
            )

    def _count_padded_tokens(self, ids: Tensor) -> int:
        """How many tokens the forwards of TRL have, in place of which the call has `ids`, (B, T) or (B, T, H)."""
        rows, width = ids.shape[:2]
        is_joined = (rows, width) == (sum(b for b, _ in self.shapes), max((t for _, t in self.shapes), default=0))
        return sum(b * t for b, t in self.shapes) if is_joined else rows * width

    def list_sizes(self, rows: int) -> list[int]:
        """The number of rows of each micro-batch in a call of so many rows."""
        sizes = [size for size, _ in self.shapes]
        return sizes if sum(sizes) == rows else [rows]  # the last call for scores may have fewer rows


class FusedHead(NamedTuple):
    """The options of TRL's `add_fused_lm_head`, and the class of its outputs."""

    temperature: float
    in_float32: bool
    outputs: tuple[str, ...]
    first_column: int = 1  # whose values are returned, with those behind it

    def project(self, model: Any, inputs: dict[str, Any], labels: Tensor, *, shifted: bool = False) -> Output:
        """The values of all positions, entry t of labels[:, t]; `shifted`: which position t predicts, not t - 1."""
        values, output = (project if shifted else project_labels)(
            model, inputs, labels, transform=replace(read_transform(model), temperature=self.temperature),
            entropy="entropy" in self.outputs, extras=[name for name in EXTRAS if name in self.outputs],
            in_float32=self.in_float32, casts_weight=True,
        )  # fmt: skip
        named = {"log_probs": values.logps, "entropy": values.entropy}
        # TRL's statistics have no gradient.
        named |= {name: None if (x := getattr(values, name)) is None else x.detach() for name in EXTRAS}
        by_name = {name: value for name, value in named.items() if value is not None}
        return Output(by_name, getattr(output, "router_logits", None))


class NoHead(FusedHead):
    """The hidden states (B, T, H) from which the labels are predicted. Trials compare the head's log-probabilities."""

    def project(self, model: Any, inputs: dict[str, Any], labels: Tensor, *, shifted: bool = False) -> Output:
        hidden = get_hidden(find_backbone(model)(**inputs))
        return Output({"hidden": nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0))})


def run_body(model: Any, *, first_column: int, **inputs: Any) -> Tensor:
    """(B, T - first_column, H) the hidden states of a causal LM from which its labels (B, T) are predicted."""
    call = inputs.pop(CALL, None) or ModelCall()
    return _run_forward(model, NoHead(1.0, False, ("log_probs",), first_column), call, inputs)


# Of models with a forward of `wrap_forward`, after their first call: why each runs as TRL runs it, None if it does not.
_refusals: WeakKeyDictionary[Any, Reason | None] = WeakKeyDictionary()


def wrap_forward(fused_forward: Callable, head: FusedHead, is_enabled: Callable[[], bool]) -> Callable:
    """TRL's fused forward, `project` in its place while `is_enabled()`."""

    @functools.wraps(fused_forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        call = kwargs.pop(CALL, None) or ModelCall()
        # A compiled forward would be compiled again for each layout.
        if args or not (fused_lm_head and is_enabled()) or torch.compiler.is_compiling():
            return fused_forward(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        reason = _agree_on_refusal(self, call, functools.partial(fused_forward, self))
        if reason is not None:
            run_model = functools.partial(fused_forward, self, fused_lm_head=True)
            try:
                with torch.set_grad_enabled(torch.is_grad_enabled() and not call.keeps):
                    return _run_as_trl(run_model, call, reason, kwargs)
            except Exception:
                _refusals.pop(self, None)  # what it failed of, the comparison may have failed of
                raise
        if not get_settings().whole_step:
            return _run_as_it_is(self, head, ModelCall(), "", None, kwargs)
        return _run_forward(self, head, call, kwargs)

    # `find_wrapped` reads it, and accelerate's wrappers take it over.
    forward.is_live = True  # type: ignore[attr-defined]

    return forward


def _agree_on_refusal(model: Any, call: ModelCall, plain_forward: Callable[..., Any]) -> Reason | None:
    """Why a model runs as TRL runs it. Its first call compares it, on all ranks that shard it."""
    if model not in _refusals:
        difference, facts = find_difference(model, plain_forward), call.read_facts(model)
        groups = [] if facts.sharding is None else find_rank_groups(model, None)
        agreed = agree(groups, Agreement(refuses=difference is not None), facts.device)
        if difference is None and agreed.refuses:
            difference = "another rank has a reason"
        _refusals[model] = None if difference is None else Reason(difference)
        if difference is not None:
            log_once(model, call, f"as TRL runs it: {difference}")
    return _refusals[model]


def find_known_refusal(model: nn.Module) -> Reason | None:
    """Why a model with our forward runs as TRL runs it, as far as its first call has shown."""
    return _refusals.get(model)


def _run_as_trl(run_model: Callable[..., Any], call: ModelCall, reason: Reason, kwargs: dict[str, Any]) -> Any:
    """TRL's own output, of each micro-batch alone."""
    ids = kwargs.get("input_ids")
    if ids is None or len(call.list_sizes(len(ids))) <= 1:
        call.record(ids, 0 if ids is None else ids.numel(), AS_TRL, reason)
        return run_model(**kwargs)
    call.record(ids, sum(rows * columns for rows, columns in call.shapes), AS_TRL, reason, together=False)
    outputs, row, width = [], 0, ids.shape[1]
    for number, (rows, columns) in enumerate(call.shapes):
        outputs.append(run_model(**_take_part(kwargs, number, (slice(row, row + rows), slice(columns)))))
        row += rows
    if torch.is_grad_enabled():
        call.live_tokens += sum(rows * columns for rows, columns in call.shapes)
    joined = {}
    for name in (*PER_TOKEN, "label_mask"):
        if getattr(outputs[0], name) is not None:
            joined[name] = torch.cat([_pad_columns(getattr(output, name), width - 1) for output in outputs])
    aux_loss = None if outputs[0].aux_loss is None else torch.stack([output.aux_loss for output in outputs])
    return replace(outputs[0], **joined, aux_loss=aux_loss)


def _take_part(inputs: Mapping[str, Any], number: int, place: tuple[slice, slice]) -> dict[str, Any]:
    """The inputs of one micro-batch of a joined call, in which a list has a value for each of them."""
    values = {name: x[number] if isinstance(x, list) else x for name, x in inputs.items()}
    columns = {name: x[place] for name, x in inputs.items() if isinstance(x, Tensor) and x.dim() == 2}
    return values | columns


def find_wrapped(model: nn.Module) -> nn.Module | None:
    """The module inside `model` that this package's forward or `run_body` serves; None if there is none."""
    return next((module for module in model.modules() if _is_wrapped(module)), None)


def _is_wrapped(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    while forward is not None:  # accelerate wraps it once more
        if getattr(forward, "is_live", False):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return module in DISTILLED_MODELS


def log_once(model: Any, call: ModelCall, text: str) -> None:
    """Log a text once for each model and its role, on the main process; texts that differ in their numbers are one."""
    if has_ranks() and torch.distributed.get_rank():
        return
    text = f"{type(model).__name__}{'' if call.role is None else f' ({call.role})'}: {text}"
    texts, key = _logged_texts.setdefault(model, set()), re.sub(r"[\d,]+", "", text)
    if key not in texts:
        texts.add(key)
        logger.info(text)


def find_unreadable(facts: Facts, kwargs: Mapping[str, Any]) -> Reason | None:
    """Why the arguments of a call cannot be read as a batch of text."""
    ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
    if facts.obstacle is PROMPT_LEARNING:
        return facts.obstacle
    if not (isinstance(ids, Tensor) and isinstance(labels, Tensor)):
        return Reason("the call has no input_ids or no labels by name")
    if ids.dim() != 2 or ids.shape != labels.shape:
        return Reason("input_ids and labels are not both (B, T)")
    return ACTIVATED_LORA if facts.has_activated_lora else None


# --- live tokens ------------------------------------------------------------------------------------------------------


def _run_forward(model: Any, head: FusedHead, call: ModelCall, kwargs: dict[str, Any]) -> Any:
    """TRL's output of the batch."""
    reason = find_unreadable(call.read_facts(model), kwargs)
    inputs = {name: x for name, x in kwargs.items() if name not in ("input_ids", "labels", "num_items_in_batch")}
    if reason is None:
        ids, labels = kwargs["input_ids"], kwargs["labels"]
        counted = labels[:, 1:] != IGNORE_INDEX
        batch = TokenBatch(ids, nn.functional.pad(counted, (1, 0)), inputs)
    else:  # another rank of a sharded model may have a batch that can be read, and all ranks agree
        labels = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        batch = TokenBatch(labels, labels != 0, {})
    if call.kept is not None and not call.keeps:
        outputs = None if reason is not None else call.kept.take(batch, call.idle_rows)
        if outputs is not None:
            call.live_tokens += call.kept.live_tokens
            resume_measurement(model, call.kept.live_tokens)
            call.record(batch.ids, 0, f"{call.kept.text}; scores and loss in one forward", call.kept.reason)
            return _make_token_output(model, head, call, outputs, kwargs.get("num_items_in_batch"), None)
        call.kept = None  # its memory is free for the forward
    plan = _plan(model, head, call, batch, labels, reason)
    layout = plan.layout
    if call.keeps and (layout.live[0].flat_index is None or plan.in_parts or not _may_keep(layout.facts)):
        call.keeps = False
        with torch.no_grad():
            return _run_forward(model, head, call, kwargs)
    if layout.live[0].flat_index is None:  # the batch as it is, whose labels may not be its ids
        log_once(model, call, layout.describe())
        text = AS_IT_IS if layout.text == AS_IT_IS else "no prefix shared, no padding"
        return _run_as_it_is(model, head, call, text, layout.reason, kwargs)
    return _run_live_tokens(model, head, call, plan, batch, kwargs.get("num_items_in_batch"))


def _plan(
    model: Any, head: FusedHead, call: ModelCall, batch: TokenBatch, labels: Tensor, unreadable: Reason | None
) -> Plan:
    def run_rows(inputs: dict[str, Any]) -> Tensor:
        return _run_rows(model, FusedHead(*head), inputs).values["log_probs"]

    def prepare() -> StepInputs:
        # Several rows without a mask are those of a user's own collator, whose attention may not know packed rows.
        facts = fit_facts(known, batch.inputs, batch.ids, may_be_packed=len(batch.ids) == 1 or bool(call.shapes))
        obstacle = unreadable or facts.obstacle
        if obstacle is None and batch.inputs.get("attention_mask") is None and facts.packed is None:
            obstacle = Reason("it has no attention_mask")
        weights, idle = None, call.idle_rows
        if idle is not None and torch.is_grad_enabled() and facts.sharding is None and len(idle) == len(batch.ids):
            weights = (~idle).to(batch.ids.device)[:, None]
        return StepInputs(
            model=model, wrapper=model, facts=replace(facts, obstacle=obstacle), batch=batch, run_rows=run_rows,
            weights=weights, labels=labels, share=get_settings().memory, shapes=call.shapes,
            activation_tokens=call.activation_tokens if torch.is_grad_enabled() else None,
            enough_tokens=call.enough_tokens,
        )  # fmt: skip

    known = call.read_facts(model)
    if call.keeps:
        call.enough_tokens = count_enough_tokens(known)
    groups = [] if known.sharding is None else find_rank_groups(model, None)
    return plan_step(prepare, groups, batch.ids.device)


def _run_rows(model: Any, head: FusedHead, inputs: dict[str, Any]) -> Output:
    """The values of rows, whose counted tokens are targets."""
    inputs = {"use_cache": False, **inputs}
    labels = torch.where(inputs.pop("counted"), inputs["input_ids"], IGNORE_INDEX)
    with without_idle_checkpoints(model):
        return head.project(model, inputs, labels)


def _run_live_tokens(
    model: Any, head: FusedHead, call: ModelCall, plan: Plan, batch: TokenBatch, num_items_in_batch: Any
) -> Any:
    layout, router = plan.layout, None
    batch = batch._replace(inputs={name: x for name, x in batch.inputs.items() if name not in PACKED_INPUTS})
    clauses = [layout.describe()]
    if layout.facts.has_router_loss:
        router = find_router_loss(model, _get_router_module())
        batch = batch._replace(inputs={**batch.inputs, "output_router_logits": True})
    if call.shapes and torch.is_grad_enabled():
        call.live_tokens += layout.live_tokens

    def run_with_graph(forward: Callable[[], Any], tokens: int) -> Any:
        if plan.in_parts:
            clauses.append(f"{len(layout.live)} parts, each recomputed: more tokens than fit together")
            return forward()
        share = min(get_settings().memory, kept_scores.MOST_MEMORY if call.keeps else 1.0)
        outputs, clause = run_with_kept_layers(model, forward, tokens, share=share, agreed=plan.kept_layers)
        clauses.extend([] if clause is None else [clause])
        return outputs

    run_rows = functools.partial(_run_rows, model, head)
    outputs = run(layout, batch, run_rows, recomputes=plan.in_parts, with_graph=run_with_graph)
    sizes = call.list_sizes(len(batch.ids))
    aux_loss = outputs.compute_router_losses(router, batch.inputs.get("attention_mask"), sizes)
    log_once(model, call, "; ".join(clauses))
    text = "prompts once, no padding" if layout.has_trees else "no prefix shared, rows of similar length"
    text = "; ".join([text, *clauses[1:]])
    call.record(batch.ids, sum(micro.tokens for micro in (*layout.live, *layout.idle)), text, layout.reason)
    if call.keeps:
        call.kept = KeptScores(outputs, layout, batch, text, call.enough_tokens)
    return _make_token_output(model, head, call, outputs, num_items_in_batch, aux_loss)


def _make_token_output(
    model: Any, head: FusedHead, call: ModelCall, outputs: Outputs, num_items_in_batch: Any, aux_loss: Tensor | None
) -> Any:
    outputs = outputs.take((slice(None), slice(head.first_column, None)))
    values = {name: outputs.get(name) for name in outputs.outputs[0].values}
    return _make_output(model, call, values, outputs.mask, num_items_in_batch, aux_loss)


def _may_keep(facts: Facts) -> bool:
    """Whether scores may have a graph: a router's loss is not among them, and nothing gathers weights meanwhile."""
    return facts.sharding is None and not (facts.has_router_loss or facts.has_reentrant_checkpoints)


# --- the batch as it is -----------------------------------------------------------------------------------------------


def _run_as_it_is(
    model: Any, head: FusedHead, call: ModelCall, text: str, reason: Reason | None, kwargs: dict[str, Any]
) -> Any:
    """TRL's output of a batch. Micro-batches of different widths run apart, because padding would make them longer."""
    kwargs = dict(kwargs)
    items, shift_labels = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
    labels = kwargs.pop("labels", None)
    shifted = shift_labels is not None
    targets = shift_labels if shifted else labels
    kwargs["use_cache"] = False
    router = None
    if has_router_loss(model.config.get_text_config(), kwargs):
        kwargs["output_router_logits"], router = True, find_router_loss(model, _get_router_module())
    ids = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    parts = _list_parts(model, call, kwargs)
    body_tokens = sum(rows * columns for rows, columns in parts)
    if not parts and ids is not None:
        body_tokens = ids.shape[:2].numel()
    call.record(ids, body_tokens, text, reason, together=not parts)
    if call.shapes and torch.is_grad_enabled():
        call.live_tokens += body_tokens
    row, width, outputs = 0, targets.shape[1], []
    for number, (rows, columns) in enumerate(parts or [targets.shape]):
        place = slice(row, row + rows), slice(columns)
        inputs = _take_part(kwargs, number, place) if parts else kwargs
        outputs.append(head.project(model, inputs, targets[place], shifted=shifted))
        row += rows
    values = {name: torch.cat([_pad_columns(x.values[name], width) for x in outputs]) for name in outputs[0].values}
    aux_loss = None
    if router is not None:
        aux_loss = _compute_aux_loss(router, outputs, parts or [targets.shape], call, kwargs.get("attention_mask"))
    mask = targets != IGNORE_INDEX
    if not shifted:
        values, mask = {name: x[:, head.first_column :] for name, x in values.items()}, mask[:, head.first_column :]
    return _make_output(model, call, values, mask, items, aux_loss)


def _pad_columns(values: Tensor, width: int) -> Tensor:
    """(B, T) or (B, T, H) -> (B, width) or (B, width, H)"""
    return nn.functional.pad(values, (*[0, 0] * (values.dim() - 2), 0, width - values.shape[1]))


def _list_parts(model: nn.Module, call: ModelCall, inputs: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Rows and columns of the micro-batches that run apart; empty if the call runs at once."""
    if inputs.get("attention_mask") is None and inputs.get("position_ids") is not None:
        return list(call.shapes)  # packed rows, on all ranks
    if inputs.get("input_ids") is None or len({width for _, width in call.shapes}) <= 1:
        return []  # prompt tuning has no input_ids
    # A rank of a sharded model does not know whether the widths of another rank differ.
    facts = call.read_facts(model)
    return [] if facts.sharding is not None or facts.has_reentrant_checkpoints else list(call.shapes)


def _compute_aux_loss(
    router: Any, outputs: list[Output], parts: Sequence[tuple[int, int]], call: ModelCall, attention: Tensor | None
) -> Tensor:
    """(M,) the router loss of each micro-batch."""
    if not call.shapes and outputs[0].router is not None:
        return router.compute(outputs[0].router, attention)[None]
    logits = [output.router for output in outputs if output.router is not None]
    rows, width = sum(rows for rows, _ in parts), max(columns for _, columns in parts)
    source = torch.full((rows, width), sum(rows * columns for rows, columns in parts))
    row = base = 0
    for number, columns in parts:
        source[row : row + number, :columns] = base + torch.arange(number * columns).view(number, columns)
        row, base = row + number, base + number * columns
    return compute_router_losses(router, logits, source, attention, call.list_sizes(rows))


def _get_router_module() -> ModuleType:
    """The Python module whose function TRL calls for every mixture of experts."""
    from transformers.models.mixtral import modeling_mixtral

    return modeling_mixtral


def _make_output(
    model: Any,
    call: ModelCall,
    values: Mapping[str, Tensor | None],  # (B, T - 1), or the hidden states alone
    mask: Tensor,  # (B, T - 1) bool
    num_items_in_batch: Any,
    aux_loss: Tensor | None,  # (M,)
) -> Any:
    if "hidden" in values:
        return values["hidden"]
    log_probs = values["log_probs"]
    assert log_probs is not None
    mask = mask.to(log_probs.device)
    items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -log_probs.sum() / items
    if aux_loss is not None and not call.shapes:
        aux_loss = aux_loss[0]
        loss = loss + getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
    # Of a window, one router loss for each micro-batch.
    utils: Any = importlib.import_module("trl.trainer.utils")
    per_token = {name: values.get(name) for name in PER_TOKEN}
    return utils.FusedCausalLMOutput(loss=loss, **per_token, label_mask=mask, aux_loss=aux_loss)
