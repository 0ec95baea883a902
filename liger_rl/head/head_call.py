"""A call of the head: its tensors and options, and their checks."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.head.checks import check_head, check_tokens
from liger_rl.head.head_options import HeadOptions
from liger_rl.head.rules import check_left_alone
from liger_rl.head.support import Support
from liger_rl.kernels.transform import check_type

MOST_IDS = 1024  # for each token: a kernel program holds all of a token's ids and compares each pair


class LogProbs(NamedTuple):
    """Per-token results, float32, shaped like the tokens (B, T) or (N,), 0 at masked tokens."""

    logps: Tensor
    """Log-probability of the target in nats, <= 0, differentiable. With K targets (..., K), 0 at negative ids."""
    entropy: Tensor | None
    """Entropy of the token's distribution in nats, >= 0, differentiable; None unless asked for."""
    log_sum_sq_probs: Tensor | None = None
    """log sum_v p_v^2, <= 0, no gradient; None unless named in `extras`, as are mean_logits and is_top1."""
    mean_logits: Tensor | None = None
    """Mean over the vocabulary of the transformed logits, differentiable."""
    is_top1: Tensor | None = None
    """bool: the target is the smallest of the ids with the largest logit. False at masked tokens."""
    missing_target: Tensor | None = None
    """bool: the token's row of the support lists ids, but not the target, which was added; None without a support."""
    lse: Tensor | None = None
    """log sum_v exp z_v of the transformed logits, differentiable; None unless asked for."""
    topk_logps: Tensor | None = None
    """(..., K) the K largest log-probabilities in descending order, differentiable; None unless asked for."""
    topk_ids: Tensor | None = None
    """(..., K) int64: the ids of topk_logps, the smaller first if two are equally likely, -1 at masked tokens."""


@dataclass(frozen=True, kw_only=True)
class HeadCall:
    """The tensors and options of a call.

    Attributes:
        support: the call computes logits only at the listed ids, and no product with the whole vocabulary, except for
            tokens with an empty row.
    """

    hidden: Tensor  # (B, T, H) or (N, H)
    weight: Tensor  # (V, H), or this rank's rows of it
    targets: Tensor  # (B, T) or (N,); if `may_be_several`, also K ids for each token, (B, T, K) or (N, K)
    mask: Tensor | None = None  # (B, T) or (N,)
    bias: Tensor | None = None  # (V,)
    vocab_parallel: VocabParallel | None = None
    # Shaped like mask or (B, 1): 0 where no log-probability is needed. The token's id is validated even there.
    needed_mask: Tensor | None = None
    support: Support | None = None
    options: HeadOptions
    targets_name: str = "targets"  # the caller's name for the targets, for messages
    may_be_several: bool = False

    @property
    def several(self) -> bool:
        """Whether each token has a list of targets."""
        tensors = isinstance(self.targets, Tensor) and isinstance(self.hidden, Tensor)
        return self.may_be_several and tensors and self.targets.dim() == self.hidden.dim()

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        """Whether hidden, weight and bias want a gradient."""
        enabled, bias = torch.is_grad_enabled(), self.bias is not None and self.bias.requires_grad
        return enabled and self.hidden.requires_grad, enabled and self.weight.requires_grad, enabled and bias

    @property
    def exact(self) -> bool:
        """Whether a tolerance of "auto" becomes 0, because an argument of the call excludes a tolerance."""
        return self.several or self.support is not None or self.vocab_parallel is not None

    def check_together(self) -> None:
        """Raise for options and arguments that exclude each other."""
        for used, feature in (
            (self.vocab_parallel is not None, "with vocab_parallel"),
            (self.support is not None, "with a support"),
            (self.several, "with several targets for each token"),
        ):
            if used:
                check_left_alone(self.options, feature)
        if self.support is not None:
            check_type("support", self.support, Support, "a Support or None")
            if self.several:
                raise ValueError("support must be None with several targets for each token, got a Support")
            if self.vocab_parallel is not None:
                raise ValueError(
                    "support must be None with vocab_parallel: no rank has all listed rows of a sharded weight; "
                    "got a Support"
                )
        if self.several and "is_top1" in self.options.extras:
            raise ValueError("is_top1 must not be among extras with several targets for each token; topk=1 has the id")

    def check_tensors(self) -> torch.dtype:
        """Check types, dtypes, shapes and devices of the tensors. No value is read. -> dtype of the products."""
        hidden, weight = self.hidden, self.weight
        if self.vocab_parallel is not None:
            check_type("vocab_parallel", self.vocab_parallel, VocabParallel, "a VocabParallel or None")
        dtype = check_head(hidden, weight, self.bias, self.options.compute_dtype)
        first = self._first_targets() if self.several else self.targets
        check_tokens(first, self.mask, hidden.shape[:-1], hidden, "hidden", self.targets_name)
        if isinstance(self.support, Support):
            self.support.check_together(first, self.targets_name)
        return dtype

    def _first_targets(self) -> Tensor:
        """The first of K targets of each token. Raises if the targets are not (..., K) with 1 <= K <= MOST_IDS."""
        targets, lead = self.targets, self.hidden.shape[:-1]
        if targets.shape[:-1] != lead or not 1 <= targets.shape[-1] <= MOST_IDS:
            expected = "(B, T)" if len(lead) == 2 else "(N,)"
            raise ValueError(
                f"{self.targets_name} must be {expected} = {tuple(lead)} from hidden, or with K ids for each token, K "
                f"from 1 to {MOST_IDS}, ({', '.join(map(str, lead))}, K), got {tuple(targets.shape)}"
            )
        return targets[..., 0]


def check_topk(topk: int | None, vocab: int) -> None:
    if topk is not None and topk > min(vocab, MOST_IDS):
        raise ValueError(
            f"topk must be at most {MOST_IDS}, and at most the {vocab} vocabulary entries of weight; got {topk}"
        )
