"""A call of two heads: its tensors, its checks, and its autograd function."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.distributed import VocabShard
from liger_rl.head.autograd import EngineFunction
from liger_rl.head.checks import check_count, check_dense, check_floating, check_head, check_shape, check_transform
from liger_rl.head.dense.one_pass import WithGradients
from liger_rl.head.head_call import HeadCall
from liger_rl.head.head_options import IDENTITY, resolved
from liger_rl.head.interface import Gradients, Head, Needs, whole_head
from liger_rl.head.live_tokens import TokenSelection
from liger_rl.head.pair import two_heads as engine
from liger_rl.head.pair.pair_reference import FORWARD, MIXTURE, REVERSE, Measure, PairGradients, PairStatistics
from liger_rl.head.pair.two_heads import Pair
from liger_rl.head.rules import check_left_alone
from liger_rl.head.run import head_of, start_selection
from liger_rl.kernels import gemm
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


def measure_of(kind: str, beta: float) -> Measure:
    """The measure of a kind. "jsd" with beta 0 is the forward KL divergence, with beta 1 the reverse."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {kind!r}")
    if isinstance(beta, bool) or not isinstance(beta, (int, float)):
        raise TypeError(f"beta must be a number, got {type(beta).__name__}")
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
class DivergenceCall(HeadCall):
    """The tensors and options of a call: the student's are those of a `HeadCall`."""

    targets: Tensor | None = None  # type: ignore[assignment]  # (B, T) or (N,); None: no log-probabilities are returned
    teacher_hidden: Tensor  # (B, T, H') or (N, H')
    teacher_weight: Tensor  # (V', H')
    teacher_bias: Tensor | None = None  # (V',)
    teacher_transform: LogitTransform = IDENTITY
    measure: Measure
    vocab: int | None = None
    token_weights: Tensor | None = None  # (B, T) or (N,)
    # Whether the teacher's tensors may require a gradient. They get none in any case.
    teacher_may_require_grad: bool = False

    def with_ids(self) -> "DivergenceCall":
        """The call with the ids and the mask of needed tokens that `HeadCall` reads: zeros without targets."""
        ids, needed = self.targets, None if self.token_weights is None else self.token_weights != 0
        if ids is None:
            hidden = check_dense("hidden", self.hidden)
            ids = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        return replace(self, targets=ids, needed_mask=needed)

    def check_before_gather(self) -> None:
        """Raise for errors that show before sharded tensors are gathered."""
        check_left_alone(self.options, "with two heads")
        check_transform(self.teacher_transform)
        if self.vocab is not None:
            check_count("vocab", self.vocab, least=1)
        for name in ("hidden", "weight", "bias") if not self.teacher_may_require_grad else ():
            tensor = getattr(self, f"teacher_{name}")
            if torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad:
                raise ValueError(
                    f"teacher_{name} must require no gradient, because only the student's side gets one; "
                    "detach it, or run the teacher under torch.no_grad() with its parameters frozen"
                )

    def check_tensors(self) -> torch.dtype:
        """As of one head, for both. -> dtype of the student's products."""
        dtype, _ = super().check_tensors(), self.teacher_dtype
        if self.teacher_hidden.shape[:-1] != self.hidden.shape[:-1]:
            raise ValueError(
                f"teacher_hidden must have the tokens {tuple(self.hidden.shape[:-1])} of hidden, got "
                f"{tuple(self.teacher_hidden.shape)}"
            )
        check_dense("teacher_hidden", self.teacher_hidden, self.hidden, "hidden")
        if self.vocab_parallel is None:
            self.entries(self.weight.shape[0], self.teacher_weight.shape[0])
        if self.token_weights is not None:
            self._check_token_weights(self.token_weights, dtype)
        return dtype

    def one_pass_lacks(self, dtype: torch.dtype) -> str | None:
        """What one pass needs of tensors and this call lacks, or None. `dtype`: of the student's products."""
        student = self.hidden, self.weight, self.bias
        dtypes = [part.dtype for part, needed in zip(student, self.needs, strict=True) if needed and part is not None]
        # No gradient scaler has multiplied the loss when the gradients are made.
        if dtypes and torch.float16 in (dtype, *dtypes):
            return "bfloat16 or float32 products and gradients: float16 gradients vanish before the loss is scaled"
        if self.vocab_parallel is not None:
            return "vocab_parallel = None: no rank has the logits of the whole vocabulary"
        return None

    @property
    def teacher_dtype(self) -> torch.dtype:
        """dtype of the teacher's products. Raises if the teacher's tensors do not fit together."""
        teacher = self.teacher_hidden, self.teacher_weight, self.teacher_bias
        return check_head(*teacher, self.options.compute_dtype, "teacher_")

    def entries(self, entries: int, teacher_entries: int) -> int:
        """-> the number of vocabulary entries that count, from the rows of each weight.

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

    def _check_token_weights(self, token_weights: Tensor, dtype: torch.dtype) -> None:
        shape = self.hidden.shape[:-1]
        check_floating("token_weights", token_weights)
        check_shape("token_weights", token_weights, shape, f"{tuple(shape)} from hidden")
        check_dense("token_weights", token_weights, self.hidden, "hidden")
        if token_weights.requires_grad:
            raise ValueError("token_weights must require no gradient, which would be the divergence itself; detach it")
        check_left_alone(self.options, "with token_weights")
        lacking = self.one_pass_lacks(dtype)
        if lacking is not None:
            raise ValueError(f"token_weights must be None; the gradients that the forward makes need {lacking}")


@contextmanager
def _paired(call: DivergenceCall) -> Iterator[tuple[DivergenceCall, Pair]]:
    """A context in which both heads are whole: the checked call on this rank, and its `Pair`."""
    call.check_before_gather()
    returns_logps, call = call.targets is not None, call.with_ids()
    gather = call.options.gather
    with whole_head(gather, call.weight, call.bias), whole_head(gather, call.teacher_weight, call.teacher_bias):
        shard = teacher_shard = None
        dtype, teacher_dtype = call.check_tensors(), call.teacher_dtype
        if call.vocab_parallel is not None:
            shard = call.vocab_parallel.shard_of(call.weight)
            # The same `vocab_parallel`: the teacher's rows start at the same vocabulary id as the student's.
            teacher_shard = call.vocab_parallel.shard_of(call.teacher_weight)
        vocab = call.entries(
            call.weight.shape[0] if shard is None else shard.vocab,
            call.teacher_weight.shape[0] if teacher_shard is None else teacher_shard.vocab,
        )
        student, teacher, here = _heads(call, vocab, shard, selects=returns_logps)
        options = resolved(call.options, dtype, grad_tolerance=0.0)
        teacher_options = call.teacher_transform, teacher_dtype
        yield call, Pair(student, teacher, here, options, *teacher_options, call.measure, returns_logps)


def divergence_of(call: DivergenceCall) -> Divergence:
    """The results of a call."""
    with _paired(call) as (call, pair):
        if call.token_weights is None:
            return _in_two_passes(call, pair)
        live = pair.student.live
        factors = live.gather(call.token_weights.float().reshape(-1))
        results, gradients = _in_one_pass(call, pair, factors, None)
        loss = (factors * live.gather(results.divergence.reshape(-1))).sum()
        return results._replace(loss=_with_gradients(call, loss, gradients))


def _in_two_passes(call: DivergenceCall, pair: Pair) -> Divergence:
    student = pair.student
    with torch.no_grad(), gemm.without_autocast(call.hidden.device):
        statistics = engine.forward(pair)
    values = _results(statistics)
    if student.wants_gradient:
        known = statistics._replace(divergence=None, teacher_logps=None)  # the backward does not read them
        saved = student.targets, *pair.teacher[:3], *known
        backward = partial(_backward, student[4:], pair[2:])
        values = EngineFunction.apply(*student.differentiable, values, 3, saved, backward)
    return _spread(call, pair, values)


def _in_one_pass(
    call: DivergenceCall,
    pair: Pair,
    grad: Tensor,  # (n,) dL/d divergence of the tokens that count
    grad_logps: Tensor | None,  # (n,) dL/dlogp
) -> tuple[Divergence, Gradients | None]:
    """Results without a gradient, and the gradients for `_with_gradients`; None if no tensor requires one."""
    needs, gradients = call.needs, None
    with torch.no_grad(), gemm.without_autocast(call.hidden.device):
        if any(needs):
            statistics, gradients = engine.one_pass(pair, grad, grad_logps, needs)
        else:
            statistics = engine.forward(pair)
    return _spread(call, pair, _results(statistics)), gradients


def in_one_pass_if_free(
    call: DivergenceCall, on_divergence: Tensor, on_logps: Tensor | None = None
) -> tuple[Divergence, Tensor | None]:
    """Values for a loss on_divergence * divergence.sum() + on_logps * logps.sum(), with factors ().

    In one pass the values have no gradient. The second result is then a () with value 0 that carries the loss's
    gradients: add it to the loss. In two passes the second result is None.
    """
    with _paired(call) as (call, pair):
        if not _one_pass_is_free(call, pair):
            return _in_two_passes(call, pair), None
        n = pair.student.live.count
        grad_logps = on_logps.expand(n) if pair.targets and on_logps is not None else None
        results, gradients = _in_one_pass(call, pair, on_divergence.expand(n), grad_logps)
        return results, _with_gradients(call, on_divergence.new_zeros(()), gradients)


def _one_pass_is_free(call: DivergenceCall, pair: Pair) -> bool:
    """Whether one pass is possible, loses no precision, and takes no memory beyond its chunk.

    A float32 sum of a 16-bit weight's gradient would be such memory.
    """
    options, weight = pair.options, pair.student.weight
    if call.one_pass_lacks(options.compute_dtype) is not None or options.names_chunk:
        return False
    if not weight.requires_grad or weight.dtype == torch.float32:
        return True
    # Ranks that gather a head together must take the same number of passes, and no rank knows the others' tokens.
    if options.gather is not None or weight.dtype != options.compute_dtype:
        return False
    return pair.student.live.count <= engine.one_pass_tokens(pair)


def _with_gradients(call: DivergenceCall, loss: Tensor, gradients: Gradients | None) -> Tensor:
    """The loss (), which has no gradient, with the gradients that `_in_one_pass` made."""
    if gradients is None:
        return loss
    return WithGradients.apply(loss, call.hidden, call.weight, call.bias, gradients)[0]


def _results(statistics: PairStatistics) -> tuple[Tensor | None, ...]:
    return statistics.divergence, statistics.logps, statistics.entropy, statistics.teacher_logps


def _spread(call: DivergenceCall, pair: Pair, values: Sequence[Tensor | None]) -> Divergence:
    """Results of the tokens that count -> results of all tokens, 0 at tokens that do not count."""
    live, shape = pair.student.live, call.hidden.shape[:-1]
    divergence, *other_values = (None if value is None else live.spread(value, shape) for value in values)
    assert divergence is not None
    return Divergence(divergence, *other_values)


def _heads(call: DivergenceCall, vocab: int, shard: VocabShard | None, *, selects: bool) -> tuple[Head, Head, int]:
    """The student and the teacher with flat tokens, and the entries of this rank's part of the vocabulary.

    `selects`: the ids say which tokens count, as the mask does.
    """
    assert call.targets is not None  # `with_ids` gives them
    ids = call.targets.long().contiguous()  # a narrow dtype would wrap the vocabulary's size in comparisons
    if not selects and call.mask is None and call.needed_mask is None:
        live = TokenSelection(ids.numel())
    else:
        live = start_selection(call, ids, vocab, "weight" if call.vocab is None else "vocab")()[0]
    targets, here = ids.view(-1), vocab
    if shard is not None:
        targets = shard.local(targets)
        here = min(max(vocab - shard.place.vocab_start, 0), call.weight.shape[0], call.teacher_weight.shape[0])
    teacher_hidden = call.teacher_hidden.flatten(0, -2).detach()
    teacher = Head(teacher_hidden, call.teacher_weight, call.teacher_bias, targets, live)
    return head_of(call, targets, live, shard), teacher, here


def _backward(
    rest_of_student: Sequence[Any], rest_of_pair: Sequence[Any],
    saved: Sequence[Any], grads: Sequence[Tensor | None], needs: Needs,
) -> Gradients:  # fmt: skip
    """The backward of `EngineFunction`. It enters `options.gather` once for each head."""
    if all(grad is None for grad in grads):
        return Gradients()
    student = Head(*saved[:4], *rest_of_student)
    teacher_hidden, teacher_weight, teacher_bias = saved[4:7]
    teacher = Head(teacher_hidden, teacher_weight, teacher_bias, student.targets, student.live)
    pair = Pair(student, teacher, *rest_of_pair)
    whole = whole_head(pair.options.gather, student.weight, student.bias)
    whole_teacher = whole_head(pair.options.gather, teacher.weight, teacher.bias)
    with gemm.without_autocast(student.hidden.device), whole, whole_teacher:
        tokens = PairGradients.of(PairStatistics._make(saved[7:]), *grads)
        return engine.backward(pair, tokens, needs)
