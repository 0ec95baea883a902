"""The fused head as an operator of torch's own, for torch.compile: a graph holds it whole and does not look inside.

How many tokens count is known only while it runs, so its inputs and outputs all keep the shape (N,), and tokens are
dropped and put back within. It runs an engine as `LinearLogProbs` does, by which eager mode enters: its dispatch costs
less, and it takes what a schema cannot say (`gather`, `weight_grad`, a group of ranks).

torch.compile traces all that leads here. Torch 2.8 traces no `X | Y` in `isinstance` or in the annotations of a nested
function, no slice, `_replace` or call of a NamedTuple, no `vars` of a module, and no `if` on a tensor's bare integer.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_rl.head.engines import block_sparse, two_pass
from liger_rl.head.engines.interface import Head
from liger_rl.head.function import engine_of, token_gradients, values
from liger_rl.head.low_rank import inputs_backward, inputs_forward
from liger_rl.head.options import EngineOptions
from liger_rl.head.tokens import WAITING_OPERATOR, TokenSelection, live_tokens
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import EXTRAS, TileBounds, TokenStatistics
from liger_rl.kernels.transform import LogitTransform
from liger_rl.once import differentiable_once


class OpOptions(NamedTuple):
    """What is not a tensor, in types that a schema has."""

    temperature: float
    softcap: float | None
    scale: float
    entropy: bool
    extras: str  # names with commas between
    compute_dtype: torch.dtype
    chunk_tokens: int | None
    chunk_vocab: int | None
    grad_tolerance: float  # 0.0 for the exact backward
    fixed_shape: bool
    batch_invariant: bool
    kernels_fit: bool
    bounded: bool  # keep what a backward with a tolerance needs
    targets_name: str  # the caller's

    @property
    def engine(self) -> ModuleType:
        return block_sparse if self.bounded else two_pass

    def resolved(self) -> EngineOptions:
        return EngineOptions(
            transform=LogitTransform(temperature=self.temperature, softcap=self.softcap, scale=self.scale),
            entropy=self.entropy,
            extras=frozenset(filter(None, self.extras.split(","))),
            compute_dtype=self.compute_dtype,
            chunk_tokens=self.chunk_tokens,
            chunk_vocab=self.chunk_vocab,
            grad_tolerance=self.grad_tolerance,
            fixed_shape=self.fixed_shape,
            batch_invariant=self.batch_invariant,
            kernels_fit=self.kernels_fit,
        )


# In the order of Head, with the mask of the tokens that count for `live`, and of OpOptions.
TENSORS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? low_inputs, Tensor? low_weight, Tensor targets, Tensor live"
)
DIFFERENTIABLE = 5  # the first so many
OPTIONS = (
    "float temperature, float? softcap, float scale, bool entropy, str extras, ScalarType compute_dtype, "
    "SymInt? chunk_tokens, SymInt? chunk_vocab, float grad_tolerance, bool fixed_shape, bool batch_invariant, "
    "bool kernels_fit, bool bounded, str targets_name"
)
TENSOR_COUNT = len(TENSORS.split(", "))


class Outputs(NamedTuple):
    """(N,) each, zero or meaningless at tokens that do not count; what is None does not leave the operator."""

    statistics: TokenStatistics
    known: TileBounds | None
    has_bounds: Tensor | None  # (1,) bool on the host: whether `known` was made; the backward is exact where it was not

    def flat(self) -> list[Tensor]:
        parts = (*self.statistics, *(self.known or ()), self.has_bounds)
        return [part for part in parts if part is not None]

    @classmethod
    def named(cls, flat: list[Tensor] | tuple[Tensor, ...], options: OpOptions) -> "Outputs":
        parts = iter(flat)
        extras = [name in options.extras.split(",") for name in EXTRAS]
        statistics = TokenStatistics(*_wanted(parts, True, True, options.entropy, *extras))  # type: ignore[arg-type]
        known = None
        if options.bounded:
            there = (*[True] * 4, *[options.entropy] * 3)
            known = TileBounds(*_wanted(parts, *there))  # type: ignore[arg-type]
        return cls(statistics, known, *_wanted(parts, options.bounded))

    @classmethod
    def empty(cls, hidden: Tensor, weight: Tensor, options: OpOptions) -> "Outputs":
        tokens, vocab, device = hidden.shape[0], weight.shape[0], hidden.device

        def made(dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(tokens, dtype=dtype, device=device)

        extras = [
            made(torch.bool if name == "is_top1" else torch.float32) if name in options.extras.split(",") else None
            for name in EXTRAS
        ]
        statistics = TokenStatistics(made(), made(), made() if options.entropy else None, *extras)
        known = None
        if options.bounded:
            known = TileBounds.empty(tokens, vocab, device, entropy=options.entropy)
        has_bounds = torch.empty(1, dtype=torch.bool, device="cpu") if options.bounded else None
        return cls(statistics, known, has_bounds)


def _wanted(parts: Iterator[Tensor], *there: bool) -> list[Tensor | None]:
    return [next(parts) if is_there else None for is_there in there]


def _head(*tensors) -> Head:
    """Of the operator's tensors, the last of which is the mask of the tokens that count."""
    *others, live = tensors
    return Head._make([*others, TokenSelection(live.numel(), mask=live), None, None])


def _forward(*args) -> list[Tensor]:
    head, options = _head(*args[:TENSOR_COUNT]), OpOptions(*args[TENSOR_COUNT:])
    if not options.fixed_shape:
        vocab, name = head.weight.shape[0], options.targets_name
        live = live_tokens(head.targets, head.live.mask, vocab, "weight", targets_name=name)().selection
        head = head._replace(live=live)
    index = head.live.index
    with gemm.without_autocast(head.hidden.device):
        statistics, known = options.engine.forward(head, options.resolved())
    out = Outputs.empty(head.hidden, head.weight, options)
    for whole, part in zip(out.statistics, statistics, strict=True):
        _place(whole, part, index)
    if out.known is not None and out.has_bounds is not None:
        out.has_bounds.fill_(known is not None)
        for whole, part in zip(out.known, known or [None] * len(out.known), strict=True):
            _place(whole, part, index)
    return out.flat()


def _place(whole: Tensor | None, part: Tensor | None, index: Tensor | None) -> None:
    """(..., n) values -> their tokens of (..., N), zero elsewhere; zero everywhere for None."""
    if whole is None:
        return
    if part is None:
        whole.zero_()
    elif index is None:
        whole.copy_(part)
    else:
        whole.zero_().index_copy_(-1, index, part)


def _fake_forward(*args) -> list[Tensor]:
    hidden, weight = args[:2]
    return Outputs.empty(hidden, weight, OpOptions(*args[TENSOR_COUNT:])).flat()


def _backward(grad_logps, grad_entropy, outputs, needs, *args) -> list[Tensor]:
    head, options = _head(*args[:TENSOR_COUNT]), OpOptions(*args[TENSOR_COUNT:])
    out = Outputs.named(outputs, options)
    # Zero where no token counts: those are then dropped with the other tokens that have no gradient, by one sync.
    grad_logps, grad_entropy = (None if grad is None else head.live.gather(grad) for grad in (grad_logps, grad_entropy))
    if not options.fixed_shape:
        everything = TokenSelection(head.targets.numel())
        head = head._replace(targets=head.live.gather(head.targets), live=everything)
    known = out.known if out.has_bounds is not None and bool(out.has_bounds) else None
    grads, needs = (grad_logps, grad_entropy), tuple(needs)
    gradients = token_gradients(options.engine, head, options.resolved(), out.statistics, known, grads, needs)
    return [part.contiguous() for part in gradients if part is not None]


def _fake_backward(grad_logps, grad_entropy, outputs, needs, *args) -> list[Tensor]:
    return _contiguous_like(args[:DIFFERENTIABLE], needs)


def _contiguous_like(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    return [
        torch.empty(part.shape, dtype=part.dtype, device=part.device)
        for part, needed in zip(inputs, needs, strict=True)
        if part is not None and needed
    ]


def _keep(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.options = inputs[TENSOR_COUNT:]
    ctx.save_for_backward(*inputs[:TENSOR_COUNT], *output)


def _differentiate(backward, ctx, saved, grads):
    needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
    result: list[Tensor | None] = [None] * (TENSOR_COUNT + len(ctx.options))
    options = OpOptions(*ctx.options)
    grad_logps, grad_entropy = grads[0], grads[2] if options.entropy else None
    if grad_logps is not None or grad_entropy is not None:
        head, outputs = saved[:TENSOR_COUNT], list(saved[TENSOR_COUNT:])
        found = iter(backward(grad_logps, grad_entropy, outputs, needs, *head, *options))
        for place, needed in enumerate(needs):
            result[place] = next(found) if needed else None
    return tuple(result)


def _registered(name: str, **options: Any) -> Callable[..., list[Tensor]]:
    """The operator, whose gradient is another one."""
    forward = torch.library.custom_op(
        f"liger_rl::{name}", _forward, mutates_args=(), schema=f"({TENSORS}, {OPTIONS}) -> Tensor[]", **options
    )
    backward = torch.library.custom_op(
        f"liger_rl::{name}_backward",
        _backward,
        mutates_args=(),
        schema=f"(Tensor? grad_logps, Tensor? grad_entropy, Tensor[] outputs, bool[] needs, {TENSORS}, {OPTIONS})"
        " -> Tensor[]",
        **options,
    )
    forward.register_fake(_fake_forward)
    backward.register_fake(_fake_backward)
    forward.register_autograd(differentiable_once(partial(_differentiate, backward)), setup_context=_keep)
    return forward


# Two operators that compute the same, because an operator either has a tag or has it not.
waiting = _registered("linear_logprobs", **WAITING_OPERATOR)
never_waiting = _registered("linear_logprobs_fixed_shape")


@torch.library.custom_op("liger_rl::low_rank_inputs", mutates_args=())
def _inputs(hidden: Tensor, a: Tensor, live: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs_forward(hidden, a, TokenSelection(live.numel(), mask=live), dtype)


@_inputs.register_fake
def _(hidden, a, live, dtype):
    return torch.empty(hidden.shape[0], a.shape[0], dtype=torch.float32, device=hidden.device)


@torch.library.custom_op("liger_rl::low_rank_inputs_backward", mutates_args=())
def _inputs_backward(
    grad: Tensor, hidden: Tensor, a: Tensor, live: Tensor, dtype: torch.dtype, needs: list[bool]
) -> list[Tensor]:
    found = inputs_backward(grad, hidden, a, TokenSelection(live.numel(), mask=live), dtype, needs)
    return [part.contiguous() for part in found if part is not None]


@_inputs_backward.register_fake
def _(grad, hidden, a, live, dtype, needs):
    return _contiguous_like((hidden, a), needs)


def _keep_inputs(ctx, inputs, output) -> None:
    *tensors, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)


@differentiable_once
def _differentiate_inputs(ctx, saved, grad):
    needs = list(ctx.needs_input_grad[:2])
    found = iter(_inputs_backward(grad, *saved, ctx.dtype, needs))
    return *(next(found) if needed else None for needed in needs), None, None


_inputs.register_autograd(_differentiate_inputs, setup_context=_keep_inputs)


def linear_op(head: Head, options: EngineOptions, *, targets_name: str) -> tuple[Any, ...]:
    """What `linear_values` gives, of all N tokens; `head.live` has the mask of those that count.

    The others get 0, or with `fixed_shape` what means nothing.

    Raises:
        ValueError: when it runs, a target outside of the vocabulary, unless `fixed_shape`.
    """
    transform = options.transform
    flat = OpOptions(
        transform.temperature,
        transform.softcap,
        transform.scale,
        options.entropy,
        ",".join(name for name in EXTRAS if name in options.extras),
        options.compute_dtype,
        options.chunk_tokens,
        options.chunk_vocab,
        options.grad_tolerance,
        options.fixed_shape,
        options.batch_invariant,
        options.kernels_fit,
        bounded=engine_of(head, options) is block_sparse,
        targets_name=targets_name,
    )
    operator = never_waiting if options.fixed_shape else waiting
    outputs = operator(*head.differentiable, head.targets, head.live.mask, *flat)
    statistics = Outputs.named(outputs, flat).statistics
    logps, entropy, *extras = values(statistics, head)
    return logps, entropy, *(None if part is None else part.detach() for part in extras)


def low_rank_inputs_op(hidden: Tensor, a: Tensor, live: TokenSelection, dtype: torch.dtype) -> Tensor:
    """`low_rank.inputs_forward` in a graph, where `live` is a mask."""
    return _inputs(hidden, a, live.mask, dtype)
