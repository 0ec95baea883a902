"""Per-token divergence of a student's next-token distribution from a teacher's: two heads, in two passes or in one."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from liger_rl.distill import two_heads
from liger_rl.distill.pair_reference import FORWARD, MIXTURE, REVERSE, Measure, PairGradients, PairStatistics
from liger_rl.distill.totals import WithGradients
from liger_rl.distill.two_heads import Pair
from liger_rl.head.checks import check_constant, check_dense, check_head, check_transform
from liger_rl.head.head_options import IDENTITY, Gather, HeadOptions
from liger_rl.head.live_tokens import scatter_rows, start_selection
from liger_rl.head.record import Head, gather_head
from liger_rl.kernels import gemm
from liger_rl.kernels.argument_checks import check_choice, check_number
from liger_rl.kernels.public_call import outside_of_graphs, public, refuse_second_derivative
from liger_rl.kernels.transform import LogitTransform

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
KINDS: tuple[str, ...] = get_args(Kind)
BETA = 0.5


class Divergence(NamedTuple):
    """Per-token results, float32, shaped like the tokens, 0 at masked tokens."""

    divergence: Tensor
    """Divergence in nats, >= 0, differentiable."""
    entropy: Tensor
    """Entropy of the student's distribution in nats, >= 0, no gradient."""


@public
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: Kind = "forward_kl",
    beta: float = BETA,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    teacher_transform: LogitTransform = IDENTITY,
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
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
        teacher_weight, teacher_bias: (V, H') and (V,).
        kind, beta: `beta`, in [0, 1], is for "jsd" alone: KL(q || p) at 0, KL(p || q) at 1.
        transform, teacher_transform: the student's and the teacher's `LogitTransform`.
        compute_dtype, gather: the fields of `HeadOptions`.

    Returns:
        Divergence.

    Raises:
        TypeError, ValueError: as `linear_logprobs`; also for a teacher's tensor that requires a gradient.
    """
    measure = make_measure(kind, beta)
    check_transform(teacher_transform)
    for name, tensor in (("hidden", teacher_hidden), ("weight", teacher_weight), ("bias", teacher_bias)):
        check_constant(f"teacher_{name}", tensor)
    options = HeadOptions(transform=transform, compute_dtype=compute_dtype, gather=gather)
    call = DivergenceCall(
        hidden=hidden, weight=weight, bias=bias, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight,
        teacher_bias=teacher_bias, teacher_transform=teacher_transform, measure=measure, mask=mask, options=options,
    )  # fmt: skip
    with _pair_heads(call) as pair:
        return _run_two_passes(pair)


def make_measure(kind: str, beta: float) -> Measure:
    """The measure of a kind. "jsd" with beta 0 is the forward KL divergence, with beta 1 the reverse."""
    check_choice("kind", kind, KINDS)
    check_number("beta", beta)
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    if kind != "jsd":
        if beta != BETA:
            raise ValueError(f'beta is an option of kind="jsd" alone, got {beta} with kind={kind!r}')
        return Measure({"forward_kl": FORWARD, "reverse_kl": REVERSE}[kind])
    # Kernels take beta in float32, where a beta very near to 0 or 1 is 0 or 1.
    (float32_beta,) = struct.unpack("f", struct.pack("f", beta))
    if float32_beta in (0.0, 1.0):
        return Measure(FORWARD if float32_beta == 0.0 else REVERSE)
    return Measure(MIXTURE, float32_beta)


class DivergenceCall(NamedTuple):
    """The tensors and options of a call, as the caller gives them."""

    hidden: Tensor  # (B, T, H) or (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    teacher_hidden: Tensor  # (B, T, H') or (N, H')
    teacher_weight: Tensor  # (V, H')
    teacher_bias: Tensor | None  # (V,)
    teacher_transform: LogitTransform
    measure: Measure
    mask: Tensor | None  # (B, T) or (N,)
    options: HeadOptions  # of both heads, with the student's transform

    def make_student(self) -> Head:
        """The student's record. A divergence has no targets, so its ids are zeros."""
        hidden = check_dense("hidden", self.hidden)
        ids = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        return Head.of(hidden, self.weight, ids, self.options, mask=self.mask, bias=self.bias)

    def make_teacher(self, student: Head) -> Head:
        """The teacher's record, its tensors checked and detached."""
        hidden, weight, bias = self.teacher_hidden, self.teacher_weight, self.teacher_bias
        dtype = check_head(hidden, weight, bias, self.options.compute_dtype, "teacher_")
        if hidden.shape[:-1] != student.shape:
            raise ValueError(
                f"teacher_hidden must have the tokens {tuple(student.shape)} of hidden, got {tuple(hidden.shape)}"
            )
        check_dense("teacher_hidden", hidden, student.hidden, "hidden")
        entries, teacher_entries = student.weight.shape[0], weight.shape[0]
        if entries != teacher_entries:
            raise ValueError(
                f"teacher_weight must have the {entries} vocabulary entries of weight, got {teacher_entries}; where "
                "rows are padding, pass weight[:V] and teacher_weight[:V]"
            )
        options = replace(self.options, transform=self.teacher_transform)
        return student._replace(
            hidden=hidden.flatten(0, -2).detach(), weight=weight, bias=bias, dtype=dtype, options=options
        )


@contextmanager
def _pair_heads(call: DivergenceCall) -> Iterator[Pair]:
    """A context in which both heads are whole: the two heads, with the tokens that count."""
    with (
        gather_head(call.options, call.weight, call.bias),
        gather_head(call.options, call.teacher_weight, call.teacher_bias),
    ):
        student = call.make_student()
        teacher = call.make_teacher(student)
        if student.mask is not None:
            live = start_selection(student.ids, student.mask, student.vocab)()
            student, teacher = student._replace(live=live), teacher._replace(live=live)
        yield Pair(student, teacher, call.measure)


@outside_of_graphs
def compute_in_one_pass_if_free(
    call: DivergenceCall, factor: Tensor, several: bool = False
) -> tuple[Divergence, Tensor | None]:
    """Values for a loss factor * divergence.sum(), with a factor ().

    Returns (values, hook). In one pass `values` are detached and `hook` is a scalar 0 whose backward delivers the
    gradients: return `loss + hook`. In two passes `hook` is None.
    `several`: one backward is of several such calls. Each would keep a gradient of the weight's size up to it.
    """
    with _pair_heads(call) as pair:
        if not _one_pass_is_free(pair) or (several and call.weight.requires_grad):
            return _run_two_passes(pair), None
        student, needs, gradients = pair.student, pair.student.needs, None
        with torch.no_grad(), gemm.without_autocast(student.hidden.device):
            if any(needs):
                grad = factor.expand(student.live_count)
                statistics, gradients = two_heads.forward_with_gradients(pair, grad, needs)
            else:
                statistics = two_heads.forward(pair)
        hook = factor.new_zeros(())
        if gradients is not None:
            hook = WithGradients.apply(hook, call.hidden, call.weight, call.bias, gradients)
        return _scatter_results(pair, *_select_results(statistics)), hook


def _one_pass_is_free(pair: Pair) -> bool:
    """Whether one pass is possible, loses no precision, and takes no memory beyond its chunk.

    A float32 sum of a 16-bit weight's gradient would be such memory.
    """
    student, weight = pair.student, pair.student.weight
    leaves = zip((student.hidden, weight, student.bias), student.needs, strict=True)
    dtypes = [leaf.dtype for leaf, needed in leaves if leaf is not None and needed]
    # No gradient scaler has multiplied the loss by the time that gradients are made in the forward: those in float16
    # would vanish.
    if dtypes and torch.float16 in (student.dtype, *dtypes):
        return False
    if not weight.requires_grad or weight.dtype == torch.float32:
        return True
    # Ranks that gather a head together must take the same number of passes, and no rank knows the others' tokens.
    if student.options.gather is not None or weight.dtype != student.dtype:
        return False
    return student.live_count <= two_heads.count_chunk_tokens(pair)


def _run_two_passes(pair: Pair) -> Divergence:
    student = pair.student
    if any(student.needs):
        return _scatter_results(pair, *PairFunction.apply(student.hidden, student.weight, student.bias, pair))
    with torch.no_grad(), gemm.without_autocast(student.hidden.device):
        return _scatter_results(pair, *_select_results(two_heads.forward(pair)))


def _select_results(statistics: PairStatistics) -> tuple[Tensor, Tensor]:
    assert statistics.divergence is not None
    return statistics.divergence, statistics.entropy


def _scatter_results(pair: Pair, divergence: Tensor, entropy: Tensor) -> Divergence:
    """Results of the tokens that count -> results of all tokens, 0 at tokens that do not count."""
    live, shape = pair.student.live, pair.student.shape
    return Divergence(scatter_rows(divergence, live, shape), scatter_rows(entropy, live, shape))


class PairFunction(torch.autograd.Function):
    """(hidden, weight, bias) of the student -> divergence and entropy of the tokens that count.

    The caller of the forward enters `options.gather` of both heads. The backward enters it itself, once for each.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, pair):
        ctx.set_materialize_grads(False)
        with gemm.without_autocast(hidden.device):
            statistics = two_heads.forward(pair)
        student, teacher = pair.student, pair.teacher
        nothing = {"hidden": None, "weight": None, "bias": None, "targets": None}
        ctx.pair = pair._replace(student=student._replace(**nothing), teacher=teacher._replace(**nothing))
        ctx.save_for_backward(
            hidden, weight, bias, student.targets, teacher.hidden, teacher.weight, teacher.bias, statistics.lse,
            statistics.teacher_lse, statistics.value,
        )  # fmt: skip
        divergence, entropy = _select_results(statistics)
        ctx.mark_non_differentiable(entropy)
        # A copy, because the caller may write to its results and the backward reads the saved ones.
        return divergence.clone(), entropy

    @staticmethod
    def backward(ctx, grad, _):
        refuse_second_derivative()
        if grad is None:
            return None, None, None, None
        hidden, weight, bias, targets, *teacher, lse, teacher_lse, value = ctx.saved_tensors
        pair, (teacher_hidden, teacher_weight, teacher_bias) = ctx.pair, teacher
        student = pair.student._replace(hidden=hidden, weight=weight, bias=bias, targets=targets)
        teacher = pair.teacher._replace(
            hidden=teacher_hidden, weight=teacher_weight, bias=teacher_bias, targets=targets
        )
        gradients = PairGradients(lse, teacher_lse, grad.float(), value)
        options = student.options
        with (
            gemm.without_autocast(student.hidden.device),
            gather_head(options, student.weight, student.bias),
            gather_head(options, teacher.weight, teacher.bias),
        ):
            pair = pair._replace(student=student, teacher=teacher)
            return *two_heads.backward(pair, gradients, ctx.needs_input_grad[:3]), None
