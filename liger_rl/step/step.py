"""The one driver of a step, for TRL's trainers and for one's own loop: what runs, and in which order.

    facts + sequences -> layout -> ranks agree -> a trial if a rank needs one, and again -> plan

The ranks of the caller's process groups agree once for each plan, and again after each trial. A model needs a trial in
its first step, or in the first one that shares prefixes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_rl.step.facts import Facts
from liger_rl.step.layout import Layout, count_padded_groups, keep_batch, lay_out
from liger_rl.step.memory import count_kept_layers
from liger_rl.step.ranks import UNLIMITED, Agreement, agree
from liger_rl.step.reason import Reason
from liger_rl.step.sequences import Sequences, TokenBatch, read_sequences
from liger_rl.step.trial import RunModel, apply_known_trials, find_needed_trial, run_trial

# Of a forward that is kept before its backward is known, the host has a half and the device a third of what both have.
HOST_SHARE = 1.5
ENOUGH_TOKENS = {"cuda": 16384}  # of a micro-batch that is kept, where `host_tokens` is not known
KEPT_ELSEWHERE = Reason("another rank has a reason to keep its packed sequences as they are")


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What a step is planned from."""

    model: Any  # of transformers
    wrapper: nn.Module  # the model or what is around it
    facts: Facts  # of the batch, by `fit_facts`
    batch: TokenBatch
    run_rows: RunModel  # for trials
    weights: Tensor | None = None  # (B, T) or (B, 1), factors of the gradient; None: every row may have a gradient
    labels: Tensor | None = None  # (B, T), of a call that brings them
    share: float = 0.0  # of the free memory that activations may take
    max_tokens: int | None = None  # of a micro-batch, which may not be exceeded
    runs_idle: bool = True  # sequences without a gradient run
    one_micro_batch: Reason | None = None
    pairs: bool = False
    enough_tokens: float = math.inf  # of `lay_out`
    # Of a call for several micro-batches: their rows and columns, and how many live tokens may keep activations.
    shapes: Sequence[tuple[int, int]] = ()
    activation_tokens: int | None = None


class Plan(NamedTuple):
    """What a rank runs."""

    layout: Layout
    live_forwards: int  # with a graph, of each rank
    idle_forwards: int | None  # without a graph, of each rank; None: those of the layout
    kept_layers: int | None  # that keep their activations; None: as many as fit here
    in_parts: bool  # the live micro-batches do not fit into memory together


def plan_step(prepare: Callable[[], StepInputs], rank_groups: Sequence[Any], device: torch.device) -> Plan:
    """The plan of a step. If `prepare` raises an error on one rank, all raise it.

    `rank_groups`: process groups of ranks that run the model together. `device`: where they agree, of one type on all.
    """
    inputs: StepInputs | None = None
    while True:
        wanted, problem, layout, in_parts = Agreement(), None, None, False
        try:
            inputs = prepare() if inputs is None else inputs
            facts = apply_known_trials(inputs.model, inputs.facts)
            sequences = read_sequences(inputs.batch, facts, weights=inputs.weights, labels=inputs.labels)
            padded_groups = _count_groups(inputs, facts, sequences)
            layout, in_parts = _lay_out(inputs, facts, sequences, padded_groups)
            wanted = _make_agreement(inputs, facts, sequences, layout, padded_groups, bool(rank_groups))
        except Exception as error:
            if not rank_groups:
                raise
            problem = error
        agreed = agree(rank_groups, wanted, device, problem=problem)
        assert inputs is not None
        assert layout is not None
        if agreed.trial:
            run_trial(inputs.run_rows, inputs.model, facts, agreed.trial)
            continue
        if not rank_groups:
            return Plan(layout, len(layout.live), None, None, in_parts)
        if agreed.refuses and layout.has_trees:  # as it is, each of its micro-batches has a forward
            layout = keep_batch(sequences, facts, KEPT_ELSEWHERE)
        equal = agreed.padded_groups if agreed.capacity >= agreed.padded_groups else 1
        if inputs.shapes and len(layout.live) != equal:
            layout = lay_out(sequences, facts, padded_groups=equal)
        kept_layers = None if agreed.kept_layers == UNLIMITED else agreed.kept_layers
        return Plan(layout, agreed.live_forwards, agreed.idle_forwards, kept_layers, in_parts)


def _make_agreement(
    inputs: StepInputs, facts: Facts, sequences: Sequences, layout: Layout, padded_groups: int, has_groups: bool
) -> Agreement:
    trial = find_needed_trial(inputs.model, facts, has_trees=layout.has_trees)
    if not has_groups:
        return Agreement(trial=trial)
    is_fixed = layout.has_trees or sequences.obstacle is not None or facts.packed is not None
    tokens = max(micro.tokens for micro in layout.live)
    if inputs.shapes and facts.packed is None:
        # All live micro-batches run before the backward; another rank may want one group of rows.
        tokens = layout.live_tokens if padded_groups == 1 else lay_out(sequences, facts).live_tokens
    kept = count_kept_layers(inputs.wrapper, tokens, inputs.share)
    return Agreement(
        live_forwards=len(layout.live),
        idle_forwards=len(layout.idle),
        padded_groups=1 if is_fixed else padded_groups,
        capacity=1 if is_fixed else sum(len(micro.lengths) for micro in layout.live),
        kept_layers=UNLIMITED if kept is None else kept,
        trial=trial,
        refuses=facts.packed is not None and len(inputs.shapes) > 1 and not layout.has_trees,
    )


def _count_groups(inputs: StepInputs, facts: Facts, sequences: Sequences) -> int:
    if facts.has_reentrant_checkpoints or sequences.obstacle is not None:
        return 1
    if facts.packed is not None:
        return max(len(inputs.shapes), 1)
    return count_padded_groups(sequences, [rows for rows, _ in inputs.shapes])


def _lay_out(inputs: StepInputs, facts: Facts, sequences: Sequences, padded_groups: int) -> tuple[Layout, bool]:
    """The layout, and whether its live micro-batches are parts that do not fit into memory together."""
    most = _count_activation_tokens(inputs, facts, sequences)
    # With the idle sequences there may be too many. Where every layer is recomputed, these would be, too.
    apart = replace(facts, host_tokens=0.0)
    for own in (facts, apart) if facts.host_tokens and inputs.share else (apart,):
        layout = lay_out(
            sequences, own, max_tokens=inputs.max_tokens, runs_idle=inputs.runs_idle,
            one_micro_batch=inputs.one_micro_batch, pairs=inputs.pairs, padded_groups=padded_groups,
            enough_tokens=inputs.enough_tokens,
        )  # fmt: skip
        if layout.live_tokens <= most:
            return layout, False
    layout = lay_out(sequences, facts, max_tokens=int(most))
    return layout, layout.live_tokens > most


def count_enough_tokens(facts: Facts) -> float:
    """Of a forward that is kept for a backward, which leaves out micro-batches that turn out to have no gradient."""
    return HOST_SHARE * facts.host_tokens or ENOUGH_TOKENS.get(facts.device.type, 0)


def _count_activation_tokens(inputs: StepInputs, facts: Facts, sequences: Sequences) -> float:
    """How many live tokens may keep activations: at least those of the largest micro-batch, as TRL would run it."""
    is_alone = len(inputs.shapes) <= 1 or sequences.obstacle is not None
    if inputs.activation_tokens is None or is_alone or facts.has_reentrant_checkpoints or facts.sharding is not None:
        return math.inf
    row, most = 0, inputs.activation_tokens
    for rows, columns in inputs.shapes:
        longest = max((span.length for span in sequences.spans[row : row + rows]), default=0)
        longest = columns if facts.packed is not None else longest
        most, row = max(most, rows * longest), row + rows
    return most
