"""A call of two heads: its tensors, its checks, and its autograd function."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.distill import two_heads
from liger_rl.distill.pair_reference import FORWARD, MIXTURE, REVERSE, Measure, PairGradients, PairStatistics
from liger_rl.distill.totals import WithGradients
from liger_rl.distill.two_heads import Pair
from liger_rl.distributed import VocabParallel
from liger_rl.head.autograd import named_tensors, save_tensors
from liger_rl.head.checks import (
    check_constant,
    check_count,
    check_dense,
    check_floating,
    check_head,
    check_shape,
    check_transform,
)
from liger_rl.head.head_options import IDENTITY, HeadOptions
from liger_rl.head.live_tokens import scatter_rows, start_selection, take_rows
from liger_rl.head.record import Gradients, Head, gather_head
from liger_rl.kernels import gemm
from liger_rl.kernels.argument_checks import check_choice, check_number
from liger_rl.kernels.public_call import refuse_second_derivative
from liger_rl.kernels.transform import LogitTransform

KINDS = ("forward_kl", "reverse_kl", "jsd")
BETA = 0.5


class Divergence(NamedTuple):
    """Per-token results, float32, shaped like the tokens, 0 at masked tokens."""

    divergence: Tensor
    """Divergence in nats, >= 0, differentiable."""
    logps: Tensor | None
    """Student's log-probability of the target in nats, <= 0, differentiable; None without targets."""
    entropy: Tensor | None
    """Entropy of the student's distribution in nats, >= 0, differentiable; None without entropy=True."""
    teacher_logps: Tensor | None
    """Teacher's log-probability of the target in nats, <= 0, no gradient; None without targets."""
    loss: Tensor | None = None
    """(): sum of token_weights * divergence; None without token_weights. With a loss, only it is differentiable."""


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
    (share,) = struct.unpack("f", struct.pack("f", beta))
    if share in (0.0, 1.0):
        return Measure(FORWARD if share == 0.0 else REVERSE)
    return Measure(MIXTURE, share)


@dataclass(frozen=True, kw_only=True)
class DivergenceCall:
    """The tensors and options of a call, as the caller gives them."""

    hidden: Tensor  # (B, T, H) or (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    targets: Tensor | None = None  # (B, T) or (N,); None: no log-probabilities are returned
    mask: Tensor | None = None  # (B, T) or (N,)
    token_weights: Tensor | None = None  # (B, T) or (N,)
    vocab_parallel: VocabParallel | None = None
    options: HeadOptions
    teacher_hidden: Tensor  # (B, T, H') or (N, H')
    teacher_weight: Tensor  # (V', H')
    teacher_bias: Tensor | None = None  # (V',)
    teacher_transform: LogitTransform = IDENTITY
    measure: Measure
    vocab: int | None = None
    # Whether the teacher's tensors may require a gradient. They get none in any case.
    teacher_may_require_grad: bool = False
    targets_name: str = "targets"  # the caller's name for the targets, for messages

    def check_options(self) -> None:
        """Raise for errors that show before a head is gathered."""
        self.options.refuse("with two heads")
        check_transform(self.teacher_transform)
        if self.vocab is not None:
            check_count("vocab", self.vocab, least=1)
        for name in ("hidden", "weight", "bias") if not self.teacher_may_require_grad else ():
            check_constant(f"teacher_{name}", getattr(self, f"teacher_{name}"))

    def make_student(self) -> Head:
        """The student's record. Without targets its ids are zeros."""
        targets = self.targets
        if targets is None:
            hidden = check_dense("hidden", self.hidden)
            targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        student = Head.of(
            self.hidden, self.weight, targets, self.options, mask=self.mask, bias=self.bias,
            vocab_parallel=self.vocab_parallel, targets_name=self.targets_name,
        )  # fmt: skip
        needed = None if self.token_weights is None else self.token_weights != 0
        return student._replace(needed=needed)

    def make_teacher(self, student: Head) -> Head:
        """The teacher's record, its tensors checked and detached."""
        hidden, weight, bias = self.teacher_hidden, self.teacher_weight, self.teacher_bias
        dtype = check_head(hidden, weight, bias, self.options.compute_dtype, "teacher_")
        if hidden.shape[:-1] != student.shape:
            raise ValueError(
                f"teacher_hidden must have the tokens {tuple(student.shape)} of hidden, got {tuple(hidden.shape)}"
            )
        check_dense("teacher_hidden", hidden, student.hidden, "hidden")
        return student._replace(hidden=hidden.flatten(0, -2).detach(), weight=weight, bias=bias, dtype=dtype)

    def check_vocab(self, entries: int, teacher_entries: int) -> int:
        """-> the number of vocabulary entries that count, from the numbers of rows of the two weights.

        Raises if the weights differ in size and `vocab` is None, and if `vocab` exceeds the smaller weight.
        """
        if self.vocab is None and entries != teacher_entries:
            raise ValueError(
                f"teacher_weight must have the {entries} vocabulary entries of weight, got "
                f"{teacher_entries}; where both are padded, vocab= says how many count"
            )
        vocab = entries if self.vocab is None else self.vocab
        if vocab > min(entries, teacher_entries):
            raise ValueError(
                f"vocab must be at most the {min(entries, teacher_entries)} rows of the smaller weight, got {vocab}"
            )
        return vocab

    def reason_against_one_pass(self, student: Head) -> str | None:
        """The first thing that one pass needs and this call does not have; None if one pass is possible."""
        conflict = self.options.conflict("with token_weights")
        if conflict is not None:
            return "{} = {}, got {}: {}".format(*conflict)
        dtypes = [
            x.dtype for x, needed in zip((self.hidden, self.weight, self.bias), student.needs, strict=True)
            if x is not None and needed
        ]  # fmt: skip
        # No gradient scaler has multiplied the loss by the time that gradients are made in the forward.
        if dtypes and torch.float16 in (student.dtype, *dtypes):
            return "bfloat16 or float32 products and gradients: float16 gradients vanish before the loss is scaled"
        if student.vocab_parallel is not None:
            return "vocab_parallel = None: no rank has the logits of the whole vocabulary"
        return None

    def check_token_weights(self, student: Head) -> None:
        token_weights, shape = self.token_weights, student.shape
        if token_weights is None:
            return
        check_floating("token_weights", token_weights)
        check_shape("token_weights", token_weights, shape, f"{tuple(shape)} from hidden")
        check_dense("token_weights", token_weights, student.hidden, "hidden")
        if token_weights.requires_grad:
            raise ValueError("token_weights must require no gradient, which would be the divergence itself; detach it")
        self.options.refuse("with token_weights")
        reason = self.reason_against_one_pass(student)
        if reason is not None:
            raise ValueError(f"token_weights must be None; the gradients that the forward makes need {reason}")


@contextmanager
def _pair_heads(call: DivergenceCall) -> Iterator[Pair]:
    """A context in which both heads are whole: the two heads, with the tokens that count."""
    call.check_options()
    options = call.options
    with (
        gather_head(options, call.weight, call.bias),
        gather_head(options, call.teacher_weight, call.teacher_bias),
    ):
        student = call.make_student()
        teacher = call.make_teacher(student)
        call.check_token_weights(student)
        # The same `vocab_parallel`: the teacher's rows start at the same vocabulary id as the student's.
        student, teacher = student.with_shard(), teacher.with_shard()
        vocab = call.check_vocab(student.vocab, teacher.vocab)
        # Without targets, a mask or weights all tokens count.
        if call.targets is not None or student.mask is not None or student.needed is not None:
            source = "weight" if call.vocab is None else "vocab"
            wait = start_selection(
                student.ids, student.mask, vocab, source, needed=student.needed, targets_name=call.targets_name
            )
            live, _ = wait()
            student, teacher = student._replace(live=live), teacher._replace(live=live)
        if student.shard is not None:  # this rank's part of the entries that count
            vocab = max(vocab - student.shard.place.vocab_start, 0)
            vocab = min(vocab, student.weight.shape[0], teacher.weight.shape[0])
        yield Pair(student, teacher, vocab, call.teacher_transform, call.measure, call.targets is not None)


def compute_divergence(call: DivergenceCall) -> Divergence:
    """The results of a call."""
    with _pair_heads(call) as pair:
        if call.token_weights is None:
            return _run_two_passes(pair)
        live = pair.student.live
        factors = take_rows(call.token_weights.float().reshape(-1), live)
        results, gradients = _run_one_pass(pair, factors, None)
        loss = (factors * take_rows(results.divergence.reshape(-1), live)).sum()
        return results._replace(loss=_attach_gradients(call, loss, gradients))


def compute_in_one_pass_if_free(
    call: DivergenceCall, on_divergence: Tensor, on_logps: Tensor | None = None
) -> tuple[Divergence, Tensor | None]:
    """Values for a loss on_divergence * divergence.sum() + on_logps * logps.sum(), with factors ().

    Returns (values, hook). In one pass `values` are detached and `hook` is a scalar 0 whose backward delivers the
    gradients: return `loss + hook`. In two passes `hook` is None.
    """
    with _pair_heads(call) as pair:
        if not _one_pass_is_free(call, pair):
            return _run_two_passes(pair), None
        n = pair.student.live_count
        grad_logps = on_logps.expand(n) if pair.targets and on_logps is not None else None
        results, gradients = _run_one_pass(pair, on_divergence.expand(n), grad_logps)
        return results, _attach_gradients(call, on_divergence.new_zeros(()), gradients)


def _one_pass_is_free(call: DivergenceCall, pair: Pair) -> bool:
    """Whether one pass is possible, loses no precision, and takes no memory beyond its chunk.

    A float32 sum of a 16-bit weight's gradient would be such memory.
    """
    student, weight = pair.student, pair.student.weight
    if call.reason_against_one_pass(student) is not None or student.options.names_chunk:
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
        values = PairFunction.apply(student.hidden, student.weight, student.bias, pair)
    else:
        with torch.no_grad(), gemm.without_autocast(student.hidden.device):
            values = _select_results(two_heads.forward(pair))
    return _scatter_results(pair, values)


def _run_one_pass(
    pair: Pair,
    grad: Tensor,  # (n,) dL/d divergence of the tokens that count
    grad_logps: Tensor | None,  # (n,) dL/dlogp
) -> tuple[Divergence, Gradients | None]:
    """Results without a gradient, and the gradients for `_attach_gradients`; None if no tensor requires one."""
    needs, gradients = pair.student.needs, None
    with torch.no_grad(), gemm.without_autocast(pair.student.hidden.device):
        if any(needs):
            statistics, gradients = two_heads.forward_with_gradients(pair, grad, grad_logps, needs)
        else:
            statistics = two_heads.forward(pair)
    return _scatter_results(pair, _select_results(statistics)), gradients


def _attach_gradients(call: DivergenceCall, loss: Tensor, gradients: Gradients | None) -> Tensor:
    """The loss (), which has no gradient, with the gradients that `_run_one_pass` made."""
    if gradients is None:
        return loss
    return WithGradients.apply(loss, call.hidden, call.weight, call.bias, gradients)


def _select_results(statistics: PairStatistics) -> tuple[Tensor | None, ...]:
    return statistics.divergence, statistics.logps, statistics.entropy, statistics.teacher_logps


def _scatter_results(pair: Pair, values: tuple[Tensor | None, ...]) -> Divergence:
    """Results of the tokens that count -> results of all tokens, 0 at tokens that do not count."""
    live, shape = pair.student.live, pair.student.shape
    divergence, *others = (None if value is None else scatter_rows(value, live, shape) for value in values)
    assert divergence is not None
    return Divergence(divergence, *others)


class PairFunction(torch.autograd.Function):
    """(hidden, weight, bias) of the student -> divergence, logps, entropy and teacher_logps of the tokens that count.

    The caller of the forward enters `options.gather` of both heads. The backward enters it itself, once for each.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, pair):
        ctx.set_materialize_grads(False)
        with gemm.without_autocast(hidden.device):
            statistics = two_heads.forward(pair)
        teacher, nothing = pair.teacher, {"hidden": None, "weight": None, "bias": None, "targets": None}
        ctx.pair = pair._replace(student=pair.student._replace(**nothing), teacher=teacher._replace(**nothing))
        # The backward does not read these two.
        saved = statistics._replace(divergence=None, teacher_logps=None)._asdict()
        save_tensors(
            ctx, hidden=hidden, weight=weight, bias=bias, targets=pair.student.targets, teacher_hidden=teacher.hidden,
            teacher_weight=teacher.weight, teacher_bias=teacher.bias, **saved,
        )  # fmt: skip
        if statistics.teacher_logps is not None:
            ctx.mark_non_differentiable(statistics.teacher_logps)
        divergence, logps, entropy, teacher_logps = _select_results(statistics)
        # Copies, because the caller may write to its results and the backward reads the saved ones.
        copies = (None if value is None else value.clone() for value in (divergence, logps, entropy))
        return *copies, teacher_logps

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative()
        if all(grad is None for grad in grads[:3]):
            return None, None, None, None
        saved, pair = named_tensors(ctx), ctx.pair
        student = pair.student._replace(
            hidden=saved.hidden, weight=saved.weight, bias=saved.bias, targets=saved.targets
        )
        teacher = pair.teacher._replace(
            hidden=saved.teacher_hidden, weight=saved.teacher_weight, bias=saved.teacher_bias, targets=saved.targets
        )
        statistics = PairStatistics._make(getattr(saved, name) for name in PairStatistics._fields)
        options = student.options
        with (
            gemm.without_autocast(student.hidden.device),
            gather_head(options, student.weight, student.bias),
            gather_head(options, teacher.weight, teacher.bias),
        ):
            pair = pair._replace(student=student, teacher=teacher)
            gradients = PairGradients.of(statistics, *grads[:3])
            return *two_heads.backward(pair, gradients, ctx.needs_input_grad[:3]), None
