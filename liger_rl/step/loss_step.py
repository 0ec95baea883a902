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
from liger_rl.head.checks import check_optional_count
from liger_rl.head.head_options import COMPUTE_OPTIONS
from liger_rl.kernels.argument_checks import check_type
from liger_rl.losses.batch import COLUMNS, AlignedBatch
from liger_rl.losses.fused import evaluate
from liger_rl.losses.loss import PreparedLoss
from liger_rl.losses.metrics import Metric, reduce_metrics
from liger_rl.models.project import IGNORE_INDEX
from liger_rl.models.router import find_router_loss, has_router_loss, weigh_router_loss
from liger_rl.models.swap import ROWS
from liger_rl.step.facts import ROUTER_LOSS, fit_facts, is_plain, read_facts
from liger_rl.step.loss_batch import (
    align_batch,
    check_inputs,
    check_loss,
    check_world_size,
    get_swapped_model,
    read_model_inputs,
    read_tokens,
)
from liger_rl.step.memory import DEFAULT_SHARE, check_memory, run_with_kept_layers, without_idle_checkpoints
from liger_rl.step.ranks import count_averaging_ranks, find_ddp, find_rank_groups, first_device
from liger_rl.step.reason import Reason
from liger_rl.step.run import Output, Outputs, run
from liger_rl.step.sequences import TokenBatch
from liger_rl.step.step import StepInputs, plan_step

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
        options: memory, group and further arguments for the model, as in `loss_steps`.

    Raises:
        TypeError, ValueError: before the model runs: a column that is missing, unknown or does not fit, or a softcap or
            scale of the loss that is not the model's. If one of the ranks that run the model together raises, all do.
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
    without a completion token. Tokens with which sequences begin alike run once. Sequences without a gradient run
    without a graph if a metric needs them, else not at all, and their log-probabilities are NaN. docs/transformers.md
    lists exceptions, and describes steps on several ranks.

    Args:
        model, batch, loss: as in `loss_step`.
        max_tokens: the most tokens that the model runs at once, padding included; None is one micro-batch.
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
    return LossSteps(model, batch, loss, extra_inputs, max_tokens=max_tokens, group=group, memory=memory)


class LossSteps(Iterator[LossStep]):
    """The micro-batches of one batch. Each runs when it is taken. `len` is their number. See `loss_steps`.

    A step's metrics are those of its sequences. Its per_token_logps and entropy are (B, T) in the batch's layout, and 0
    in the sequences of other steps. `layout` is how the tokens are laid out, and why no prefix is shared.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        loss: FusedLinearLoss,
        extra_inputs: dict[str, Any],
        *,
        max_tokens: int | None,
        group: Any,
        memory: float = 0,
        logps_alone: bool = False,
    ) -> None:
        self._model, self._loss, self._memory = model, loss, memory
        self._aligned: AlignedBatch | None = None

        def prepare() -> StepInputs:
            # The swap comes first: it runs the model, which has collectives if it is sharded.
            self._swapped = get_swapped_model(model)
            check_optional_count("max_tokens", max_tokens)
            check_memory(memory)
            return self._read(batch, extra_inputs, max_tokens, logps_alone=logps_alone)

        groups = find_rank_groups(model, group)
        self._plan = plan_step(prepare, groups, first_device(model))
        self._layout, self._facts = self._plan.layout, self._plan.layout.facts
        self.layout = self._layout.describe()
        if self._aligned is not None:  # an earlier step may have given NaN for rows that do not run
            self._aligned = _clear_logps(self._aligned, self._layout.left_out, self._batch.ids)
        self._steps_taken = 0
        self._total: LossStep | None = None

    def _read(
        self, batch: Mapping[str, Any], extra_inputs: dict[str, Any], max_tokens: int | None, *, logps_alone: bool
    ) -> StepInputs:
        """Checks and keeps the tokens, the model's inputs and the loss's columns."""
        check_type("batch", batch, Mapping, "a mapping of columns by name")
        model, loss = self._model, self._loss
        check_loss(loss, self._swapped)
        options = ["max_tokens", *([] if logps_alone else ["memory"]), "group"]
        inputs = read_model_inputs(model, self._swapped, batch, loss, extra_inputs, options)
        ids, mask = read_tokens(batch)
        check_inputs(inputs, ids)
        aligned = None if logps_alone else align_batch(batch, loss, ids, mask)
        if aligned is not None and batch.get("num_items_in_batch") is not None:
            check_world_size(loss, count_averaging_ranks(model))
        if aligned is not None and aligned.nll_mask is not None:  # the NLL term has tokens of its own
            mask = aligned.mask.view(ids.shape) != 0
        known = read_facts(self._swapped, model)
        if aligned is None and has_router_loss(known.config, inputs):  # nobody reads it
            inputs["output_router_logits"] = False
        facts = fit_facts(known, inputs, ids)
        if batch.get("segments") is not None:
            facts = replace(facts, obstacle=facts.obstacle or Reason("its segments are one packed row"))
        if facts.has_router_loss:
            inputs["output_router_logits"] = True
            if not facts.router_is_known:
                raise ValueError(f"{facts.name} has a router loss of its own; set output_router_logits=False")
        self._batch, self._aligned = TokenBatch(ids, mask, inputs), aligned
        terms, one_micro_batch = loss.terms, ROUTER_LOSS if facts.has_router_loss else None
        if one_micro_batch is None and aligned is not None and terms.scope == "batch":
            one_micro_batch = Reason("the loss's sequences depend on each other")
        return StepInputs(
            model=self._swapped, wrapper=model, facts=facts, batch=self._batch, run_rows=self._run_trial_rows,
            weights=aligned.advantages if aligned is not None and terms.idle_scope else None,
            max_tokens=max_tokens, share=self._memory,
            runs_idle=terms.metrics_read_all,
            one_micro_batch=one_micro_batch,
            pairs=aligned is not None and aligned.pairs,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name in (*LossStep._fields, "backward"):
            raise AttributeError(f"LossSteps has no {name}; iterate over its steps, or read total after the last")
        raise AttributeError(f"LossSteps has no {name}")

    def __len__(self) -> int:
        return self._plan.live_forwards

    def __next__(self) -> LossStep:
        """Runs the next micro-batch. Idle micro-batches run with the first."""
        number = self._steps_taken
        if number == len(self):
            raise StopIteration
        wrapper = find_ddp(self._model) if number < len(self) - 1 else None
        with nullcontext() if wrapper is None else wrapper.no_sync():
            idle_runs = self._plan.idle_forwards if number == 0 or self._plan.idle_forwards is None else 0
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
        return cast(Tensor, run(idle, self._batch, self._forward, idle_runs=len(self)).get("logps"))

    @cached_property
    def _prepared_loss(self) -> PreparedLoss:
        """The loss with the weights and divisors of the whole batch."""
        assert self._aligned is not None
        return self._loss.terms.prepare(self._aligned, torch.float32)

    def _run_model(self, inputs: dict[str, Any], **options: Any) -> Any:
        """The model's output with log-probabilities of the tokens of `input_ids` where inputs["counted"] is set."""
        inputs = dict(inputs)
        labels = torch.where(inputs.pop("counted"), inputs["input_ids"], IGNORE_INDEX)
        options |= {name: getattr(self._loss.options, name) for name in COMPUTE_OPTIONS}
        with without_idle_checkpoints(self._model):
            return self._model(labels=labels, fused=ROWS, **options, **inputs)

    def _run_trial_rows(self, inputs: dict[str, Any]) -> Tensor:
        plain = {name: value for name, value in self._batch.inputs.items() if is_plain(value)}
        return self._run_model(plain | inputs, temperature=1.0).per_token_logps

    def _forward(self, inputs: dict[str, Any]) -> Output:
        results = ("entropy", "lse", "extras") if self._aligned is not None else ()
        options = {name: getattr(self._loss.options, name) for name in results}
        output = self._run_model(inputs, temperature=self._loss.transform.temperature, **options)
        width, device = inputs["input_ids"].shape[1], self._batch.ids.device
        names = ("entropy", *self._loss.terms.head_values)
        values = {name: value for name in names if (value := getattr(output, name)) is not None}
        values["logps"] = output.per_token_logps
        # Without the virtual tokens that prompt tuning puts before each row.
        values = {name: value[:, -width:].to(device) for name, value in values.items()}
        return Output(values, output.router_logits if self._facts.has_router_loss else None)

    def _run_with_graph(self, clauses: list[str], forward: Callable[[], Any], tokens: int) -> Any:
        outputs, clause = run_with_kept_layers(
            self._model, forward, tokens, share=self._memory, agreed=self._plan.kept_layers
        )
        clauses.extend([] if clause is None else [clause])
        return outputs

    def _make_step(self, number: int, outputs: Outputs) -> LossStep:
        """The step of the rows of a micro-batch. The idle ones of the first have metrics only."""
        shape, device, rows = self._batch.ids.shape, self._batch.ids.device, self._layout.live[number].rows
        prepared, index = self._prepared_loss, None
        router = find_router_loss(self._swapped) if self._facts.has_router_loss else None
        router_losses = outputs.compute_router_losses(router, self._batch.inputs.get("attention_mask"), [shape[0]])
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
        if router_losses is not None:
            total = total + weigh_router_loss(self._swapped, router_losses[0]).to(total.device)
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
    group: Any = None,
    **extra_inputs: Any,
) -> Tensor:
    """(B, T) float32 log-probabilities in nats of the completion tokens, 0 elsewhere, without gradient.

    For old and reference log-probabilities, at the loss's temperature. Arguments and errors are those of
    `loss_steps`, without memory. Of the batch it reads the mask and the model's inputs. The model's training mode does
    not change.
    """
    return LossSteps(model, batch, loss, extra_inputs, max_tokens=max_tokens, group=group, logps_alone=True).logps()


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
