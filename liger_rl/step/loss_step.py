"""One call for a training step of a HuggingFace policy: a batch in, the loss to call backward on and metrics out.

loss = FusedLinearGRPOLoss("dapo", epsilon_high=0.28, beta=0.01)
batch["old_per_token_logps"] = completion_logps(model, batch, loss)
step = loss_step(model, batch, loss)
step.loss.backward()
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_rl.fused_linear.loss_module import FusedLinearLoss
from liger_rl.head.checks import check_dense, check_integers, check_shape
from liger_rl.kernels.argument_checks import check_type
from liger_rl.losses.batch import COLUMNS, AlignedBatch
from liger_rl.losses.fused import evaluate
from liger_rl.losses.loss import PreparedLoss
from liger_rl.losses.metrics import Metric, reduce_metrics
from liger_rl.models.modules import walked_once
from liger_rl.step.body import (
    ROUTER_LOSS,
    TOKEN_INPUTS,
    Body,
    fused_forward,
    get_swapped_model,
    is_plain,
    read_body,
    read_model_inputs,
    router_loss,
)  # fmt: skip
from liger_rl.step.layout import Idle, Layout, LayoutOptions, lay_out, wants_packing
from liger_rl.step.memory import DEFAULT_SHARE, check_memory, run_with_kept_layers, without_idle_checkpoints
from liger_rl.step.ranks import (
    agree_on_counts,
    agree_on_minimum,
    count_averaging_ranks,
    find_ddp,
    find_rank_groups,
    first_device,
)  # fmt: skip
from liger_rl.step.reason import Reason
from liger_rl.step.router import find_router_module, recorded_router_calls
from liger_rl.step.run import Output, Outputs, run
from liger_rl.step.sequences import TokenBatch, read_sequences
from liger_rl.step.trial import apply_trial, needs_trial, tries_rows

__all__ = ["LossStep", "LossSteps", "completion_logps", "loss_step", "loss_steps"]


class LossStep(NamedTuple):
    """The loss, metrics and log-probabilities of a step."""

    loss: Tensor  # () float32, to call backward on; includes the weighted router loss of a mixture of experts
    metrics: dict[str, Metric]  # by name, without gradient; see `liger_rl.losses.metrics`
    per_token_logps: Tensor  # (B, T) float32 in nats, no gradient; 0 outside completions, NaN in those that did not run
    entropy: Tensor | None  # (B, T) float32 in nats, without gradient; None unless the loss needs it
    layout: str  # how the batch's tokens were laid out, why no prefix was shared, and how many layers kept activations


def loss_step(model: nn.Module, batch: Mapping[str, Any], loss: FusedLinearLoss, **options: Any) -> LossStep:
    """The loss of one batch, from token ids, for one backward: `loss_steps` with one micro-batch.

    Only positions that predict a completion token are projected on the vocabulary.

    Args:
        model: a HuggingFace causal LM or a `peft.PeftModel` of one, whose head is swapped at the first call
            (`swap_lm_head`); or a wrapper (DDP, torch.compile) of one whose head has been swapped before.
        batch: columns by name. Entry t belongs to token t, not to the position that predicts it.
            input_ids: (B, T) integers, prompt and completion.
            mask: (B, T) bool or 0/1, the sampled tokens that count, except the first of a row. The host reads one
                that is not bool.
            The columns in `loss.COLUMNS`: of a policy loss those of `PolicyBatch`, of others the arguments of their
                modules, (B, T) per token; segments for a packed row, B = 1.
            Other arguments of the model's forward: attention_mask, position_ids, pixel_values, ...
        loss: a fused loss, such as `FusedLinearGRPOLoss`. Its temperature divides the logits; softcap and scale are the
            model's.
        options: trim, packing, share_prefixes, idle, memory, group and further arguments for the model, as in
            `loss_steps`.

    Raises:
        TypeError, ValueError: before the model runs: a column that is missing, unknown or does not fit, a softcap or
            scale of the loss that is not the model's, or packing that the model or the batch does not allow. If one of
            the ranks that run the model together raises, all do.
    """
    if "max_tokens" in options:
        raise TypeError("max_tokens must be given to loss_steps, which makes micro-batches; loss_step has one")
    return next(loss_steps(model, batch, loss, **options))


def loss_steps(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: FusedLinearLoss,
    *,
    max_tokens: int | None = None,
    trim: bool = True,
    packing: bool | None = None,
    share_prefixes: bool | None = None,
    idle: Idle = "skip",
    memory: float = DEFAULT_SHARE,
    group: Any = None,
    **extra_inputs: Any,
) -> "LossSteps":
    """`loss_step` in micro-batches whose losses add up to the loss of the batch.

        steps = loss_steps(model, batch, loss, max_tokens=16384)
        for step in steps:
            step.loss.backward()
        optimizer.step()
        print(steps.total.metrics)

    Losses, gradients and merged metrics add up to those of the padded batch, to rounding. Call backward on each step
    before you take the next one. The model does not run padding, tokens after the last completion token, and sequences
    without a completion token or without a gradient. docs/transformers.md lists exceptions, and describes steps on
    several ranks.

    Args:
        model, batch, loss: as in `loss_step`.
        max_tokens: the most tokens that the model runs at once, padding included; None is one micro-batch.
        trim: whether padding is removed.
        packing: whether sequences are put into one row, separated by position_ids. None packs with flash attention,
            True also with "flex_attention", "sdpa" and "eager".
        share_prefixes: whether sequences that begin with the same tokens run these tokens once. None shares if at most
            90% of the tokens remain; `LossStep.layout` has the reason if not. True raises an error where sharing is
            impossible (docs/transformers.md).
        idle: how sequences without a gradient run. "backward": with the others. "forward": without a graph, in the
            first step. "skip": as "forward" if a metric needs them, else not at all, and their log-probabilities are
            NaN.
        memory: the share of a GPU's free memory for layers' activations; 0: none, inputs in CPU memory.
        group: process group whose ranks run the model together. None finds that of DDP, FSDP2, ZeRO-3 and tensor
            parallelism. Other wrappers need it.
        extra_inputs: further arguments for the model that its signature does not name; see `swap_lm_head` for which.

    Returns:
        An iterator over the micro-batches' `LossStep`, of known length, with `total` after the last.

    Raises:
        TypeError, ValueError: as `loss_step`; also for max_tokens below the longest sequence, or below a batch that
            cannot be split.
    """
    options = {
        "max_tokens": max_tokens, "trim": trim, "packing": packing, "share_prefixes": share_prefixes, "idle": idle
    }  # fmt: skip
    return LossSteps(model, batch, loss, extra_inputs, options, group, memory=memory)


class LossSteps(Iterator[LossStep]):
    """The micro-batches of one batch. Each runs when it is taken. `len` is their number. See `loss_steps`.

    A step's metrics are those of its sequences. Its per_token_logps and entropy are (B, T) in the batch's layout, and 0
    in the sequences of other steps. `layout` is how the tokens are laid out, and why no prefix is shared.
    """

    @walked_once()
    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        loss: FusedLinearLoss,
        extra_inputs: dict[str, Any],
        options: dict[str, Any],  # of `LayoutOptions`
        group: Any,
        *,
        memory: float = 0,
        logps_alone: bool = False,
    ) -> None:
        self._model, self._loss, self._memory = model, loss, memory
        groups, device = find_rank_groups(model, group), first_device(model)
        self._agree = partial(agree_on_minimum, groups, device=device) if groups else None
        with agree_on_counts(groups, device) as counts:
            # The swap comes first: it runs the model, which has collectives if it is sharded.
            self._swapped = swapped = get_swapped_model(model)
            row_options = LayoutOptions(**options)
            check_memory(memory)
            aligned = self._read_batch(batch, extra_inputs, [*options, "memory", "group"], logps_alone=logps_alone)
            has_segments = batch.get("segments") is not None
            obstacle = Reason("its segments are one packed row") if has_segments else None
            body = read_body(model, swapped, self._batch.inputs, self._batch.ids, obstacle)
            packs = wants_packing(body, row_options)
            counts[0] = packs and needs_trial(swapped, body, "packing")
            counts[1] = tries_rows(swapped) and needs_trial(swapped, body, "rows")
        # A trial may have collectives, so all ranks run it if one rank needs it.
        if counts[1] or tries_rows(swapped):
            body = self._apply_trial(body, "rows", again=bool(groups) and counts[1] > 0)
        if packs or counts[0]:
            body = self._apply_trial(body, "packing", again=bool(groups) and counts[0] > 0)
        if aligned is None:
            body = replace(body, has_router_loss=False)  # nobody reads the router loss
        self._layout, (self._steps, idle_runs) = self._agree_on_layout(groups, device, body, aligned, row_options)
        self.layout = self._layout.describe()
        # On ranks so many forwards run without a graph, in the first step.
        self._idle_runs = idle_runs if groups else None
        # An earlier step may have given NaN for rows that do not run.
        self._aligned = None if aligned is None else _clear_logps(aligned, self._layout.left_out, self._batch.ids)
        self._steps_taken = 0
        self._total: LossStep | None = None

    def _read_batch(
        self, batch: Mapping[str, Any], extra_inputs: dict[str, Any], options: list[str], *, logps_alone: bool
    ) -> AlignedBatch | None:
        """Checks and keeps the tokens and the model's inputs. -> the loss's columns, None without a loss"""
        check_type("batch", batch, Mapping, "a mapping of columns by name")
        _check_loss(self._loss, self._swapped)
        inputs = read_model_inputs(self._model, self._swapped, batch, self._loss, extra_inputs, options)
        ids, mask = _read_tokens(batch)
        _check_inputs(inputs, ids)
        aligned = None if logps_alone else _align_batch(batch, self._loss, ids, mask)
        if aligned is not None and batch.get("num_items_in_batch") is not None:
            _check_world_size(self._loss, count_averaging_ranks(self._model))
        if aligned is not None and aligned.nll_mask is not None:  # the NLL term has tokens of its own
            mask = aligned.mask.view(ids.shape) != 0
        self._batch = TokenBatch(ids, mask, inputs)
        return aligned

    def _agree_on_layout(
        self, groups: list[Any], device: torch.device, body: Body, aligned: AlignedBatch | None, options: LayoutOptions
    ) -> tuple[Layout, tuple[int, int]]:
        """The layout, and the most live and idle micro-batches of a rank. A trial of trees runs if a rank needs it."""
        is_tried = body.no_tree is not None or not needs_trial(self._swapped, body, "trees")
        if is_tried and body.no_tree is None:
            body = self._apply_trial(body, "trees", again=False)
        while True:
            with agree_on_counts(groups, device) as counts:
                layout = self._lay_out(body, aligned, options)
                counts[:] = len(layout.live), len(layout.idle), layout.has_trees and not is_tried
            if not counts[2]:
                return layout, (counts[0], counts[1])
            body, is_tried = self._apply_trial(body, "trees", again=bool(groups)), True

    def __len__(self) -> int:
        return self._steps

    @walked_once()
    def __next__(self) -> LossStep:
        """Runs the next micro-batch. Idle micro-batches run with the first."""
        number = self._steps_taken
        if number == self._steps:
            raise StopIteration
        wrapper = find_ddp(self._model) if number < self._steps - 1 else None
        with nullcontext() if wrapper is None else wrapper.no_sync():
            idle_runs = self._idle_runs if number == 0 else 0
            clauses = [self.layout]
            outputs = run(
                self._layout.take(number), self._batch, self._forward, idle_runs=idle_runs,
                with_graph=partial(self._run_with_graph, clauses),
            )  # fmt: skip
            make_step = self._make_step if number < len(self._layout.live) else self._make_empty_step
            step = make_step(number, outputs)._replace(layout="; ".join(clauses))
        self._steps_taken += 1
        # Detached: the graph would keep memory that a backward does not free.
        detached = step._replace(loss=step.loss.detach())
        self._total = detached if self._total is None else _merge_steps(self._total, detached)
        return step

    @property
    def total(self) -> LossStep:
        """The step of the whole batch: the sum of the losses, without gradient, and all metrics, merged."""
        if self._total is None or self._steps_taken < len(self):
            raise RuntimeError(f"total is known after all {len(self)} steps, {self._steps_taken} were taken")
        return self._total

    def logps(self) -> Tensor:
        """(B, T) log-probabilities, without a loss."""
        idle = self._layout._replace(live=[], idle=self._layout.live)
        return cast(Tensor, run(idle, self._batch, self._forward, idle_runs=self._steps).get("logps"))

    @cached_property
    def _prepared_loss(self) -> PreparedLoss:
        """The loss with the weights and divisors of the whole batch."""
        assert self._aligned is not None
        return self._loss.terms.prepare(self._aligned, torch.float32)

    def _forward(self, inputs: dict[str, Any]) -> Output:
        router = find_router_module(self._swapped)
        with without_idle_checkpoints(self._model), recorded_router_calls(router) as calls:
            output = fused_forward(self._model, self._loss, inputs, others=self._aligned is not None)
        width, device = inputs["input_ids"].shape[1], self._batch.ids.device
        names = ("entropy", *self._loss.terms.head_values)
        values = {name: value for name in names if (value := getattr(output, name)) is not None}
        values["logps"] = output.per_token_logps
        # Without the virtual tokens that prompt tuning puts before each row.
        values = {name: value[:, -width:].to(device) for name, value in values.items()}
        return Output(values, output.aux_loss, calls[0] if calls else None)

    def _run_with_graph(self, clauses: list[str], forward: Callable[[], Any], tokens: int) -> Any:
        outputs, clause = run_with_kept_layers(self._model, forward, tokens, share=self._memory, agree=self._agree)
        clauses.extend([] if clause is None else [clause])
        return outputs

    def _make_step(self, number: int, outputs: Outputs) -> LossStep:
        """The step of the rows of a micro-batch. The idle ones of the first have metrics only."""
        shape, device, rows = self._batch.ids.shape, self._batch.ids.device, self._layout.live[number].rows
        prepared, index, aux_loss = self._prepared_loss, None, outputs.outputs[0].extra
        if aux_loss is not None and not self._layout.body.has_router_loss and outputs.source is not None:
            raise ValueError(
                f"{type(self._swapped).__name__} returns a router loss without output_router_logits in its config or "
                'the batch; set it, or keep the batch as it is with trim=False, idle="backward" and one micro-batch'
            )
        router_losses = outputs.compute_router_losses(self._batch.inputs.get("attention_mask"), [shape[0]])
        aux_loss = aux_loss if router_losses is None else router_losses[0]
        if len(rows) < shape[0]:
            index = torch.tensor(rows).to(device, non_blocking=True)
            positions = index[:, None] * shape[1] + torch.arange(shape[1], device=device)
            outputs, prepared = outputs.take(index), prepared.take(positions)

        def whole(values: Tensor) -> Tensor:
            """(B, T) without gradient"""
            values = values.detach()
            return values if index is None else values.new_zeros(shape).index_copy(0, index, values)

        logps, entropy = outputs.get("logps"), outputs.get("entropy")
        assert logps is not None
        loss_shape = prepared.batch.mask.shape  # (N,) with segments
        others = {name: cast(Tensor, outputs.get(name)) for name in self._loss.terms.head_values}
        total, metrics = evaluate(
            prepared, logps.reshape(loss_shape), None if entropy is None else entropy.reshape(loss_shape),
            others={name: x.reshape(*loss_shape, *x.shape[2:]) for name, x in others.items()},
        )  # fmt: skip
        if aux_loss is not None:
            total = total + router_loss(self._swapped, aux_loss).to(total.device)
        values = whole(logps)
        if number == 0 and self._layout.left_out:
            left_out = _mask_rows(self._layout.left_out, self._batch.ids)
            values = values.masked_fill(left_out & self._batch.mask, math.nan)
        return LossStep(total, metrics, values, None if entropy is None else whole(entropy), self.layout)

    def _make_empty_step(self, number: int, outputs: Outputs) -> LossStep:
        """A step whose loss is 0, with a graph through the whole model."""
        values = outputs.outputs[0].values
        zeros = self._batch.ids.new_zeros(self._batch.ids.shape, dtype=torch.float32)
        loss = values["logps"].masked_fill(torch.ones_like(values["logps"], dtype=torch.bool), 0.0).sum()
        return LossStep(loss, {}, zeros, zeros if "entropy" in values else None, self.layout)

    def _apply_trial(self, body: Body, layout: str, *, again: bool) -> Body:
        inputs = self._batch.inputs
        options = {name: value for name, value in inputs.items() if name not in TOKEN_INPUTS and is_plain(value)}

        def run_row(inputs: dict[str, Any]) -> Tensor:
            inputs = options | inputs
            with recorded_router_calls(find_router_module(self._swapped)):
                return fused_forward(self._model, self._loss, inputs, others=False, temperature=1.0).per_token_logps

        return apply_trial(run_row, self._swapped, body, self._batch.ids.device, layout, again=again)

    def _lay_out(self, body: Body, aligned: AlignedBatch | None, options: LayoutOptions) -> Layout:
        terms, one_micro_batch = self._loss.terms, None
        if body.has_router_loss:
            one_micro_batch = ROUTER_LOSS
        elif aligned is not None and terms.scope == "batch":
            one_micro_batch = Reason("the loss's sequences depend on each other")
        weights = aligned.advantages if aligned is not None and terms.idle_scope else None
        return lay_out(
            read_sequences(self._batch, body, trim=options.trim, weights=weights), body, options,
            runs_idle=aligned is None or terms.metrics_read_all or options.idle == "forward",
            one_micro_batch=one_micro_batch,
            pairs=aligned is not None and aligned.pairs,
        )  # fmt: skip


def _merge_steps(a: LossStep, b: LossStep) -> LossStep:
    entropy = None if a.entropy is None or b.entropy is None else a.entropy + b.entropy
    metrics = reduce_metrics([a.metrics, b.metrics])
    return LossStep(a.loss + b.loss, metrics, a.per_token_logps + b.per_token_logps, entropy, a.layout)


@torch.no_grad()
def completion_logps(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: FusedLinearLoss,
    *,
    max_tokens: int | None = None,
    trim: bool = True,
    packing: bool | None = None,
    share_prefixes: bool | None = None,
    group: Any = None,
    **extra_inputs: Any,
) -> Tensor:
    """(B, T) float32 log-probabilities in nats of the completion tokens, 0 elsewhere, without gradient.

    For old and reference log-probabilities, at the loss's temperature. Arguments and errors are those of
    `loss_steps`. Of the batch it reads the mask and the model's inputs. The model's training mode does
    not change.
    """
    options = {"max_tokens": max_tokens, "trim": trim, "packing": packing, "share_prefixes": share_prefixes}
    return LossSteps(model, batch, loss, extra_inputs, options, group, logps_alone=True).logps()


def _clear_logps(aligned: AlignedBatch, rows: tuple[int, ...], ids: Tensor) -> AlignedBatch:
    """The batch with log-probabilities of 0 in these rows."""
    if not rows:
        return aligned
    cleared = _mask_rows(rows, ids)
    logps = {name: getattr(aligned, name) for name in COLUMNS if name.endswith("_logps")}
    return replace(
        aligned, **{n: column.masked_fill(cleared, 0.0) for n, column in logps.items() if column is not None}
    )


def _mask_rows(rows: tuple[int, ...], ids: Tensor) -> Tensor:
    """(B, 1) bool, True at `rows`."""
    mask = torch.zeros(ids.shape[0], 1, dtype=torch.bool)
    mask[list(rows)] = True
    return mask.to(ids.device, non_blocking=True)


def _align_batch(batch: Mapping[str, Any], loss: FusedLinearLoss, ids: Tensor, mask: Tensor) -> AlignedBatch:
    columns: dict[str, Any] = {name: batch.get(name) for name in loss.COLUMNS}
    if columns.get("nll_mask") is not None:
        nll_mask = check_dense("nll_mask", columns["nll_mask"], ids, "input_ids")
        check_shape("nll_mask", nll_mask, ids.shape, f"(B, T) = {tuple(ids.shape)} from input_ids")
        _check_mask_values("nll_mask", nll_mask)
        columns["nll_mask"] = nn.functional.pad(nll_mask[:, 1:] != 0, (1, 0))
    if columns["segments"] is not None:
        if ids.shape[0] != 1:
            raise ValueError(f"input_ids must be one packed row, (1, T), with segments, got {tuple(ids.shape)}")
        per_token = [name for name, x in columns.items() if isinstance(x, Tensor) and x.shape == ids.shape]
        columns |= {name: columns[name].reshape(-1) for name in per_token}
        ids, mask = ids.reshape(-1), mask.reshape(-1)
    return loss.terms.check(loss.batch(ids, mask, source="input_ids", **columns), mask.shape, ids.device)


def _read_tokens(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """input_ids (B, T), and their mask as bool, False in the first column."""
    for name in ("input_ids", "mask"):
        check_type(name, batch.get(name), Tensor, "a tensor in the batch")
    ids, mask = batch["input_ids"], batch["mask"]
    check_integers("input_ids", ids)
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"input_ids must be (B, T) with at least one token, got {tuple(ids.shape)}")
    if mask.shape != ids.shape or mask.device != ids.device:
        raise ValueError(
            f"mask must be (B, T) = {tuple(ids.shape)} on {ids.device} from input_ids, "
            f"got {tuple(mask.shape)} on {mask.device}"
        )
    _check_mask_values("mask", mask)
    return ids, nn.functional.pad(mask[:, 1:] != 0, (1, 0))


def _check_mask_values(name: str, mask: Tensor) -> None:
    """The host reads a mask that is not bool."""
    wrong = 0 if mask.dtype == torch.bool else int(((mask != 0) & (mask != 1)).sum())
    if wrong:
        raise ValueError(f"{name} must be 0 or 1 at each token; {wrong} of its values are neither")


def _check_inputs(inputs: Mapping[str, Any], ids: Tensor) -> None:
    """Raises ValueError for a mask or positions of other tokens. Other numbers of dimensions are the model's own."""
    shapes: dict[str, list[tuple]] = {"attention_mask": [ids.shape], "position_ids": [ids.shape, (1, ids.shape[1])]}
    for name, allowed in shapes.items():
        column = inputs.get(name)
        if isinstance(column, Tensor) and column.dim() <= 2 and column.shape not in allowed:
            raise ValueError(f"{name} must be (B, T) = {tuple(ids.shape)} from input_ids, got {tuple(column.shape)}")


def _check_loss(loss: Any, swapped: Any) -> None:
    check_type("loss", loss, FusedLinearLoss, "a fused loss, such as FusedLinearGRPOLoss")
    for name, unset in (("softcap", None), ("scale", 1.0)):
        value, model_value = getattr(loss.transform, name), getattr(swapped._fused_transform, name)
        if value not in (unset, model_value):
            raise ValueError(
                f"{name} must be left out of the loss, the model's own is used: {model_value} for "
                f"{type(swapped).__name__}, got {value}"
            )


def _check_world_size(loss: FusedLinearLoss, ranks: int) -> None:
    """ValueError if the average over the ranks would not be the gradient of all ranks' tokens."""
    size = getattr(loss.terms.reduction, "world_size", ranks)
    if ranks > 1 and size != ranks:
        raise ValueError(
            f"world_size must be {ranks} in the loss, the number of ranks whose gradients are averaged, because "
            f"num_items_in_batch counts the tokens of all ranks, got {size}"
        )
