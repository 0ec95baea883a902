"""A policy loss whose gradients are made in the forward: when that is possible, when it pays, and how it is done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from liger_rl.distributed import VocabParallel
from liger_rl.dtensors import is_dtensor
from liger_rl.logprobs import spread
from liger_rl.one_pass import OnePassPlan, WithGradients, chunk_capacity, one_pass, plan_one_pass
from liger_rl.policy.loss import Locality, PolicyLoss, PreparedLoss
from liger_rl.projection import ProjectionOptions, kind_of
from liger_rl.tokens import live_tokens

Passes = Literal["auto", "one", "two"]
PASSES: tuple[str, ...] = get_args(Passes)

# Each chunk reads and writes a sum of the weight's size: under so many tokens that costs more than the product saved.
MIN_CHUNK_TOKENS = {"cuda": 512, "cpu": 256}
# Rows are picked, which waits for the device once a chunk, from this share of tokens on that cannot have a gradient.
SELECTED_SHARE = 0.05


@dataclass(frozen=True)
class Head:
    """The tensors of a call, their shapes already checked."""

    hidden: Tensor  # (B, T, H) or (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (B, T) or (N,)

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        """Gradients wanted, for hidden, weight and bias."""
        wanted = torch.is_grad_enabled()
        bias = self.bias is not None and self.bias.requires_grad
        return wanted and self.hidden.requires_grad, wanted and self.weight.requires_grad, wanted and bias

    def capacity(self, options: ProjectionOptions, *, summed: bool = True) -> int:
        """Tokens that a chunk may hold; without `summed`, beside a float32 sum of the weight's gradient."""
        vocab, hidden_size = self.weight.shape
        summed = summed and self.needs[1]
        return chunk_capacity(vocab, hidden_size, self.weight.dtype, self.hidden.device, options, summed=summed)

    def plan(self, tokens: int, options: ProjectionOptions, *, together: int = 1) -> OnePassPlan:
        (vocab, hidden_size), dtype, device = self.weight.shape, self.weight.dtype, self.hidden.device
        wanted = self.needs[1]
        return plan_one_pass(tokens, vocab, hidden_size, dtype, device, options, needs_weight=wanted, together=together)


def obstacle(
    head: Head,
    prepared: PreparedLoss,
    options: ProjectionOptions,
    low_rank: Sequence[Any],
    vocab_parallel: VocabParallel | None,
    grad_tolerance: float,
    *,
    fixed_shape: bool = False,
    max_extra_bytes: int | None = None,
) -> str | None:
    """What one pass would need and does not have, None where nothing is missing. Shapes decide, no device is asked."""
    if grad_tolerance != 0.0:
        return f"grad_tolerance = 0.0, got {grad_tolerance}: blocks are left out of a second pass"
    if fixed_shape:
        return "fixed_shape = False: the host has to know which rows make a chunk"
    if options.batch_invariant:
        return "batch_invariant = False: the tiles of a chunk depend on how many tokens it holds"
    if max_extra_bytes is not None:
        return (
            f"max_extra_bytes = None, got {max_extra_bytes}: a chunk holds the whole vocabulary and needs room for it"
        )
    if options.compute_dtype == torch.float16:
        return "bfloat16 or float32 products: gradients that are made before the loss is scaled vanish in float16"
    if torch.compiler.is_compiling():
        return "a call outside torch.compile, which traces gradients in the backward"
    if low_rank:
        return "a head without low_rank terms"
    if vocab_parallel is not None:
        return "vocab_parallel = None: no rank has the logits of the whole vocabulary"
    if any(map(is_dtensor, (head.hidden, head.weight, head.bias, head.targets))):
        return "tensors that are whole on this rank, got a DTensor"
    terms, segments = prepared.terms, prepared.batch.segments
    for part in (terms.objective, *terms.corrections):
        if not hasattr(part, "token_local"):
            return f"a token_local attribute that says what the gradient of {_name(part)} depends on"
        if isinstance(part, nn.Module) and any(parameter.requires_grad for parameter in part.parameters()):
            return f"no parameters that want a gradient of their own in {_name(part)}"
    if terms.locality != "token" and segments is not None and segments.all_reduce is not None:
        return "whole sequences on each rank; segments.all_reduce says that they are split"
    return _lack_of_room(head, terms.locality, options)


def _lack_of_room(head: Head, locality: Locality, options: ProjectionOptions) -> str | None:
    tokens, room = head.targets.numel(), head.capacity(options)
    in_place = options.weight_grad is not None
    by_rows = locality == "sequence" and head.targets.dim() == 2
    if tokens <= room or (locality == "token" and not in_place):
        return None
    if by_rows and not in_place:
        room, length = head.capacity(options, summed=False), head.targets.shape[1]
        return None if length <= room else f"room for a sequence of {length} tokens in a chunk, which holds {room}"
    why = "weight_grad" if in_place else "a loss whose gradient depends on more than one token or padded sequence"
    return f"room for all {tokens} tokens in one chunk with {why}; it holds {room}, unless chunk_tokens says more"


def _name(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__)


def worthwhile(head: Head, options: ProjectionOptions) -> bool:
    """Whether one pass is the better way where nothing stands against it.

    A gradient is wanted, no chunk is named (a named one bounds a tile, where one pass holds the whole vocabulary), and
    chunks of the budget are large enough.
    """
    if not any(head.needs) or options.chunk_tokens is not None or options.chunk_vocab is not None:
        return False
    enough = min(MIN_CHUNK_TOKENS[kind_of(head.hidden.device)], head.targets.numel())
    return head.capacity(options, summed=head.targets.numel() <= head.capacity(options)) >= enough


def loss_in_one_pass(head: Head, prepared: PreparedLoss, options: ProjectionOptions) -> PolicyLoss:
    """As the loss of the log-probabilities of `linear_logprobs`, with the gradients already made.

    One host sync counts the live tokens; where many of them can have no gradient, one more a chunk picks the others.
    """
    shape = head.targets.shape
    flat_hidden, flat_targets = head.hidden.reshape(-1, head.hidden.shape[-1]), head.targets.reshape(-1).long()
    mask = prepared.batch.mask
    in_rows = prepared.terms.locality == "sequence" and len(shape) == 2
    counts = [prepared.may_have_gradient().sum()[None]]
    if in_rows:
        counts.append(mask.sum(1))
    live = live_tokens(flat_targets, mask, head.weight.shape[0], "weight", torch.cat(counts))
    n, (hopeful, *row_counts) = live.positions.numel(), live.counts
    index = live.selection
    plan = head.plan(n, options, together=max([1, *row_counts]))
    if n <= plan.chunk_tokens:
        chunks = [slice(0, n)] if n else []
    elif in_rows:
        chunks = _whole_rows(row_counts, plan.chunk_tokens)
    else:
        chunks = [slice(first, min(first + plan.chunk_tokens, n)) for first in range(0, n, plan.chunk_tokens)]
    whole = _Whole(prepared, index, shape)
    parts = _Parts(prepared, live.positions)
    found = one_pass(
        flat_hidden, head.weight, head.bias, flat_targets, index, chunks, whole if len(chunks) == 1 else parts,
        options, plan, head.needs, select=hopeful < (1 - SELECTED_SHARE) * n,
    )  # fmt: skip
    loss, metrics = whole.result or whole.evaluate(found.logps, found.entropy)
    loss = WithGradients.apply(loss.detach(), head.hidden, head.weight, head.bias, found.gradients, options.weight_grad)
    return PolicyLoss(loss, metrics)


def _whole_rows(counts: Sequence[int], chunk_tokens: int) -> list[slice]:
    """Spans of the live tokens of successive rows, no row in two of them, none longer than `chunk_tokens`."""
    chunks, first, last = [], 0, 0
    for count in counts:
        if last + count - first > chunk_tokens:
            chunks.append(slice(first, last))
            first = last
        last += count
    return [*chunks, slice(first, last)]


class _Whole:
    """The loss of all tokens: its gradients where one chunk holds them all, and its value in any case."""

    def __init__(self, prepared: PreparedLoss, index: Tensor | None, shape: torch.Size) -> None:
        self.prepared, self.index, self.shape = prepared, index, shape
        self.result: PolicyLoss | None = None

    def evaluate(self, logps: Tensor, entropy: Tensor | None) -> PolicyLoss:
        entropy = None if entropy is None else spread(entropy, self.index, self.shape)
        return self.prepared.evaluate(spread(logps, self.index, self.shape), entropy)

    def __call__(self, _chunk: slice, logps: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        def loss(logps: Tensor, entropy: Tensor | None) -> Tensor:
            self.result = self.evaluate(logps, entropy)
            return self.result.loss

        return _gradients(loss, logps, entropy)


class _Parts:
    """The gradients of a loss that is the sum of its chunks' parts."""

    def __init__(self, prepared: PreparedLoss, positions: Tensor) -> None:
        self.prepared, self.positions = prepared, positions

    def __call__(self, chunk: slice, logps: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        part = self.prepared.take(self.positions[chunk])
        return _gradients(lambda *values: part.evaluate(*values).loss, logps, entropy)


@torch.enable_grad()
def _gradients(
    loss: Callable[[Tensor, Tensor | None], Tensor], logps: Tensor, entropy: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Of loss(logps, entropy); None for an entropy that it does not depend on."""
    leaves = [values.detach().requires_grad_() for values in (logps, entropy) if values is not None]
    value = loss(leaves[0], leaves[1] if len(leaves) > 1 else None)
    if not value.requires_grad:
        return torch.zeros_like(logps), None
    grad_logps, *others = torch.autograd.grad(value, leaves, allow_unused=True)
    return torch.zeros_like(logps) if grad_logps is None else grad_logps, others[0] if others else None
