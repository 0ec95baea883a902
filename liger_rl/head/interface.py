"""The interface of engines: their inputs, their results, and helpers that several engines share.

An engine is a module with

    Saved                                                      NamedTuple of tensors that its backward reads
    forward(head, options) -> statistics, saved                of the tokens that count; saved may be None
    backward(head, options, statistics, saved, tokens, needs)  -> Gradients

An engine whose `saved` is always None defines no `Saved`. Both functions run without autocast and autograd, with the
whole weight. An engine of `plan.ENGINES` also has

    lacks(shape)                                               the engine's first need; None if it takes the call

`dense.one_pass` has a function `one_pass` in place of `forward` and `backward`. An engine may define `tokens_of`, to
replace `TokenGradients.of`, if its backward needs other per-token inputs. An engine with `topk` defines `with_topk`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.distributed import VocabShard
from liger_rl.head.head_options import Gather
from liger_rl.head.live_tokens import TokenSelection
from liger_rl.head.support import ListedIds
from liger_rl.kernels import reference
from liger_rl.kernels.devices import align_rows
from liger_rl.kernels.statistics import TokenGradients


class Head(NamedTuple):
    """The factors of the logits on this rank, tokens flattened to N, and the selection of tokens that count.

    logits = hidden @ weight.T + bias, (N, V).
    """

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (N,), or (N, K) if each token has K targets; see `shard` for the ids
    live: TokenSelection
    # Set if the weight holds a part of the vocabulary. Targets (N,) are then rows of the weight, (N, K) are global ids.
    shard: VocabShard | None = None
    listed: ListedIds | None = None  # for the support engine
    weight_dtype: torch.dtype | None = None  # dtype of the weight's gradient, if `weight` is a copy in another dtype

    @property
    def vocab(self) -> int:
        """Entries of the whole vocabulary."""
        return self.weight.shape[0] if self.shard is None else self.shard.vocab

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The three tensors that may need a gradient, in the order of `Gradients`."""
        return self.hidden, self.weight, self.bias

    @property
    def wants_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in self.differentiable)

    def gathered(self, dtype: torch.dtype, live: TokenSelection | None = None) -> "Head":
        """The head of only the tokens in `live` (None: the head's own `live`), with hidden states in `dtype`."""
        live = live or self.live
        hidden, targets = gathered(self.hidden, live, dtype), live.gather(self.targets)
        all_rows = TokenSelection(hidden.shape[0])
        return self._replace(hidden=hidden, targets=targets, live=all_rows)

    def with_weight_in(self, dtype: torch.dtype) -> "Head":
        """The head with its weight in `dtype`. A converted weight is contiguous, as our own product needs it."""
        if self.weight.dtype == dtype:
            return self
        copy = self.weight.to(dtype, memory_format=torch.contiguous_format)
        return self._replace(weight=copy, weight_dtype=self.weight.dtype)


def gathered(values: Tensor, live: TokenSelection, dtype: torch.dtype) -> Tensor:
    """The rows of `live` in `dtype`, contiguous and aligned for our own product."""
    return align_rows(live.gather(values).to(dtype).contiguous())


class Gradients(NamedTuple):
    """Gradients of the head's three tensors. None for a gradient that is not needed."""

    hidden: Tensor | None = None  # (N, H)
    weight: Tensor | None = None  # (V, H)
    bias: Tensor | None = None  # (V,)

    def of_all_tokens(self, live: TokenSelection, head: Head) -> "Gradients":
        """The gradient of hidden, float32 rows (n, H) of the tokens in `live` -> (N, H) in its dtype, 0 elsewhere."""
        rows, like = self.hidden, head.hidden
        if rows is None:
            return self
        if live.index is None:
            return self._replace(hidden=rows.to(like.dtype))
        out = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        reference.scatter_rows(rows, live.index, out)
        return self._replace(hidden=out)


Needs = tuple[bool, ...]  # for each field of `Gradients`: whether it is needed


def with_gradient(
    live: TokenSelection,
    tokens: Any,  # `TokenGradients`, or the `PairGradients` of two heads
    selected: Tensor,  # (n,) bool: the gradient is not exactly zero
    count: int | None = None,  # number of `selected` tokens, if the caller knows it
) -> tuple[TokenSelection, Any]:
    """The live tokens that are `selected`. One host sync, unless `count` is given."""
    picked = picked_rows(selected, count)
    return (live, tokens) if picked is None else (live.among(picked), tokens.take(picked))


def has_gradient(tokens: TokenGradients) -> Tensor:
    """(n,) bool: the gradient is not exactly zero. A NaN is true, because it must reach the gradients."""
    nonzero = tokens.grad_logps != 0 if tokens.has_gradient is None else tokens.has_gradient
    for grad in (tokens.grad_entropy, tokens.uniform):
        nonzero = nonzero if grad is None else nonzero | (grad != 0)
    return nonzero


def picked_rows(selected: Tensor, count: int | None = None) -> Tensor | None:
    """Index (count,) of the tokens where `selected` (n,) is true; None if it is true everywhere.

    It takes one host sync, unless the `count` of these tokens is given.
    """
    if count is None:
        index = selected.nonzero().squeeze(1)
    elif count == selected.numel():
        return None
    else:
        index = torch.sort(selected.logical_not().to(torch.uint8), stable=True).indices[:count]
    return None if index.numel() == selected.numel() else index


def whole_head(gather: Gather | None, weight: Tensor, bias: Tensor | None) -> AbstractContextManager:
    """The context in which weight and bias are whole. Without a `gather` they are whole already."""
    if gather is None:
        return nullcontext()
    return gather(weight) if bias is None else gather(weight, bias)
