"""Per-token divergence of a student's next-token distribution from a teacher's: the public function."""

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from liger_rl.call.checks import check_dense, check_shape
from liger_rl.call.keywords import named_keywords
from liger_rl.call.low_rank import LowRank
from liger_rl.call.options import IDENTITY, Gather, HeadOptions
from liger_rl.distributed import VocabParallel
from liger_rl.engines.graphs import never_in_a_graph
from liger_rl.engines.pair.run import BETA, Divergence, DivergenceCall, divergence_of, measure_of
from liger_rl.kernels.transform import LogitTransform

__all__ = ["Divergence", "linear_divergence"]


@named_keywords
@never_in_a_graph
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: Literal["forward_kl", "reverse_kl", "jsd", "tv"] = "forward_kl",
    beta: float = BETA,
    mask: Tensor | None = None,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    low_rank: Sequence[LowRank] = (),
    token_weights: Tensor | None = None,
    vocab_parallel: VocabParallel | None = None,
    teacher_transform: LogitTransform = IDENTITY,
    vocab: int | None = None,
    student_ids: Tensor | None = None,
    teacher_lse: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    lse: bool = False,
    topk: int | None = None,
    extras: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    fixed_shape: bool = False,
) -> Divergence:
    """Per-token divergence of a student's distribution from a teacher's, without either's logits in memory.

    With the student's p, the teacher's q, and KL(a || b) = sum_v a_v (log a_v - log b_v):

        forward_kl   KL(q || p)
        reverse_kl   KL(p || q)
        jsd          beta KL(q || m) + (1 - beta) KL(p || m),  m = (1 - beta) p + beta q
        tv           sum_v |p_v - q_v| / 2

    "jsd" is that of arXiv:2306.13649. Only hidden, weight, bias and low_rank are differentiable.

    Args:
        hidden, weight, mask, bias, low_rank: the student's, as in `linear_logprobs`.
        teacher_hidden: (B, T, H') or (N, H'), for the same tokens.
        teacher_weight, teacher_bias: (V', H') and (V',). V' = V without `vocab` and student_ids.
        kind, beta: `beta`, in [0, 1], is for "jsd" alone: KL(q || p) at 0, KL(p || q) at 1.
        targets: (B, T) or (N,) ids in [0, V), for their log-probabilities. A negative id masks its token.
        token_weights: (B, T) or (N,), no gradient: factors in loss = sum(token_weights * divergence), whose gradients
            one pass makes in the forward. 0 masks.
        vocab_parallel: this rank's place in two heads sharded alike.
        teacher_transform: as `transform`, which is the student's.
        vocab: number of rows of both weights before padding.
        student_ids: (V,) the teacher's id of each row of `weight`, a draft head. Its rows are copied after a host
            sync, renormalised.
        teacher_lse: (B, T) or (N,), for "tv": the teacher's lse over its whole vocabulary, not renormalised.
        transform, entropy, lse, topk, extras, compute_dtype, gather: the fields of `HeadOptions`.
        chunk_tokens, chunk_vocab, fixed_shape: also fields.

    Returns:
        Divergence. With token_weights only the loss has gradients.

    Raises:
        TypeError, ValueError: as `linear_logprobs`; also for extras, lse or topk, and for a teacher's
            tensor that requires a gradient.
        torch._dynamo.exc.Unsupported: under torch.compile(fullgraph=True).
    """
    measure = measure_of(kind, beta)
    if student_ids is not None:
        if vocab is not None or vocab_parallel is not None or gather is not None:
            raise ValueError("vocab, vocab_parallel and gather must be None with student_ids")
        teacher_weight, teacher_bias = _rows_of(student_ids, weight, teacher_weight, teacher_bias)
    options = HeadOptions(
        transform=transform, entropy=entropy, lse=lse, topk=topk, extras=extras, compute_dtype=compute_dtype,
        gather=gather, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab, fixed_shape=fixed_shape,
    )  # fmt: skip
    return divergence_of(
        DivergenceCall(
            hidden=hidden, weight=weight, bias=bias, low_rank=low_rank, teacher_hidden=teacher_hidden,
            teacher_weight=teacher_weight, teacher_bias=teacher_bias, teacher_transform=teacher_transform,
            measure=measure, mask=mask, targets=targets, vocab=vocab, token_weights=token_weights,
            vocab_parallel=vocab_parallel, options=options, teacher_lse=teacher_lse,
        )
    )  # fmt: skip


def _rows_of(ids: Tensor, weight: Tensor, teacher_weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows `ids` (V,) of the teacher's head."""
    for name, tensor in (("weight", weight), ("teacher_weight", teacher_weight), ("student_ids", ids)):
        check_dense(name, tensor, weight, "weight")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"student_ids must be integers, got {ids.dtype}")
    check_shape("student_ids", ids, weight.shape[:1], f"(V,) = ({weight.shape[0]},) from weight")
    if ids.numel() and not bool(((ids >= 0) & (ids < teacher_weight.shape[0])).all()):
        raise ValueError(f"student_ids must be in [0, {teacher_weight.shape[0]}) from teacher_weight")
    return teacher_weight[ids.long()], None if bias is None else bias[ids.long()]
