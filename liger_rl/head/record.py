"""The one record of a call, `Head`: plain tensors of this rank and options, checked once; and what a call returns."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.distributed import VocabParallel, VocabShard
from liger_rl.head.checks import check_head, check_tokens
from liger_rl.head.head_options import MOST_IDS, HeadOptions
from liger_rl.kernels import reference
from liger_rl.kernels.argument_checks import check_type
from liger_rl.kernels.devices import align_rows


class LogProbs(NamedTuple):
    """Per-token results, float32, shaped like the tokens (B, T) or (N,), 0 at masked tokens."""

    logps: Tensor
    """Log-probability of the target in nats, <= 0, differentiable. With K targets (..., K), 0 at negative ids."""
    entropy: Tensor | None = None
    """Entropy of the token's distribution in nats, >= 0, differentiable; None unless asked for."""
    log_sum_sq_probs: Tensor | None = None
    """log sum_v p_v^2, <= 0, no gradient; None unless named in `extras`, as are mean_logits and is_top1."""
    mean_logits: Tensor | None = None
    """Mean over the vocabulary of the transformed logits, differentiable."""
    is_top1: Tensor | None = None
    """bool: the target is the smallest of the ids with the largest logit. False at masked tokens."""
    lse: Tensor | None = None
    """log sum_v exp z_v of the transformed logits, differentiable; None unless asked for."""


class Head(NamedTuple):
    """A call of the head: the factors of its logits, transform(hidden @ weight.T + bias), tokens and options."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H); with a shard this rank's rows
    bias: Tensor | None  # (V,)
    targets: Tensor  # (N,) or, with K targets for each token, (N, K): int64 ids of the whole vocabulary
    options: HeadOptions
    dtype: torch.dtype  # of the factors of the products
    shape: torch.Size  # of the tokens, (B, T) or (N,)
    mask: Tensor | None = None  # shaped (B, T) or (N,)
    # Shaped like mask or (B, 1): 0 where no log-probability is needed. The token's id is validated even there.
    needed: Tensor | None = None
    live: Tensor | None = None  # (n,) index of the tokens that count, once they are selected; None: all N
    vocab_parallel: VocabParallel | None = None  # of a sharded vocabulary
    shard: VocabShard | None = None  # once `with_shard` has made it
    weight_dtype: torch.dtype | None = None  # dtype of the weight's gradient, if `weight` is a copy in another dtype
    targets_name: str = "targets"  # the caller's name for the targets, for messages

    @classmethod
    def of(
        cls,
        hidden: Tensor,  # (B, T, H) or (N, H)
        weight: Tensor,  # (V, H)
        targets: Tensor,  # (B, T) or (N,)
        options: HeadOptions,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        vocab_parallel: VocabParallel | None = None,
        several: bool = False,  # whether targets may be (B, T, K) or (N, K)
        targets_name: str = "targets",
    ) -> "Head":
        """The record of a call, whose tensors and options are checked. No value is read, and there is no collective."""
        dtype = check_head(hidden, weight, bias, options.compute_dtype)
        shape, first_targets = hidden.shape[:-1], targets
        several = several and isinstance(targets, Tensor) and targets.dim() == hidden.dim()
        if several:
            first_targets = _check_several(targets, shape, options, targets_name)
        check_tokens(first_targets, mask, shape, hidden, "hidden", targets_name)
        if vocab_parallel is not None:
            check_type("vocab_parallel", vocab_parallel, VocabParallel, "a VocabParallel or None")
        return cls(
            hidden.flatten(0, -2), weight, bias,
            # A narrow dtype would wrap the vocabulary's size in comparisons.
            targets.long().contiguous().view(-1, *targets.shape[len(shape) :]),
            options, dtype, shape, mask, vocab_parallel=vocab_parallel, targets_name=targets_name,
        )  # fmt: skip

    def with_shard(self) -> "Head":
        """The head with its shard, if the vocabulary is sharded. The first call with a weight is a collective."""
        if self.vocab_parallel is None:
            return self
        return self._replace(shard=self.vocab_parallel.shard_of(self.weight))

    @property
    def vocab(self) -> int:
        """Entries of the whole vocabulary."""
        return self.weight.shape[0] if self.shard is None else self.shard.vocab

    @property
    def ids(self) -> Tensor:
        """(B, T) or (N,): each token's target; of K targets the largest.

        It is negative if all K are, and outside the vocabulary if any is too large.
        """
        targets = self.targets.amax(1) if self.targets.dim() == 2 else self.targets
        return targets.view(self.shape)

    @property
    def target_rows(self) -> Tensor:
        """The targets as rows of `weight`; a target of another shard is outside of them."""
        return self.targets if self.shard is None else self.shard.local(self.targets)

    @property
    def live_count(self) -> int:
        """Number of tokens that count."""
        return self.hidden.shape[0] if self.live is None else self.live.numel()

    @property
    def needs(self) -> "Needs":
        """Whether hidden, weight and bias want a gradient."""
        if not torch.is_grad_enabled():
            return False, False, False
        bias = self.bias is not None and self.bias.requires_grad
        return self.hidden.requires_grad, self.weight.requires_grad, bias

    def take(self, live: Tensor | None) -> "Head":
        """The head of only the tokens `live`, which all count; hidden is contiguous in `dtype`, and aligned."""
        hidden, targets = self.hidden, self.targets
        if live is not None:
            hidden, targets = hidden[live], targets[live]
        return self._replace(hidden=align_rows(hidden.to(self.dtype).contiguous()), targets=targets, live=None)

    def with_weight_in(self, dtype: torch.dtype) -> "Head":
        """The head with its weight in `dtype`. A converted weight is contiguous, as our own product needs it."""
        copy = self.weight.to(dtype, memory_format=torch.contiguous_format)
        return self._replace(weight=copy, weight_dtype=self.weight.dtype)


Needs = tuple[bool, bool, bool]  # for each field of `Gradients`: whether it is needed


class Gradients(NamedTuple):
    """Gradients of a head's tensors. None for a gradient that is not needed."""

    hidden: Tensor | None = None  # (N, H)
    weight: Tensor | None = None  # (V, H)
    bias: Tensor | None = None  # (V,)

    def of_all_tokens(self, live: Tensor | None, head: Head) -> "Gradients":
        """Float32 rows of the tokens in `live` -> rows of all N tokens in the dtype of hidden, 0 elsewhere."""
        if self.hidden is None or live is None:
            return self if self.hidden is None else self._replace(hidden=self.hidden.to(head.hidden.dtype))
        out = torch.zeros(head.hidden.shape, dtype=head.hidden.dtype, device=head.hidden.device)
        reference.write_rows(self.hidden, live, out)
        return self._replace(hidden=out)


def gather_head(options: HeadOptions, weight: Tensor, bias: Tensor | None) -> AbstractContextManager:
    """The context in which weight and bias are whole. Without a `gather` they are whole already."""
    gather = options.gather
    if gather is None:
        return nullcontext()
    return gather(weight) if bias is None else gather(weight, bias)


def _check_several(targets: Tensor, shape: torch.Size, options: HeadOptions, name: str) -> Tensor:
    """Raise unless the targets are (..., K) with 1 <= K <= MOST_IDS. -> the first target of each token."""
    if "is_top1" in options.extras:
        raise ValueError("is_top1 must not be among extras with several targets for each token")
    if targets.shape[:-1] != shape or not 1 <= targets.shape[-1] <= MOST_IDS:
        expected = "(B, T)" if len(shape) == 2 else "(N,)"
        raise ValueError(
            f"{name} must be {expected} = {tuple(shape)} from hidden, or with K ids for each token, K "
            f"from 1 to {MOST_IDS}, ({', '.join(map(str, shape))}, K), got {tuple(targets.shape)}"
        )
    return targets[..., 0]
