"""What every engine is given and gives back.

An engine is a module with

    Saved                                                      a NamedTuple of tensors, what its backward needs
    forward(head, options) -> statistics, saved                of the tokens that count; None for a Saved of nothing
    backward(head, options, statistics, saved, tokens, needs)  -> Gradients

and both run without autocast and autograd, with the weight whole. An engine of `choose.ENGINES` also has

    lacks(shape)                                               what it would need; None if it takes the call
    workspace(shape)                                           bytes apart from inputs, results and gradients, at most

One whose backward reads other `tokens` than
`TokenGradients.of` makes has a `tokens_of` in its place.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.call.options import EngineOptions, Gather
from liger_rl.call.support_slots import ListedIds
from liger_rl.call.tokens import TokenSelection
from liger_rl.distributed import VocabShard
from liger_rl.kernels import for_device
from liger_rl.kernels.devices import realigned
from liger_rl.kernels.statistics import TokenGradients
from liger_rl.kernels.transform import LogitTransform


class Head(NamedTuple):
    """The tensors that logits are made of, flat and on this rank, and which of the tokens count."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    low_inputs: Tensor | None  # (N, r), and
    low_weight: Tensor | None  # (V, r): the product of the two is added to the logits
    targets: Tensor  # (N,); (N, K) of several, ids of the whole vocabulary even beside a shard
    live: TokenSelection
    weight_grad: Tensor | None = None  # (V, H) float32: where the weight's gradient is added, instead of returned
    shard: VocabShard | None = None  # where the weight is a part of the vocabulary; targets are rows of it
    temperatures: Tensor | None = None  # (N,) float32, where tokens have their own
    listed: ListedIds | None = None  # for the support engine; targets are ids of the vocabulary
    weight_dtype: torch.dtype | None = None  # of the weight's gradient, where `weight` is a copy in another

    @property
    def vocab(self) -> int:
        """Entries of the whole vocabulary."""
        return self.weight.shape[0] if self.shard is None else self.shard.vocab

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """What gradients are for, in the order of `Gradients`."""
        return self.hidden, self.weight, self.bias, self.low_inputs, self.low_weight

    @property
    def wants_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in self.differentiable)

    def gathered(self, dtype: torch.dtype, live: TokenSelection | None = None) -> "Head":
        """A head of the tokens that count, or of `live`, alone, with hidden states in `dtype`."""
        live = live or self.live
        low_inputs = None if self.low_inputs is None else gathered(self.low_inputs, live, self.low_inputs.dtype)
        hidden, targets = gathered(self.hidden, live, dtype), live.gather(self.targets)
        temperatures = self.temperatures
        if temperatures is not None:  # 1 and not 0 where a mask leaves a token in its place: logits are divided by it
            given, temperatures = temperatures, live.gather(temperatures)
            if live.mask is not None:
                temperatures = torch.where(live.mask, given, 1.0)
        every = TokenSelection(hidden.shape[0])
        return self._replace(
            hidden=hidden, low_inputs=low_inputs, targets=targets, live=every, temperatures=temperatures
        )

    def with_weight_in(self, dtype: torch.dtype) -> "Head":
        """With a copy of a weight that is in another dtype, laid out as the product of our own needs it."""
        if self.weight.dtype == dtype:
            return self
        copy = self.weight.to(dtype, memory_format=torch.contiguous_format)
        return self._replace(weight=copy, weight_dtype=self.weight.dtype)

    def transform(self, options: EngineOptions, rows: slice) -> LogitTransform:
        """Of some of the rows."""
        return options.transform.of_tokens(None if self.temperatures is None else self.temperatures[rows])


def gathered(values: Tensor, live: TokenSelection, dtype: torch.dtype) -> Tensor:
    """The rows that count in `dtype`, where the product of our own can read them."""
    return realigned(live.gather(values).to(dtype).contiguous())


class Gradients(NamedTuple):
    """Of what the head is made of; None where not asked for."""

    hidden: Tensor | None = None  # (N, H)
    weight: Tensor | None = None  # (V, H); also None where it went to `weight_grad`
    bias: Tensor | None = None  # (V,)
    low_inputs: Tensor | None = None  # (N, r)
    low_weight: Tensor | None = None  # (V, r)

    def of_all_tokens(self, live: TokenSelection, head: Head) -> "Gradients":
        """Float32 rows (n, ...) of the tokens in `live` -> rows of all N tokens, in their dtypes, 0 elsewhere."""
        found: list[Tensor | None] = []
        for rows, like in ((self.hidden, head.hidden), (self.low_inputs, head.low_inputs)):
            if rows is None or like is None or live.index is None:
                found.append(None if rows is None or like is None else rows.to(like.dtype))
                continue
            out = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            for_device(like.device).scatter_rows(rows, live.index, out)
            found.append(out)
        return self._replace(hidden=found[0], low_inputs=found[1])


Needs = tuple[bool, ...]  # which of `Gradients` are asked for


def with_gradient(
    live: TokenSelection, tokens: TokenGradients, count: int | None = None
) -> tuple[TokenSelection, TokenGradients]:
    """The live tokens whose gradient is not exactly zero; one host sync, unless `live` is a mask or `count` known."""
    if live.mask is not None:
        live = live.restricted(has_gradient(tokens))
        assert live.mask is not None
        return live, tokens._replace(wanted=None).silenced(live.mask)
    picked, tokens = picked_rows(has_gradient(tokens), count), tokens._replace(wanted=None)
    return (live, tokens) if picked is None else (live.among(picked), tokens.take(picked))


def has_gradient(tokens: TokenGradients) -> Tensor:
    """(n,) bool: the gradient is not exactly zero; true for NaN, which must reach the gradients and not be dropped."""
    wanted = tokens.grad_logps != 0 if tokens.wanted is None else tokens.wanted
    return wanted if tokens.grad_entropy is None else wanted | (tokens.grad_entropy != 0)


def picked_rows(wanted: Tensor, count: int | None = None) -> Tensor | None:
    """Index of the tokens that are wanted, None for all of them; one host sync, unless their `count` is known."""
    if count is None:
        index = wanted.nonzero().squeeze(1)
    elif count == wanted.numel():
        return None
    else:
        index = torch.sort(wanted.logical_not().to(torch.uint8), stable=True).indices[:count]
    return None if index.numel() == wanted.numel() else index


def whole_head(gather: Gather | None, weight: Tensor, bias: Tensor | None) -> AbstractContextManager:
    """The context in which weight and bias are whole, where they are sharded outside of it."""
    if gather is None:
        return nullcontext()
    return gather(weight) if bias is None else gather(weight, bias)
