"""Per-token divergence of a student's next-token distribution from a teacher's: the public function."""

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from liger_rl.distill.pair_call import BETA, Divergence, DivergenceCall, compute_divergence, make_measure
from liger_rl.distributed import VocabParallel
from liger_rl.head.head_options import IDENTITY, Gather, HeadOptions
from liger_rl.kernels.public_call import public
from liger_rl.kernels.transform import LogitTransform

__all__ = ["Divergence", "linear_divergence"]


@public
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl",
    beta: float = BETA,
    mask: Tensor | None = None,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    vocab_parallel: VocabParallel | None = None,
    teacher_transform: LogitTransform = IDENTITY,
    vocab: int | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    lse: bool = False,
    extras: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> Divergence:
    """Per-token divergence of a student's distribution from a teacher's, without either's logits in memory.

    With the student's p, the teacher's q, and KL(a || b) = sum_v a_v (log a_v - log b_v):

        forward_kl   KL(q || p)
        reverse_kl   KL(p || q)
        jsd          beta KL(q || m) + (1 - beta) KL(p || m),  m = (1 - beta) p + beta q

    "jsd" is that of arXiv:2306.13649. Only hidden, weight and bias are differentiable.

    Args:
        hidden, weight, mask, bias: the student's, as in `linear_logprobs`.
        teacher_hidden: (B, T, H') or (N, H'), for the same tokens.
        teacher_weight, teacher_bias: (V', H') and (V',). V' = V without `vocab`.
        kind, beta: `beta`, in [0, 1], is for "jsd" alone: KL(q || p) at 0, KL(p || q) at 1.
        targets: (B, T) or (N,) ids in [0, V), for their log-probabilities. A negative id masks its token.
        token_weights: (B, T) or (N,), no gradient: factors in loss = sum(token_weights * divergence), whose gradients
            one pass makes in the forward. 0 masks.
        vocab_parallel: this rank's place in two heads sharded alike.
        teacher_transform: as `transform`, which is the student's.
        vocab: number of rows of both weights before padding.
        transform, entropy, lse, extras, compute_dtype, gather: the fields of `HeadOptions`.
        chunk_tokens, chunk_vocab: also fields.

    Returns:
        Divergence. With token_weights only the loss has gradients.

    Raises:
        TypeError, ValueError: as `linear_logprobs`; also for extras or lse, and for a teacher's tensor
            that requires a gradient.
    """
    measure = make_measure(kind, beta)
    options = HeadOptions(
        transform=transform, entropy=entropy, lse=lse, extras=extras, compute_dtype=compute_dtype,
        gather=gather, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab,
    )  # fmt: skip
    return compute_divergence(
        DivergenceCall(
            hidden=hidden, weight=weight, bias=bias, teacher_hidden=teacher_hidden,
            teacher_weight=teacher_weight, teacher_bias=teacher_bias, teacher_transform=teacher_transform,
            measure=measure, mask=mask, targets=targets, vocab=vocab, token_weights=token_weights,
            vocab_parallel=vocab_parallel, options=options,
        )
    )  # fmt: skip
