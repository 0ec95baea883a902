"""One call for a training step of a HuggingFace policy: a batch in, the loss to call backward on and metrics out.

    loss = FusedLinearGRPOLoss("dapo", epsilon_high=0.28, beta=0.01)
    batch["old_per_token_logps"] = completion_logps(model, batch, loss)
    step = policy_step(model, batch, loss)
    step.loss.backward()

Every per-token column has the shape of `input_ids`: entry t belongs to token t, not to the position that predicts it.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_rl.grpo import FusedLinearGRPOLoss
from liger_rl.integrations.live_rows import (
    Demand,
    Idle,
    MicroBatch,
    Plan,
    RowOptions,
    inputs_of,
    placed,
    planned,
    tried_packing,
    wants_packing,
)
from liger_rl.integrations.model_body import CARRIED, LONGEST, Body, body_of
from liger_rl.integrations.step_ranks import agreed, data_parallel, rank_groups
from liger_rl.integrations.transformers import HEAD_OPTIONS, IGNORE_INDEX, router_loss, swap_lm_head, swapped_inside
from liger_rl.policy.batch import AlignedBatch, PolicyBatch
from liger_rl.policy.fused import evaluate
from liger_rl.policy.loss import PreparedLoss
from liger_rl.policy.metrics import Metric, reduce_metrics

__all__ = ["PolicyStep", "PolicySteps", "completion_logps", "policy_step", "policy_steps"]

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
    """(B, T) float32 in nats, without gradient; 0 outside the completions, NaN in a completion that did not run."""
    entropy: Tensor | None
    """(B, T) float32 in nats, without gradient; None unless the loss needs it."""


def policy_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: FusedLinearGRPOLoss,
    *,
    trim: bool = True,
    packing: bool | None = None,
    idle: Idle = "skip",
    group: Any = None,
    **model_inputs: Any,
) -> PolicyStep:
    """The policy loss of one (micro-)batch, from token ids, for one backward. Only positions that predict a completion
    token are projected on the vocabulary.

    The model is not given what has no part in the loss: padding, what follows the last completion token of a causal
    model, sequences without a completion token, and sequences without a gradient. `policy_steps` makes micro-batches,
    too, and says what the keywords do.

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
        trim, packing, idle, group: as in `policy_steps`.
        model_inputs: further arguments for the model that its signature does not name; see `swap_lm_head` for which.

    Raises:
        TypeError, ValueError: before the model runs, a column that is missing, unknown or does not fit, a softcap or
            scale of the loss that is not the model's, or packing where it cannot be.
    """
    options = RowOptions(trim=trim, packing=packing, idle=idle)
    return next(PolicySteps(_Job.of(model, batch, loss, model_inputs, options, group)))


def policy_steps(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: FusedLinearGRPOLoss,
    *,
    max_tokens: int | None = None,
    trim: bool = True,
    packing: bool | None = None,
    idle: Idle = "skip",
    group: Any = None,
    **model_inputs: Any,
) -> "PolicySteps":
    """`policy_step` in micro-batches whose losses add up to the loss of the batch.

        steps = policy_steps(model, batch, loss, max_tokens=16384)
        for step in steps:
            step.loss.backward()
        optimizer.step()
        print(steps.total.metrics)

    Sequences are sorted by length into micro-batches, the longest first. Every divisor is that of the whole batch, so
    the sum of the losses, the sum of the gradients and the merged metrics are those of the padded batch, to rounding.
    A backward must follow each step before the next is taken.

    What is left out of the model's forward:

    - Padding and what follows the last completion token. A row begins at its first attended token where the other
      tokens' positions can be kept: the batch has them as position_ids, or the model is known to take columns for
      positions, or to see only their differences. Elsewhere only columns on the right are cut off. The attention mask
      is not passed on where it has nothing left to say, so that causal kernels run. A dropout draws other numbers.
    - Sequences without a completion token.
    - Sequences without a gradient: all advantages are 0, and neither a KL penalty, an entropy bonus nor the objective
      gives them one. If a metric reads their log-probabilities, they run without a graph, before the first step.

    A batch stays as it is, in one micro-batch, where it is not known what an input says of single tokens (images,
    token_type_ids, a 4-D mask, a cache), with `segments`, with a loss of `fixed_shape`, with tokens that an adapter
    puts before each row, and where the rotary embedding depends on the longest row. With a mixture of experts' router
    loss, a mean over all tokens, padding leaves, but every sequence runs in one micro-batch.

    With several ranks (DDP, FSDP2, DTensors) each makes as many forwards and backwards as the others: a rank with fewer
    micro-batches runs its shortest sequence with a loss of 0. DDP reduces gradients in the last backward alone; under
    FSDP2, `model.set_requires_gradient_sync` works as always. The host waits for the device once, for where sequences
    begin and end, and once more for the ranks' numbers of micro-batches; the head waits in each micro-batch, as always.

    Args:
        model, batch, loss, model_inputs: as in `policy_step`.
        max_tokens: the most tokens that the model is given at once, padding included; None is one micro-batch.
        trim: whether padding leaves.
        packing: whether sequences are put one after the other in one row, told apart by position_ids. None does so
            where the model's attention is "flash_attention_2", "_3", "_4" or one of the hub's "flash-attn" kernels.
            True does it with "flex_attention", "sdpa" and "eager", too; the time and memory of the last two then grow
            with the square of the row. Positions begin at 0 in each sequence. A model's first call tries out, on 32
            tokens, that its attention keeps sequences apart.
        idle: sequences without a gradient are run with the others for "backward"; without a graph for "forward"; for
            "skip" as for "forward" where a metric needs them, else not at all, and their log-probabilities are NaN.
        group: process group whose ranks run the model together. None finds that of DDP, and those of FSDP2's and tensor
            parallelism's meshes. Other wrappers (DeepSpeed) need it.

    Returns:
        An iterator over the micro-batches' `PolicyStep`, of known length, with `total` after the last.

    Raises:
        TypeError, ValueError: before the model runs, as `policy_step`; max_tokens below the longest sequence, or below
            the batch where the loss's sequences depend on each other (Clip-Cov, KL-Cov, a `TopEntropyMask`), where
            there is a router loss, or where the batch has to stay as it is.
    """
    options = RowOptions(max_tokens=max_tokens, trim=trim, packing=packing, idle=idle)
    return PolicySteps(_Job.of(model, batch, loss, model_inputs, options, group))


class PolicySteps(Iterator[PolicyStep]):
    """The micro-batches of one batch, each run when it is asked for; `len` is their number. See `policy_steps`.

    Each step's metrics are those of its own sequences, and its per_token_logps and entropy are (B, T) in the batch's
    layout, 0 in other steps' sequences.
    """

    def __init__(self, job: "_Job") -> None:
        self._job = job
        self._taken = 0
        self._total: PolicyStep | None = None

    def __len__(self) -> int:
        return self._job.steps

    def __next__(self) -> PolicyStep:
        if self._taken == len(self):
            raise StopIteration
        step = self._job.step(self._taken)
        self._taken += 1
        # Without its graph, which would keep what a backward does not free.
        seen = step._replace(loss=step.loss.detach())
        self._total = seen if self._total is None else _merged(self._total, seen)
        return step

    @property
    def total(self) -> PolicyStep:
        """The step of the whole batch: the sum of the losses, without gradient, and all metrics, merged.

        Raises:
            RuntimeError: before the last step.
        """
        if self._total is None or self._taken < len(self):
            raise RuntimeError(f"total is known after all {len(self)} steps, {self._taken} were taken")
        return self._total


def _merged(a: PolicyStep, b: PolicyStep) -> PolicyStep:
    entropy = None if a.entropy is None or b.entropy is None else a.entropy + b.entropy
    metrics = reduce_metrics([a.metrics, b.metrics])
    return PolicyStep(a.loss + b.loss, metrics, a.per_token_logps + b.per_token_logps, entropy)


@torch.no_grad()
def completion_logps(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: FusedLinearGRPOLoss,
    *,
    max_tokens: int | None = None,
    trim: bool = True,
    packing: bool | None = None,
    group: Any = None,
    **model_inputs: Any,
) -> Tensor:
    """(B, T) float32 log-probabilities in nats of the completion tokens, 0 elsewhere, without gradient.

    For old and reference log-probabilities, at the loss's temperature. Arguments and errors as for `policy_steps`; of
    the batch only the completion_mask, the support and the model's inputs are read. The model stays in the mode that
    it is in.
    """
    options = RowOptions(max_tokens=max_tokens, trim=trim, packing=packing)
    return _Job.of(model, batch, loss, model_inputs, options, group, logps_alone=True).logps()


class _Output(NamedTuple):
    """Of a micro-batch's tokens, flat, in the order of its cells."""

    logps: Tensor
    entropy: Tensor | None
    missing_target: Tensor | None
    aux_loss: Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A checked batch, and what is to run of it."""

    model: nn.Module
    swapped: Any
    loss: FusedLinearGRPOLoss
    ids: Tensor
    mask: Tensor
    inputs: dict[str, Any]
    given: AlignedBatch | None
    """None for log-probabilities alone."""
    body: Body
    plan: Plan
    steps: int
    forwards: int
    """Without a graph, before the first step."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: Mapping[str, Any],
        loss: FusedLinearGRPOLoss,
        model_inputs: dict[str, Any],
        options: RowOptions,
        group: Any,
        *,
        logps_alone: bool = False,
    ) -> "_Job":
        swapped = _swapped(model)
        inputs = _model_inputs(swapped, batch, model_inputs)
        _check_loss(loss, swapped)
        ids, mask = _tokens(batch)
        given = None if logps_alone else _aligned_batch(batch, loss, ids, mask)
        kept = None
        if batch.get("segments") is not None:
            kept = "its segments are one packed row"
        elif loss.options.fixed_shape:
            kept = "a loss of fixed_shape reads no value"
        body = body_of(model, swapped, inputs, ids, kept)
        # Other ranks, whose rows are shorter, run the trial's collectives.
        if wants_packing(replace(body, obstacle=None) if body.obstacle == LONGEST else body, options):
            body = _tried(model, swapped, loss, inputs, body, ids.device)
        if given is None:
            body = replace(body, router=False)  # a loss, which nobody reads
        groups = rank_groups(model, group)
        try:
            plan = planned(ids, mask, inputs, body, _demand(loss, given, inputs), options)
        except ValueError:
            agreed(None, groups, ids.device)
            raise
        steps, forwards = agreed(plan, groups, ids.device)
        if given is not None and plan.left_out:
            given = _without_numbers(given, plan.left_out)
        return cls(
            model=model, swapped=swapped, loss=loss, ids=ids, mask=mask, inputs=inputs, given=given, body=body,
            plan=plan, steps=steps, forwards=forwards,
        )  # fmt: skip

    @cached_property
    def prepared(self) -> PreparedLoss:
        """With the weights and divisors of the whole batch."""
        assert self.given is not None
        return self.loss.terms.prepared(self.given, torch.float32)

    def step(self, number: int) -> PolicyStep:
        """The micro-batch of this number; those without a graph run before the first."""
        outputs = self._forwards() if number == 0 else []
        wrapper = data_parallel(self.model) if number < self.steps - 1 else None
        with nullcontext() if wrapper is None else wrapper.no_sync():
            if number >= len(self.plan.parts):
                return self._step_of_nothing(self._run(self.plan.carrier))
            micro, rows = self.plan.parts[number]
            outputs.insert(0, self._run(micro))
        micros = [micro, *(self.plan.idle if number == 0 else ())]
        return self._step_of(rows, micros, outputs, left_out=self.plan.left_out if number == 0 else ())

    def logps(self) -> Tensor:
        """(B, T)"""
        parts = [part.micro for part in self.plan.parts]
        outputs = [self._run(parts[n] if n < len(parts) else self.plan.carrier) for n in range(self.steps)]
        source = placed(parts, self.ids.shape, self.ids.device)
        return _placed_values([output.logps for output in outputs[: len(parts)]], source, self.ids.shape)

    @torch.no_grad()
    def _forwards(self) -> list[_Output]:
        micros = self.plan.idle
        outputs = [self._run(micros[n] if n < len(micros) else self.plan.carrier) for n in range(self.forwards)]
        return outputs[: len(micros)]

    def _run(self, micro: MicroBatch) -> _Output:
        inputs = inputs_of(micro, self.ids, self.mask, self.inputs, self.body)
        ids, counted = inputs.pop("input_ids"), inputs.pop("counted")
        entropy = self.given is not None and self.loss.terms.needs_entropy
        output = _fused(self.model, ids, counted, self.loss, inputs, entropy=entropy)
        if output.aux_loss is not None and not self.body.router and micro.cells is not None and self.given is not None:
            raise ValueError(
                f"{type(self.swapped).__name__} returns a router loss without output_router_logits in its config or "
                'the batch; set it, or keep the batch as it is with trim=False, idle="backward" and one micro-batch'
            )

        def flat(values: Tensor | None) -> Any:
            return None if values is None else _aligned(values, ids).reshape(-1)

        return _Output(flat(output.per_token_logps), flat(output.entropy), flat(output.missing_target), output.aux_loss)

    def _step_of(
        self, rows: tuple[int, ...], micros: list[MicroBatch], outputs: list[_Output], left_out: tuple[int, ...]
    ) -> PolicyStep:
        shape, device = self.ids.shape, self.ids.device
        source, prepared, mask, index = placed(micros, shape, device), self.prepared, self.mask, None
        if len(rows) < shape[0]:
            assert source is not None
            index = torch.tensor(rows).to(device, non_blocking=True)
            source, mask, prepared = source[index], mask[index], _of_rows(prepared, index)

        def taken(name: str) -> Tensor | None:
            values = [getattr(output, name) for output in outputs]
            return None if values[0] is None else _placed_values(values, source, mask.shape)

        def spread(values: Tensor | None) -> Tensor | None:
            """(B, T) without gradient"""
            if values is None or index is None:
                return None if values is None else values.detach()
            return values.new_zeros(shape).index_copy(0, index, values.detach())

        logps, entropy, missing = taken("logps"), taken("entropy"), taken("missing_target")
        assert logps is not None
        loss_shape = prepared.batch.mask.shape  # of segments, without the row
        total, metrics = evaluate(
            prepared, logps.reshape(loss_shape), None if entropy is None else entropy.reshape(loss_shape)
        )
        if missing is not None and self.loss.terms.metrics != "none":
            metrics["missing_target"] = Metric(missing.sum().float(), count=mask.sum())
        if outputs[0].aux_loss is not None:
            total = total + router_loss(self.swapped, outputs[0].aux_loss).to(total.device)
        seen = spread(logps)
        assert seen is not None
        if left_out:
            absent = torch.zeros(shape[0], dtype=torch.bool)
            absent[list(left_out)] = True
            seen = seen.masked_fill(absent.to(device, non_blocking=True)[:, None] & self.mask, math.nan)
        return PolicyStep(total, metrics, seen, spread(entropy))

    def _step_of_nothing(self, output: _Output) -> PolicyStep:
        """A loss of 0 that has a graph through the whole model."""
        nothing = self.ids.new_zeros(self.ids.shape, dtype=torch.float32)
        loss = output.logps.masked_fill(torch.ones_like(output.logps, dtype=torch.bool), 0.0).sum()
        return PolicyStep(loss, {}, nothing, None if output.entropy is None else nothing)


def _demand(loss: FusedLinearGRPOLoss, given: AlignedBatch | None, inputs: Mapping[str, Any]) -> Demand:
    if given is None:
        return Demand(alive=None, reads_idle=True, divisible=True)
    terms = loss.terms
    return Demand(
        alive=given.advantages if terms.idle_without_advantages else None,
        # Of a support's missing targets there is a metric.
        reads_idle=terms.metrics_read_all or (terms.metrics != "none" and inputs.get("support") is not None),
        divisible=terms.locality != "batch",
    )


def _tried(
    model: nn.Module, swapped: Any, loss: FusedLinearGRPOLoss, inputs: dict[str, Any], body: Body, device: torch.device
) -> Body:
    """The body, without packing if sequences in one row see each other, and rotary only if positions may be shifted."""
    options = {name: value for name, value in inputs.items() if name not in CARRIED}

    def run(inputs: dict[str, Any]) -> Tensor:
        inputs = options | inputs
        ids, counted = inputs.pop("input_ids"), inputs.pop("counted")
        return _fused(model, ids, counted, loss, inputs, entropy=False).per_token_logps

    found = tried_packing(run, swapped, body, device)
    if found.apart:
        return replace(body, rotary=body.rotary and found.shifts)
    return replace(body, no_packing=f"sequences in one row of {type(swapped).__name__} see each other")


def _without_numbers(given: AlignedBatch, rows: tuple[int, ...]) -> AlignedBatch:
    """0 for another policy's log-probabilities in rows that do not run: an earlier step may have given NaN for them."""
    gone = torch.zeros(given.mask.shape[0], 1, dtype=torch.bool)
    gone[list(rows)] = True
    gone = gone.to(given.mask.device, non_blocking=True)
    columns = {name: getattr(given, name) for name in PER_TOKEN[1:4]}
    return replace(given, **{name: c.masked_fill(gone, 0.0) for name, c in columns.items() if c is not None})


def _placed_values(values: list[Tensor], source: Tensor | None, shape: torch.Size) -> Tensor:
    """Flat outputs -> `shape`, 0 for tokens of none of them."""
    if source is None:
        return values[0].view(shape)
    return torch.cat([*values, values[0].new_zeros(1)])[source]


def _of_rows(prepared: PreparedLoss, rows: Tensor) -> PreparedLoss:
    """The part of some sequences, (b,) rows of a (B, T) batch, with its metrics; parts add up to the whole."""
    batch, weights = prepared.batch, prepared.weights
    width = batch.mask.shape[1]
    positions = rows[:, None] * width + torch.arange(width, device=rows.device)
    if weights is not None:
        weights = weights.expand(batch.mask.shape).reshape(-1)[positions]
    return PreparedLoss(prepared.terms, batch.take(positions, sequences=False), weights, batch.mask.sum())


def _aligned_batch(batch: Mapping[str, Any], loss: FusedLinearGRPOLoss, ids: Tensor, mask: Tensor) -> AlignedBatch:
    """The batch's columns, checked."""
    if loss.terms.kl.exact:
        raise ValueError(
            'kl_estimator must not be "exact" here, where the model\'s head returns log-probabilities; call the loss '
            "with hidden states and a reference"
        )
    if loss.passes == "one":
        raise ValueError('passes must be "auto" or "two" here, where the model\'s head returns log-probabilities')
    columns: dict[str, Any] = {name: batch.get(name) for name in POLICY_COLUMNS}
    packed = columns["segments"] is not None
    if packed:
        if ids.shape[0] != 1:
            raise ValueError(f"input_ids must be one packed row, (1, T), with segments, got {tuple(ids.shape)}")
        columns |= {name: columns[name].reshape(-1) for name in PER_TOKEN if isinstance(columns[name], Tensor)}
    columns["completion_mask"] = mask.reshape(-1) if packed else mask
    return loss.terms.check(PolicyBatch(**columns), columns["completion_mask"].shape, ids.device)


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
    if "use_cache" in swapped._fused_arguments:  # some models hand it on without naming it
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
