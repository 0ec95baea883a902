"""Divergence of a student from lists of likely ids, such as a teacher's: the public function."""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from liger_rl.distill.divergence import BETA, Kind, make_measure
from liger_rl.distill.pair_reference import FORWARD, REVERSE, Measure
from liger_rl.distributed import VocabParallel
from liger_rl.head.checks import check_constant, check_dense, check_floating, check_shape
from liger_rl.head.head_options import IDENTITY, Gather, HeadOptions
from liger_rl.head.live_tokens import find_counted
from liger_rl.head.logprobs import log_probs
from liger_rl.head.record import Head, LogProbs, gather_head
from liger_rl.kernels.argument_checks import check_choice
from liger_rl.kernels.public_call import public
from liger_rl.kernels.reference import LOWEST_LOG_PROBABILITY
from liger_rl.kernels.transform import LogitTransform

Tail = Literal["bucket", "none", "renormalized"]
TAILS: tuple[str, ...] = get_args(Tail)
LARGEST_LOG_MASS = -1e-7  # TRL's bound of the listed ids' log mass: the log-probability of all other ids is then finite


class TopKDivergence(NamedTuple):
    """Per-token results of `topk_divergence`."""

    divergence: Tensor  # (B, T) or (N,) float32 in nats, differentiable, 0 at masked tokens
    student: LogProbs  # log-probabilities of `teacher_ids`, and the results that `options` ask for


@public
def topk_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_logps: Tensor,
    *,
    kind: Kind = "forward_kl",
    beta: float = BETA,
    tail: Tail = "bucket",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    vocab_parallel: VocabParallel | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    lse: bool = False,
    extras: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
) -> TopKDivergence:
    """Divergence of a student from a teacher over a list of ids of each token.

    With p_k the student's and q_k the teacher's probabilities of the listed ids, over the whole vocabulary, `tail`
    makes two lists u (teacher) and v (student):

        bucket         u = (q_1, ..., q_K, 1 - sum_k q_k), and v alike from p
        none           u = q, v = p
        renormalized   u_k = q_k / sum_j q_j, and v alike

    and with m = (1 - beta) v + beta u the divergence is

        forward_kl   sum u (log u - log v)
        reverse_kl   sum v (log v - log u)
        jsd          beta sum u (log u - log m) + (1 - beta) sum v (log v - log m)

    "bucket" is a lower bound of the divergence over the whole vocabulary. With "none", a KL divergence may be negative,
    because u and v do not sum to 1. docs/distillation.md has other systems' names.

    Args:
        hidden, weight, mask, bias, vocab_parallel: as in `linear_logprobs`.
        teacher_ids: (B, T, K) or (N, K) integer ids in [0, V), distinct within a token. Negative ids are left out, so
            lists may differ in length. A token with only negative ids is masked.
        teacher_logps: shaped like teacher_ids, float32, bfloat16 or float16, no gradient: log-probabilities in nats,
            over the whole vocabulary, -inf for a probability of 0, ignored at negative ids.
        kind, tail: as above.
        beta: for "jsd" alone, in [0, 1]; 0 is the forward KL, 1 the reverse KL.
        transform, entropy, lse, extras, compute_dtype, gather: the fields of `HeadOptions`.

    Returns:
        TopKDivergence. A KL divergence is infinite if its second distribution gives probability 0 to an id that the
            first one has.

    Raises:
        ValueError: as `linear_logprobs` with several targets; also for teacher_logps that require a gradient.
    """
    head_options = HeadOptions(
        transform=transform, entropy=entropy, lse=lse, extras=extras, compute_dtype=compute_dtype, gather=gather
    )
    check_choice("tail", tail, TAILS)
    measure = make_measure(kind, beta)
    check_dense("hidden", hidden)
    _check_lists(teacher_ids, teacher_logps, hidden)
    with gather_head(head_options, weight, bias):
        student = log_probs(
            Head.of(
                hidden, weight, teacher_ids, head_options, mask=mask, bias=bias, vocab_parallel=vocab_parallel,
                several=True, targets_name="teacher_ids",
            )
        )  # fmt: skip
    logps, listed = student.logps, find_counted(teacher_ids, None if mask is None else mask[..., None])
    # A token with NaN may have no gradient, and 0 * NaN is NaN in the backward of the formula. The backward of the sum
    # has no NaN.
    undefined = logps.isnan().any(-1)
    divergence = _compute_divergence(
        logps.masked_fill(undefined[..., None], 0.0), teacher_logps.float(), listed, measure, tail
    )  # fmt: skip
    return TopKDivergence(torch.where(undefined, logps.sum(-1), divergence), student)


def _check_lists(teacher_ids: Tensor, teacher_logps: Any, hidden: Tensor) -> None:
    if check_dense("teacher_ids", teacher_ids).dim() != hidden.dim():
        expected = "(B, T, K)" if hidden.dim() == 3 else "(N, K)"
        raise ValueError(
            f"teacher_ids must be {expected} with hidden {tuple(hidden.shape)}, got {tuple(teacher_ids.shape)}"
        )
    check_floating("teacher_logps", teacher_logps, teacher_ids, "teacher_ids")
    shape = teacher_ids.shape
    check_shape("teacher_logps", teacher_logps, shape, f"{tuple(shape)} from teacher_ids")
    check_constant("teacher_logps", teacher_logps)


def _compute_divergence(logps: Tensor, teacher_logps: Tensor, listed: Tensor, measure: Measure, tail: str) -> Tensor:
    """(..., K) each -> (...) in nats, 0 if a token lists no id. `listed` is bool."""
    # A finite number, because -inf less -inf is NaN. Its exponential is 0.
    log_probs = [torch.where(listed, values, LOWEST_LOG_PROBABILITY) for values in (logps, teacher_logps)]
    if tail == "renormalized":
        # A token that lists nothing has a finite sum all the same, for the backward.
        left_out = ~listed & listed.any(-1, keepdim=True)
        sums = [values.masked_fill(left_out, -torch.inf).logsumexp(-1, keepdim=True) for values in log_probs]
        log_probs = [
            torch.where(listed, values - total, LOWEST_LOG_PROBABILITY)
            for values, total in zip(log_probs, sums, strict=True)
        ]
    elif tail == "bucket":
        log_probs = [torch.cat([values, _log_unlisted_mass(values)], dim=-1) for values in log_probs]
    log_p, log_q = log_probs
    if measure.kind == FORWARD:
        return _relative_entropy(log_q, log_p)
    if measure.kind == REVERSE:
        return _relative_entropy(log_p, log_q)
    p, q = log_p.exp(), log_q.exp()
    log_m = ((1 - measure.beta) * p + measure.beta * q).clamp(min=torch.finfo(p.dtype).tiny).log()
    return measure.beta * _relative_entropy(log_q, log_m) + (1 - measure.beta) * _relative_entropy(log_p, log_m)


def _relative_entropy(log_a: Tensor, log_b: Tensor) -> Tensor:
    """sum a (log a - log b), where an id with a = 0 adds nothing and has no gradient."""
    a = log_a.exp()
    # 0 * inf is NaN in the backward, too.
    gap = torch.where(a > 0, log_a, 0.0) - torch.where(a > 0, log_b, 0.0)
    return (a * gap).sum(-1)


def _log_unlisted_mass(log_p: Tensor) -> Tensor:
    """Log-probabilities (..., K) -> (..., 1): log(1 - sum_k p_k), with the sum at most exp(LARGEST_LOG_MASS)."""
    return torch.log(-torch.expm1(log_p.logsumexp(-1, keepdim=True).clamp(max=LARGEST_LOG_MASS)))
