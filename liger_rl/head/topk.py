"""Distillation over lists of likely ids, of the teacher or of the student: the public functions."""

from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.head.checks import check_constant, check_dense, check_floating, check_integers
from liger_rl.head.head_options import IDENTITY, Gather, HeadOptions
from liger_rl.head.live_tokens import find_counted
from liger_rl.head.logprobs import log_probs
from liger_rl.head.pair.pair_call import BETA, make_measure
from liger_rl.head.pair.pair_reference import FORWARD, REVERSE, Measure
from liger_rl.head.record import Head, LogProbs, gather_head
from liger_rl.kernels.argument_checks import check_choice
from liger_rl.kernels.public_call import public
from liger_rl.kernels.reference import LOWEST_LOG_PROBABILITY
from liger_rl.kernels.transform import LogitTransform

Tail = Literal["bucket", "none", "renormalized"]
TAILS: tuple[str, ...] = get_args(Tail)
Lists = Literal["teacher", "student", "union"]
LISTS: tuple[str, ...] = get_args(Lists)
Kind = Literal["forward_kl", "reverse_kl", "jsd"]
LARGEST_LOG_MASS = -1e-7  # TRL's bound of the listed ids' log mass: the log-probability of all other ids is then finite


class TopKDivergence(NamedTuple):
    """Per-token results of `topk_divergence`, with lists of L ids."""

    divergence: Tensor  # (B, T) or (N,) float32 in nats, differentiable, 0 at masked tokens
    student: LogProbs  # log-probabilities of `teacher_ids`, if they are given, and the results that `options` ask for
    ids: Tensor  # (..., L) int64, negative where nothing is listed
    logps: Tensor  # (..., L) the student's log-probabilities of these ids, differentiable
    teacher_logps: Tensor  # (..., L) the teacher's


@public
def topk_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor | None,
    teacher_logps: Tensor | Callable[[Tensor], Tensor],
    *,
    lists: Lists = "teacher",
    kind: Kind = "forward_kl",
    beta: float = BETA,
    tail: Tail = "bucket",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    vocab_parallel: VocabParallel | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    lse: bool = False,
    topk: int | None = None,
    extras: Collection[str] = (),
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> TopKDivergence:
    """Divergence of a student from a teacher over a list of ids of each token, from one forward of the student's head.

    The lists are the teacher's, the student's `topk` likeliest ids, or both. `list_divergence` has the formulas.

    Args:
        hidden, weight, mask, bias, vocab_parallel: as in `linear_logprobs`.
        teacher_ids: (B, T, K) or (N, K) integer ids in [0, V), distinct within a token. Negative ids are left out, so
            lists may differ in length. A token with only negative ids is masked. None with lists="student".
        teacher_logps: shaped like teacher_ids, float32, bfloat16 or float16, no gradient: log-probabilities in nats,
            over the whole vocabulary. -inf is a probability of 0. Values at negative ids and masked tokens are ignored.
            Or a function from ids (..., L) to their log-probabilities, such as
            `lambda ids: linear_logprobs(teacher_hidden, teacher_weight, ids, mask=mask).logps`; it runs without
            gradients, after the student's forward.
        lists: "teacher", "student" or "union". With the last two, `topk` is the length of the student's lists, and
            teacher_logps is a function.
        kind, beta, tail: as in `list_divergence`.
        transform, entropy, lse, topk, extras, compute_dtype, gather: the fields of `HeadOptions`.
        chunk_tokens, chunk_vocab: the same.

    Returns:
        TopKDivergence.

    Raises:
        ValueError: as `linear_logprobs` with several targets; also for teacher_logps that require a gradient.
    """
    head_options = HeadOptions(
        transform=transform, entropy=entropy, lse=lse, topk=topk, extras=extras, compute_dtype=compute_dtype,
        gather=gather, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab,
    )  # fmt: skip
    measure = _check_formula(kind, beta, tail)
    check_dense("hidden", hidden)
    _check_lists(lists, topk, teacher_ids, teacher_logps, hidden)
    targets = teacher_ids
    if targets is None:
        targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    with gather_head(head_options, weight, bias):
        student = log_probs(
            Head.of(
                hidden, weight, targets, head_options, mask=mask, bias=bias, vocab_parallel=vocab_parallel,
                several=True, targets_name="teacher_ids",
            )
        )  # fmt: skip
    ids, logps = _join_lists(student, teacher_ids, lists)
    listed = find_counted(ids, None if mask is None else mask[..., None])
    if not isinstance(teacher_logps, Tensor):
        with torch.no_grad():
            teacher_logps = _check_floats("teacher_logps(ids)", teacher_logps(ids), ids, "ids").detach()
    # A token with NaN may have no gradient, and 0 * NaN is NaN in the backward of the formula. The backward of the sum
    # has no NaN.
    undefined = logps.isnan().any(-1)
    divergence = _compute_divergence(
        logps.masked_fill(undefined[..., None], 0.0), teacher_logps.float(), listed, measure, tail
    )  # fmt: skip
    return TopKDivergence(torch.where(undefined, logps.sum(-1), divergence), student, ids, logps, teacher_logps)


def list_divergence(
    logps: Tensor,
    teacher_logps: Tensor,
    *,
    ids: Tensor | None = None,
    kind: Kind = "forward_kl",
    beta: float = BETA,
    tail: Tail = "bucket",
) -> Tensor:
    """Divergence of a student from a teacher, from both log-probabilities of a list of ids of each token.

    With p_k the student's probabilities of the listed ids and q_k the teacher's, both over the whole vocabulary, `tail`
    makes two lists u (teacher) and v (student) of them:

        bucket         u = (q_1, ..., q_K, 1 - sum_k q_k), and v alike from p
        none           u = q, v = p
        renormalized   u_k = q_k / sum_j q_j, and v alike

    and with m = (1 - beta) v + beta u the divergence is

        forward_kl   sum u (log u - log v)
        reverse_kl   sum v (log v - log u)
        jsd          beta sum u (log u - log m) + (1 - beta) sum v (log v - log m)

    "bucket" is the divergence over K + 1 outcomes, a lower bound of the divergence over the whole vocabulary. With
    "none", a KL divergence may be negative, because u and v do not sum to 1. "renormalized" ignores the mass of the
    other ids. docs/distillation.md has other systems' names.

    Args:
        logps, teacher_logps: (..., K) floats in nats, of distinct ids, over the whole vocabulary. -inf is a probability
            of 0. The gradient is that of logps.
        ids: (..., K); a negative id is not listed, whatever its log-probabilities. None: all are listed.
        kind, tail: as above.
        beta: for "jsd" alone, in [0, 1]; 0 is the forward KL, 1 the reverse KL.

    Returns:
        (...) in nats, float32 or float64; 0 for a token that lists nothing. A KL divergence is infinite if its second
            distribution gives probability 0 to an id that the first one has.
    """
    measure = _check_formula(kind, beta, tail)
    _check_floats("logps", logps, logps, "")
    _check_floats("teacher_logps", teacher_logps, logps, "logps")
    dtype = torch.promote_types(logps.dtype, torch.float32)
    if ids is not None:
        check_integers("ids", ids)
        check_dense("ids", ids, logps, "logps")
        if ids.shape != logps.shape:
            raise ValueError(f"ids must be {tuple(logps.shape)} from logps, got {tuple(ids.shape)}")
    listed = torch.ones_like(logps, dtype=torch.bool) if ids is None else ids >= 0
    return _compute_divergence(logps.to(dtype), teacher_logps.detach().to(dtype), listed, measure, tail)


def _check_formula(kind: str, beta: float, tail: str) -> Measure:
    check_choice("tail", tail, TAILS)
    return make_measure(kind, beta)


def _check_lists(lists: str, topk: int | None, teacher_ids: Tensor | None, teacher_logps: Any, hidden: Tensor) -> None:
    check_choice("lists", lists, LISTS)
    if lists != "teacher" and topk is None:
        raise ValueError(f"topk must be the length of the student's lists with lists={lists!r}, got None")
    if (teacher_ids is None) != (lists == "student"):
        raise ValueError(f"teacher_ids must be {'None' if lists == 'student' else 'given'} with lists={lists!r}")
    if teacher_ids is not None and check_dense("teacher_ids", teacher_ids).dim() != hidden.dim():
        expected = "(B, T, K)" if hidden.dim() == 3 else "(N, K)"
        raise ValueError(
            f"teacher_ids must be {expected} with hidden {tuple(hidden.shape)}, got {tuple(teacher_ids.shape)}"
        )
    if callable(teacher_logps):
        return
    if lists != "teacher":
        raise TypeError(f"teacher_logps must be a function of ids with lists={lists!r}, which the student makes")
    assert teacher_ids is not None
    check_floating("teacher_logps", teacher_logps, teacher_ids, "teacher_ids")
    logps = _check_floats("teacher_logps", teacher_logps, teacher_ids, "teacher_ids")
    check_constant("teacher_logps", logps)


def _check_floats(name: str, tensor: Any, like: Tensor, source: str) -> Tensor:
    if not check_dense(name, tensor).is_floating_point():
        raise TypeError(f"{name} must be a floating tensor, got {tensor.dtype}")
    if tensor.shape != like.shape:
        raise ValueError(f"{name} must be {tuple(like.shape)} from {source}, got {tuple(tensor.shape)}")
    return tensor


def _join_lists(student: LogProbs, teacher_ids: Tensor | None, lists: str) -> tuple[Tensor, Tensor]:
    """(..., L) ids, negative where nothing is listed, and the student's log-probabilities of them."""
    if lists == "teacher":
        assert teacher_ids is not None
        return teacher_ids.long(), student.logps
    assert student.topk_ids is not None
    assert student.topk_logps is not None
    if teacher_ids is None:
        return student.topk_ids, student.topk_logps
    repeated = (student.topk_ids[..., :, None] == teacher_ids[..., None, :]).any(-1)
    ids = torch.cat([teacher_ids.long(), student.topk_ids.masked_fill(repeated, -1)], -1)
    return ids, torch.cat([student.logps, student.topk_logps], -1)


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
