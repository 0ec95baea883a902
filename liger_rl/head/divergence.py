"""A call of two heads: its tensors, its checks, and its way into autograd."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from liger_rl.head.checks import (
    check_count,
    check_device,
    check_floating,
    check_tokens,
    check_transform,
)
from liger_rl.head.dtensors import is_dtensor, low_rank_tensors
from liger_rl.head.engines import divergence as engine
from liger_rl.head.engines.divergence import Pair, PairOptions, PairValues
from liger_rl.head.engines.interface import Gradients, Head, Needs, whole_head
from liger_rl.head.engines.one_pass import WithGradients
from liger_rl.head.low_rank import LowRank, check_low_rank
from liger_rl.head.options import IDENTITY, Gather, HeadOptions, resolved
from liger_rl.head.tokens import TokenSelection, counted_tokens, live_tokens
from liger_rl.kernels import gemm
from liger_rl.kernels.divergence import FORWARD, MIXTURE, REVERSE, Measure, PairGradients
from liger_rl.kernels.transform import LogitTransform
from liger_rl.once import differentiable_once

KINDS = ("forward_kl", "reverse_kl", "jsd")
BETA = 0.5


class Divergence(NamedTuple):
    """Per-token results, float32, shaped like the tokens, 0 at masked tokens."""

    divergence: Tensor
    """In nats, >= 0, differentiable."""
    logps: Tensor | None
    """Student's log-probability of the target in nats, <= 0, differentiable; None without targets."""
    entropy: Tensor | None
    """Entropy of the student's distribution in nats, >= 0, differentiable; None unless asked for."""
    teacher_logps: Tensor | None
    """Teacher's log-probability of the target in nats, <= 0, no gradient; None without targets."""
    loss: Tensor | None = None
    """(): sum of token_weights * divergence, differentiable, and then nothing else is; None without token_weights."""


class DivergenceKeywords(TypedDict, total=False):
    """The fields of `HeadOptions` that two heads have, as keywords of a function."""

    transform: LogitTransform
    entropy: bool
    compute_dtype: torch.dtype | None
    gather: Gather | None
    chunk_tokens: int | None
    chunk_vocab: int | None
    fixed_shape: bool


KNOWN = tuple(DivergenceKeywords.__annotations__)
# What linear_logprobs takes and two heads do not, and why.
WITHOUT = {
    "grad_tolerance": "its bounds are of one head's probabilities; the gradient is exact",
    "batch_invariant": "no product of two heads is made up to a fixed shape",
    "max_extra_bytes": "no plan knows the memory of two heads; bound the tiles with chunk_tokens and chunk_vocab",
    "extras": "they are not folded with two heads; ask linear_logprobs for them",
    "vocab_parallel": "both weights must be whole on every rank",
    "support": "the divergence is over the whole vocabulary",
    "weight_grad": "the weight's gradient is returned to autograd",
    "lse": "it is not returned of two heads; ask linear_logprobs for it",
    "topk": "no list is kept of two heads; ask linear_logprobs for it",
}


def check_not_compiling() -> None:
    """Raise where the call would have to be a part of a graph; one that may be broken is broken around it."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "linear_divergence does not run under torch.compile, whose graphs do not hold its engine; call it outside "
            "the compiled function"
        )


def divergence_options(function: str, keywords: DivergenceKeywords) -> HeadOptions:
    """HeadOptions(**keywords); a TypeError that names `function` for one that two heads do not have."""
    for name in keywords:
        if name in WITHOUT:
            raise TypeError(f"{function} takes no {name}: {WITHOUT[name]}")
        if name not in KNOWN:
            raise TypeError(f"{function} got an unexpected argument {name!r}; its options are {', '.join(KNOWN)}")
    return HeadOptions(**keywords)


def measure_of(kind: str, beta: float) -> Measure:
    """The divergence of a name; that of "jsd" at 0 and 1 is the forward and the reverse KL divergence."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {kind!r}")
    if isinstance(beta, bool) or not isinstance(beta, (int, float)):
        raise TypeError(f"beta must be a number, got {type(beta).__name__}")
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    if kind != "jsd":
        if beta != BETA:
            raise ValueError(f'beta is an option of kind="jsd" alone, got {beta} with kind={kind!r}')
        return Measure(FORWARD if kind == "forward_kl" else REVERSE)
    # In float32, in which kernels take it, a beta so near to 1 is 1.
    (share,) = struct.unpack("f", struct.pack("f", beta))
    if share in (0.0, 1.0):
        return Measure(FORWARD if share == 0.0 else REVERSE)
    return Measure(MIXTURE, share)


@dataclass(frozen=True, kw_only=True)
class DivergenceCall:
    """The tensors of a call and its options."""

    hidden: Tensor  # (B, T, H) or (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    low_rank: Sequence[LowRank] = ()
    teacher_hidden: Tensor  # (B, T, H') or (N, H')
    teacher_weight: Tensor  # (V', H')
    teacher_bias: Tensor | None = None  # (V',)
    teacher_transform: LogitTransform = IDENTITY
    measure: Measure
    mask: Tensor | None = None  # (B, T) or (N,)
    targets: Tensor | None = None  # (B, T) or (N,)
    vocab: int | None = None
    token_weights: Tensor | None = None  # (B, T) or (N,)
    options: HeadOptions
    # The teacher's tensors may require a gradient, and get none all the same.
    teacher_may_require_grad: bool = False

    def check_before_gather(self) -> None:
        """Raise for what can be seen of tensors that need not be whole."""
        check_transform(self.teacher_transform)
        for name, transform in (("transform", self.options.transform), ("teacher_transform", self.teacher_transform)):
            if transform.per_token:
                raise ValueError(f"temperature of {name} must be a number: two heads have one for all tokens each")
        if self.vocab is not None:
            check_count("vocab", self.vocab, least=1)
        teacher = {name: getattr(self, name) for name in ("teacher_hidden", "teacher_weight", "teacher_bias")}
        given = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias, **teacher}
        given |= {"mask": self.mask, "targets": self.targets}
        given["token_weights"] = self.token_weights
        for name, tensor in given.items():
            if is_dtensor(tensor):
                raise ValueError(
                    f"{name} must be no DTensor: both heads must be whole on every rank; call full_tensor()"
                )
        if any(map(is_dtensor, low_rank_tensors(self.low_rank))):
            raise ValueError("low_rank must hold no DTensor: both heads must be whole on every rank")
        if torch.is_grad_enabled() and not self.teacher_may_require_grad:
            for name, tensor in teacher.items():
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    raise ValueError(
                        f"{name} must require no gradient, because only the student's side gets one; detach it, or run "
                        "the teacher under torch.no_grad() with its parameters frozen"
                    )

    def check(self) -> tuple[torch.dtype, torch.dtype, int]:
        """Raise for what does not fit together; -> dtypes of the student's and the teacher's products, and entries."""
        dtype = _check_head("", self.hidden, self.weight, self.bias, self.options)
        teacher_dtype = _check_head(
            "teacher_", self.teacher_hidden, self.teacher_weight, self.teacher_bias, self.options
        )
        if self.teacher_hidden.shape[:-1] != self.hidden.shape[:-1]:
            raise ValueError(
                f"teacher_hidden must have the tokens {tuple(self.hidden.shape[:-1])} of hidden, got "
                f"{tuple(self.teacher_hidden.shape)}"
            )
        check_device("teacher_hidden", self.teacher_hidden, self.hidden, "hidden")
        check_low_rank(self.low_rank, self.hidden, self.weight)
        entries, teacher_entries = self.weight.shape[0], self.teacher_weight.shape[0]
        if self.vocab is None and entries != teacher_entries:
            raise ValueError(
                f"teacher_weight must have the {entries} vocabulary entries of weight, got {teacher_entries}; where "
                "both are padded, vocab= says how many count"
            )
        vocab = entries if self.vocab is None else self.vocab
        if vocab > min(entries, teacher_entries):
            raise ValueError(
                f"vocab must be at most the {min(entries, teacher_entries)} rows of the smaller weight, got {vocab}"
            )
        shape = self.hidden.shape[:-1]
        targets = torch.zeros(shape, dtype=torch.int64, device=self.hidden.device)
        check_tokens(targets if self.targets is None else self.targets, self.mask, shape, self.hidden, "hidden")
        if self.token_weights is not None:
            self._check_token_weights(self.token_weights)
        return dtype, teacher_dtype, vocab

    def _check_token_weights(self, given: Tensor) -> None:
        shape, options = self.hidden.shape[:-1], self.options
        check_floating("token_weights", given)
        if given.shape != shape:
            raise ValueError(f"token_weights must be {tuple(shape)} from hidden, got {tuple(given.shape)}")
        check_device("token_weights", given, self.hidden, "hidden")
        if given.requires_grad:
            raise ValueError("token_weights must require no gradient, which would be the divergence itself; detach it")
        if self.low_rank:
            raise ValueError("low_rank must be empty with token_weights: one pass makes no gradient of such a term")
        if options.fixed_shape:
            raise ValueError("fixed_shape must be False with token_weights: one pass takes the tokens with a weight")
        if options.chunk_vocab is not None:
            raise ValueError(
                "chunk_vocab must be None with token_weights: a chunk of one pass holds the whole vocabulary, got "
                f"{options.chunk_vocab}"
            )


def _check_head(prefix: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions) -> torch.dtype:
    """As `HeadCall.check_tensors`, under the names of one of two heads."""
    names = [f"{prefix}{name}" for name in ("hidden", "weight", "bias")]
    check_floating(names[0], hidden)
    check_floating(names[1], weight)
    if hidden.dim() not in (2, 3) or hidden.shape[-1] == 0:
        raise ValueError(f"{names[0]} must be (B, T, H) or (N, H) with H of at least 1, got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"{names[1]} must be (V, H) with H = {hidden.shape[-1]} from {names[0]} and V of at least 1, "
            f"got {tuple(weight.shape)}"
        )
    check_device(names[1], weight, hidden, names[0])
    if bias is not None:
        check_floating(names[2], bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{names[2]} must be (V,) = ({weight.shape[0]},) from {names[1]}, got {tuple(bias.shape)}")
        check_device(names[2], bias, hidden, names[0])
    if options.compute_dtype is not None:
        return options.compute_dtype
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    for name, tensor in zip(names[1:], (weight, bias), strict=True):
        if tensor is None or (tensor is bias and tensor.dtype == torch.float32):
            continue  # a float32 bias is added in float32 anyway
        if tensor.dtype != hidden.dtype:
            raise TypeError(
                f"{name} must be {hidden.dtype} from {names[0]} (or run under autocast), got {tensor.dtype}"
            )
    return hidden.dtype


def divergence_of(call: DivergenceCall) -> Divergence:
    """From a call to its results."""
    call.check_before_gather()
    with _whole(call.options.gather, call):
        dtype, teacher_dtype, vocab = call.check()
        own = resolved(call.options, dtype)
        other = replace(own, transform=call.teacher_transform, compute_dtype=teacher_dtype)
        options = PairOptions(own, other, call.measure, call.targets is not None)
        pair = _pair(call, vocab)
        if call.token_weights is not None:
            return _in_one_pass(call, call.token_weights, pair, options)
        if pair.student.wants_gradient:
            found = LinearDivergence.apply(*pair.student.differentiable, pair, options)
        else:
            with gemm.without_autocast(call.hidden.device):
                divergence, statistics, _ = engine.forward(pair, options)
            found = divergence, statistics.logps, statistics.entropy, statistics.teacher_logps
    return _spread(pair.student.live, call.hidden.shape[:-1], found)


def _spread(
    live: TokenSelection, shape: torch.Size, found: Sequence[Tensor | None], loss: Tensor | None = None
) -> Divergence:
    """Of the tokens that count -> of all, 0 at the others."""
    divergence, *others = (None if part is None else live.spread(part, shape) for part in found)
    assert divergence is not None
    logps, entropy, teacher_logps = others
    return Divergence(divergence, logps, entropy, teacher_logps, loss)


@torch.no_grad()
def _engine_in_one_pass(
    pair: Pair, options: PairOptions, factors: Tensor, needs: Needs
) -> tuple[PairValues, Gradients | None]:
    with gemm.without_autocast(pair.student.hidden.device):
        return engine.one_pass(pair, options, factors, needs) if any(needs) else (engine.forward(pair, options), None)


def _in_one_pass(call: DivergenceCall, token_weights: Tensor, pair: Pair, options: PairOptions) -> Divergence:
    """With the gradients of sum(token_weights * divergence) made in the forward."""
    live = pair.student.live
    factors = live.gather(token_weights.float().reshape(-1))
    inputs = call.hidden, call.weight, call.bias
    needs = tuple(torch.is_grad_enabled() and part is not None and part.requires_grad for part in inputs)
    (divergence, statistics, _), gradients = _engine_in_one_pass(pair, options, factors, needs)
    loss = (factors * divergence).sum()
    if gradients is not None:
        loss, _ = WithGradients.apply(loss, *inputs, gradients, None, None)
    found = divergence, statistics.logps, statistics.entropy, statistics.teacher_logps
    return _spread(live, call.hidden.shape[:-1], found, loss)


@contextmanager
def _whole(gather: Gather | None, heads: "DivergenceCall | _Weights") -> Iterator[None]:
    """The context in which both heads are whole, where they are sharded outside of it."""
    teacher = heads.teacher_weight, heads.teacher_bias
    with whole_head(gather, heads.weight, heads.bias), whole_head(gather, *teacher):
        yield


class _Weights(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    teacher_weight: Tensor
    teacher_bias: Tensor | None


def _pair(call: DivergenceCall, vocab: int) -> Pair:
    """Of flat tensors."""
    hidden, device = call.hidden.reshape(-1, call.hidden.shape[-1]), call.hidden.device
    ids = torch.zeros(call.hidden.shape[:-1], dtype=torch.int64, device=device)
    if call.targets is not None:
        ids = call.targets.long().contiguous()  # a narrow dtype would wrap the vocabulary's size in comparisons
    n = ids.numel()
    if call.options.fixed_shape:
        live = TokenSelection(n, mask=(counted_tokens(ids, call.mask) & (ids < vocab)).reshape(-1))
    elif call.mask is None and call.targets is None and call.token_weights is None:
        live = TokenSelection(n)
    else:
        wanted = None if call.token_weights is None else call.token_weights != 0
        source = "weight" if call.vocab is None else "vocab"
        live = live_tokens(ids, call.mask, vocab, source, wanted=wanted)().selection
    inputs = low_weight = None
    if call.low_rank:
        parts = [term.inputs(call.hidden, live) for term in call.low_rank]
        # Autocast would refuse to join factors of two 16-bit dtypes, which become float32 here.
        with gemm.without_autocast(device):
            inputs = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            factors = [term.b for term in call.low_rank]
            low_weight = factors[0] if len(factors) == 1 else torch.cat(factors, dim=1)
    targets = ids.view(-1)
    student = Head(hidden, call.weight, call.bias, inputs, low_weight, targets, live)
    teacher_hidden = call.teacher_hidden.reshape(-1, call.teacher_hidden.shape[-1]).detach()
    teacher = Head(teacher_hidden, call.teacher_weight, call.teacher_bias, None, None, targets, live)
    return Pair(student, teacher, vocab)


class LinearDivergence(torch.autograd.Function):
    """The engine's values of the tokens that count, and the gradients of divergence, logps and entropy for all that is
    differentiable of the student.

    Sharded heads must be whole around the forward, whose caller has read their shapes before; the backward enters
    `options.student.gather` by itself, once for each head.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, low_inputs, low_weight, pair, options):
        ctx.set_materialize_grads(False)
        with gemm.without_autocast(hidden.device):
            divergence, statistics, value = engine.forward(pair, options)
        teacher, known = pair.teacher, (statistics.lse, statistics.teacher_lse, value)
        ctx.save_for_backward(
            hidden, weight, bias, low_inputs, low_weight, pair.student.targets,
            teacher.hidden, teacher.weight, teacher.bias,
            *known, statistics.logps, statistics.entropy,
        )  # fmt: skip
        ctx.live, ctx.vocab, ctx.options = pair.student.live, pair.vocab, options
        if statistics.teacher_logps is not None:
            ctx.mark_non_differentiable(statistics.teacher_logps)
        copies = [None if part is None else part.clone() for part in (divergence, statistics.logps, statistics.entropy)]
        return *copies, statistics.teacher_logps

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, *grads):
        hidden, weight, bias, low_inputs, low_weight, targets, *of_teacher = saved[:9]
        student = Head(hidden, weight, bias, low_inputs, low_weight, targets, ctx.live)
        teacher_hidden, teacher_weight, teacher_bias = of_teacher
        teacher = Head(teacher_hidden, teacher_weight, teacher_bias, None, None, targets, ctx.live)
        found = Gradients()
        if any(grad is not None for grad in grads[:3]):
            weights = _Weights(student.weight, student.bias, teacher.weight, teacher.bias)
            with gemm.without_autocast(student.hidden.device), _whole(ctx.options.student.gather, weights):
                pair = Pair(student, teacher, ctx.vocab)
                tokens = _token_gradients(saved[9:], grads)
                found = engine.backward(pair, ctx.options, tokens, ctx.needs_input_grad[:5])
        return *found, None, None


def _token_gradients(
    saved: Sequence[Tensor | None],  # lse, teacher's lse, value, logps, entropy
    grads: Sequence[Tensor | None],  # of divergence, logps, entropy
) -> PairGradients:
    lse, teacher_lse, value, logps, entropy = saved
    grad, grad_logps, grad_entropy = (None if given is None else given.float() for given in grads[:3])
    assert lse is not None
    assert teacher_lse is not None
    at_target = None if grad_logps is None or logps is None else -torch.expm1(logps) * grad_logps
    return PairGradients(
        lse,
        teacher_lse,
        torch.zeros_like(lse) if grad is None else grad,
        value,
        grad_logps,
        at_target,
        grad_entropy,
        None if grad_entropy is None else entropy,
    )
