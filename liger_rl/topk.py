"""Distillation from a teacher's lists of likely ids: the public function."""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from liger_rl.call.checks import check_dense, check_floating
from liger_rl.call.dtensors import is_dtensor, low_rank_tensors
from liger_rl.call.head_call import HeadCall, LogProbs, shared_errors
from liger_rl.call.keywords import named_keywords
from liger_rl.call.low_rank import LowRank
from liger_rl.call.options import IDENTITY, Gather, HeadOptions, Tolerance
from liger_rl.call.tokens import counted_tokens
from liger_rl.distributed import VocabParallel
from liger_rl.engines.run import log_probs_and_mask
from liger_rl.kernels.transform import LogitTransform

Tail = Literal["bucket", "none", "renormalized"]
TAILS: tuple[str, ...] = get_args(Tail)
LARGEST_LOG_MASS = -1e-7  # TRL's bound of the listed ids' log mass: the log-probability of all other ids is then finite


class TopKDivergence(NamedTuple):
    """Per-token results of `topk_divergence`."""

    divergence: Tensor  # (B, T) or (N,) float32 in nats, differentiable, 0 at masked tokens
    student: LogProbs  # log-probabilities (..., K) of the teacher's ids, and the results that `options` ask for


@named_keywords
def topk_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_logps: Tensor,
    *,
    tail: Tail = "bucket",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    low_rank: Sequence[LowRank] = (),
    weight_grad: Tensor | None = None,
    vocab_parallel: VocabParallel | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    lse: bool = False,
    topk: int | None = None,
    extras: Collection[str] = (),
    grad_tolerance: Tolerance = "auto",
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    fixed_shape: bool = False,
    batch_invariant: bool = False,
) -> TopKDivergence:
    """Forward KL divergence of a student from a teacher with known log-probabilities at K ids of each token.

    With q_k the teacher's probabilities of its ids and p_k the student's, both over the whole vocabulary:

        bucket         sum_k q_k (log q_k - log p_k) + q' (log q' - log p'),  q' = 1 - sum_k q_k,  p' = 1 - sum_k p_k
        none           sum_k q_k (log q_k - log p_k)
        renormalized   sum_k u_k (log u_k - log v_k),  u_k = q_k / sum_j q_j,  v_k = p_k / sum_j p_j

    "bucket" is the divergence over K + 1 outcomes, a lower bound of the divergence over the whole vocabulary. "none"
    may be negative, and does not see where the student puts the mass of all other ids. docs/targets.md has other
    systems' names of the three.

    Args:
        hidden, weight, mask, bias, low_rank, weight_grad, vocab_parallel: as in `linear_logprobs`.
        teacher_ids: (B, T, K) or (N, K) integer ids in [0, V), distinct within a token. Negative ids are left out, so
            lists may differ in length. A token with only negative ids is masked.
        teacher_logps: shaped like teacher_ids, float32, bfloat16 or float16, no gradient: log-probabilities in nats,
            over the whole vocabulary. -inf is a probability of 0. Values at negative ids and masked tokens are ignored.
        tail: how all other ids count, as above.
        transform, entropy, lse, topk, extras, grad_tolerance, compute_dtype, gather: the fields of `HeadOptions`.
        chunk_tokens, chunk_vocab, fixed_shape, batch_invariant: the same.

    Returns:
        TopKDivergence(divergence, student). The divergence is infinite if the student gives probability 0 to an id with
            q_k > 0.

    Raises:
        ValueError: as `linear_logprobs` with several targets; also for teacher_logps that require a gradient, and for a
            DTensor among teacher_ids, teacher_logps and mask.
    """
    tensors = hidden, teacher_ids, mask, bias, *low_rank_tensors(low_rank)
    with shared_errors(vocab_parallel, weight, *tensors):
        head_options = HeadOptions(
            transform=transform, entropy=entropy, lse=lse, topk=topk, extras=extras, grad_tolerance=grad_tolerance,
            compute_dtype=compute_dtype, gather=gather, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab,
            fixed_shape=fixed_shape, batch_invariant=batch_invariant,
        )  # fmt: skip
        for name, tensor in (("teacher_ids", teacher_ids), ("teacher_logps", teacher_logps), ("mask", mask)):
            if is_dtensor(tensor):
                raise ValueError(f"{name} must be no DTensor; call full_tensor()")
        _check_teacher(teacher_ids, teacher_logps, tail)
    call = HeadCall(
        hidden=hidden, weight=weight, targets=teacher_ids, mask=mask, bias=bias, low_rank=low_rank,
        vocab_parallel=vocab_parallel, weight_grad=weight_grad, options=head_options, targets_name="teacher_ids",
        may_be_several=True,
    )  # fmt: skip
    student, counted = log_probs_and_mask(call)
    listed = counted_tokens(teacher_ids, None if mask is None else mask[..., None])
    if counted is not None:
        listed = listed & counted.view(*student.logps.shape[:-1], 1)  # with fixed_shape, an id outside [0, V) masks
    # A token with NaN may have no gradient, and 0 * NaN is NaN in the backward of `_forward_kl`. A sum's has no NaN.
    undefined = student.logps.isnan().any(-1)
    logps = student.logps.masked_fill(undefined[..., None], 0.0)
    divergence = _forward_kl(logps, teacher_logps.float(), listed, tail)
    return TopKDivergence(torch.where(undefined, student.logps.sum(-1), divergence), student)


def _check_teacher(teacher_ids: Tensor, teacher_logps: Tensor, tail: str) -> None:
    if not isinstance(tail, str) or tail not in TAILS:
        raise ValueError(f"tail must be one of {list(TAILS)}, got {tail!r}")
    check_floating("teacher_logps", teacher_logps)
    if not isinstance(teacher_ids, Tensor) or teacher_ids.dim() < 2:
        description = tuple(teacher_ids.shape) if isinstance(teacher_ids, Tensor) else type(teacher_ids).__name__
        raise ValueError(f"teacher_ids must be a tensor (N, K) or (B, T, K), got {description}")
    if teacher_logps.shape != teacher_ids.shape:
        raise ValueError(
            f"teacher_logps must be {tuple(teacher_ids.shape)} from teacher_ids, got {tuple(teacher_logps.shape)}"
        )
    check_dense("teacher_logps", teacher_logps, teacher_ids, "teacher_ids")
    if teacher_logps.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "teacher_logps must require no gradient, because only the student's side gets one; detach them"
        )


def _forward_kl(logps: Tensor, teacher_logps: Tensor, listed: Tensor, tail: str) -> Tensor:
    """(..., K) each -> (...) in nats, 0 if a token lists no id. `listed` is bool."""
    log_probs = [torch.where(listed, values, -torch.inf) for values in (logps, teacher_logps)]
    if tail == "bucket":
        log_probs = [torch.cat([values, _log_rest(values)], dim=-1) for values in log_probs]
    elif tail == "renormalized":
        log_probs = [values - values.logsumexp(-1, keepdim=True) for values in log_probs]
    log_p, log_q = log_probs
    q = log_q.exp()
    return torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)


def _log_rest(log_p: Tensor) -> Tensor:
    """Log-probabilities (..., K) -> (..., 1): log(1 - sum_k p_k), with the sum at most exp(LARGEST_LOG_MASS)."""
    return torch.log(-torch.expm1(log_p.logsumexp(-1, keepdim=True).clamp(max=LARGEST_LOG_MASS)))
