"""`linear_logprobs` as a custom operator: one node in a graph of torch.compile, which does not trace into it.

The number n of tokens that count is known only while the operator runs. So its inputs and outputs cover all N tokens.
Inside the operator the engine gets the n tokens, and its results are written back to their places among the N.

Dynamo traces the callers of the operator. Dynamo of torch 2.8 cannot trace these:

- `X | Y` in `isinstance` or in the annotations of a nested function
- a slice, `_replace`, property or call of a NamedTuple
- `vars` of a module
- an `if` on a tensor's size
"""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from liger_rl.call.options import OP_OPTIONS, EngineOptions, flat_options, from_flat
from liger_rl.call.tokens import WAITING_OPERATOR, TokenSelection, live_tokens
from liger_rl.engines.autograd import HeadGradients, token_gradients
from liger_rl.engines.dense import several, two_pass
from liger_rl.engines.interface import Head
from liger_rl.engines.sparse import certified as sparse
from liger_rl.kernels import gemm
from liger_rl.kernels.statistics import EXTRAS, TileStatistics, TokenStatistics, parts_of
from liger_rl.once import differentiable_once

# The first seven fields of Head, in its order. `live` is a mask (N,) of the tokens that count.
TENSORS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? low_inputs, Tensor? low_weight, Tensor targets, Tensor live"
)
DIFFERENTIABLE, TENSOR_COUNT = 5, 7
# `bounded`: the forward also returns TileStatistics, from which the sparse engine's backward bounds its error.
SCHEMA = f"{TENSORS}, {OP_OPTIONS}, bool bounded"
GRADS = "Tensor? grad_logps, Tensor? grad_entropy, Tensor? grad_lse, Tensor? grad_mean, Tensor[] outputs, bool[] needs"
# The outputs: logps, lse, entropy and the extras, TileStatistics, and a (1,) bool on the host that
# says whether the forward made the TileStatistics. If it is false, the backward is exact. An operator cannot return
# None, so its list leaves out the outputs that the options do not ask for.
STATISTICS, TILES = 3 + len(EXTRAS), len(TileStatistics._fields)
MEAN_LOGITS = 3 + EXTRAS.index("mean_logits")
Outputs = list[Tensor | None]


def _split_arguments(arguments: Sequence[Any]) -> tuple[Head, EngineOptions, bool]:
    """The arguments of SCHEMA -> head, options, `bounded`."""
    hidden, weight, bias, low_inputs, low_weight, targets, live = arguments[:TENSOR_COUNT]
    selection = TokenSelection(live.numel(), mask=live)
    head = Head(hidden, weight, bias, low_inputs, low_weight, targets, selection)
    return head, from_flat(arguments[TENSOR_COUNT:-1])[0], arguments[-1]


def _requested_outputs(options: EngineOptions, bounded: bool) -> list[bool]:
    extras = [name in options.extras for name in EXTRAS]
    return [True, True, options.entropy, *extras, bounded, bounded, bounded and options.entropy, bounded]


def _with_missing_outputs(values: Sequence[Any], options: EngineOptions, bounded: bool) -> list[Any]:
    """The operator's outputs, or their gradients -> a list of all, None for an output that the options leave out."""
    present = iter(values)
    return [next(present) if requested else None for requested in _requested_outputs(options, bounded)]


def _empty(arguments: Sequence[Any]) -> Outputs:
    head, options, bounded = _split_arguments(arguments)
    n, vocab = head.hidden.shape[0], head.weight.shape[0]
    token, part = (n,), (parts_of(vocab), n)
    shapes = [head.targets.shape, *[token] * (STATISTICS - 1), *[part] * TILES, (1,)]
    of_extras = [torch.bool if name == "is_top1" else torch.float32 for name in EXTRAS]
    dtypes = [torch.float32, torch.float64, torch.float32, *of_extras, *[torch.float32] * TILES, torch.bool]
    devices = [*[head.hidden.device] * (STATISTICS + TILES), torch.device("cpu")]
    columns = zip(_requested_outputs(options, bounded), shapes, dtypes, devices, strict=True)
    return [
        torch.empty(shape, dtype=dtype, device=device) if requested else None
        for requested, shape, dtype, device in columns
    ]


def _engine(head: Head, bounded: bool) -> ModuleType:
    if head.targets.dim() == 2:
        return several
    return sparse if bounded else two_pass


def _forward(*arguments: Any) -> list[Tensor]:
    head, options, bounded = _split_arguments(arguments)
    if not options.fixed_shape:
        vocab, name = head.weight.shape[0], from_flat(arguments[TENSOR_COUNT:-1])[1]
        targets = head.targets.amax(1) if head.targets.dim() == 2 else head.targets
        live, _ = live_tokens(targets, head.live.mask, vocab, "weight", targets_name=name)()
        head = head._replace(live=live)
    with gemm.without_autocast(head.hidden.device):
        statistics, tiles = _engine(head, bounded).forward(head, options)
    outputs, index = _empty(arguments), head.live.index
    extras = [statistics.extra(name, head.vocab) for name in EXTRAS]
    for place, value in enumerate([statistics.logps, statistics.lse, statistics.entropy, *extras]):
        _write(outputs[place], value, index, dim=0)
    for place, value in enumerate(tiles or [None] * TILES, STATISTICS):
        _write(outputs[place], value, index, dim=-1)
    if bounded:
        outputs[-1].fill_(tiles is not None)  # type: ignore[union-attr]
    return [output for output in outputs if output is not None]


def _write(output: Tensor | None, values: Tensor | None, index: Tensor | None, *, dim: int) -> None:
    """Write values of n tokens along `dim` to their places in an output of N tokens, and 0 to the rest of the output.

    If `values` is None, the whole output becomes 0.
    """
    if output is None:
        return
    if values is None:
        output.zero_()
    elif index is None:
        output.copy_(values)
    else:
        output.zero_().index_copy_(dim, index, values)


def _fake_forward(*arguments: Any) -> list[Tensor]:
    return [output for output in _empty(arguments) if output is not None]


def _backward(
    grad_logps: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None,
    grad_mean: Tensor | None, outputs: list[Tensor], needs: list[bool], *arguments: Any,
) -> list[Tensor]:  # fmt: skip
    """-> the gradients that `needs` asks for, in the order of `Head.differentiable`."""
    head, options, bounded = _split_arguments(arguments)
    all_outputs = _with_missing_outputs(outputs, options, bounded)
    # Tokens that do not count have gradient 0 here. One sync drops all tokens whose gradient is 0.
    of_values = grad_logps, grad_entropy, grad_lse, grad_mean
    grads = HeadGradients(*(None if grad is None else head.live.gather(grad) for grad in of_values))
    if not options.fixed_shape:
        all_tokens = TokenSelection(head.targets.numel())
        head = head._replace(targets=head.live.gather(head.targets), live=all_tokens)
    statistics = TokenStatistics(*all_outputs[:3])
    tiles = TileStatistics(*all_outputs[STATISTICS:-1]) if bounded and bool(all_outputs[-1]) else None
    engine = _engine(head, bounded)
    gradients = token_gradients(engine, head, options, statistics, tiles, grads, tuple(needs))
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


def _fake_backward(
    grad_logps: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None,
    grad_mean: Tensor | None, outputs: list[Tensor], needs: list[bool], *arguments: Any,
) -> list[Tensor]:  # fmt: skip
    inputs = zip(arguments[:DIFFERENTIABLE], needs, strict=True)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, needed in inputs if needed]


def _save(ctx: Any, inputs: Sequence[Any], output: list[Tensor]) -> None:
    _, ctx.options, ctx.bounded = _split_arguments(inputs)
    ctx.flat = flat_options(replace(ctx.options, extras=()), "")  # the backward reads no extras
    logps, lse, entropy, *other_outputs = _with_missing_outputs(output, ctx.options, ctx.bounded)
    ctx.set_materialize_grads(False)
    constant = [value for place, value in enumerate(other_outputs, 3) if place != MEAN_LOGITS]
    ctx.mark_non_differentiable(*(column for column in constant if column is not None))
    # The backward does not read the extras.
    backward_outputs = logps, lse, entropy, *other_outputs[len(EXTRAS) :]
    ctx.save_for_backward(*inputs[:TENSOR_COUNT], *(column for column in backward_outputs if column is not None))


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    all_grads = _with_missing_outputs(grads, ctx.options, ctx.bounded)
    return _gradients(ctx, *all_grads[:3], all_grads[MEAN_LOGITS])


@differentiable_once
def _gradients(
    ctx: Any, saved: Sequence[Any], grad_logps: Tensor | None, grad_lse: Tensor | None, grad_entropy: Tensor | None,
    grad_mean: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """-> one gradient or None for each argument of SCHEMA."""
    gradients: Outputs = [None] * (TENSOR_COUNT + len(ctx.flat) + 1)
    grads = grad_logps, grad_entropy, grad_lse, grad_mean
    if any(grad is not None for grad in grads):
        tensors, outputs = saved[:TENSOR_COUNT], list(saved[TENSOR_COUNT:])
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        backward = getattr(torch.ops.liger_rl, f"{name_of(fixed_shape=ctx.options.fixed_shape)}_backward")
        values = iter(backward(*grads, outputs, needs, *tensors, *ctx.flat, ctx.bounded))
        gradients[:DIFFERENTIABLE] = [next(values) if needed else None for needed in needs]
    return tuple(gradients)


def name_of(*, fixed_shape: bool) -> str:
    return "linear_logprobs_fixed_shape" if fixed_shape else "linear_logprobs"


# Two operators run the same functions and differ in their tag. `linear_logprobs` waits for the device, so its tag keeps
# it out of the CUDA graphs of torch.compile ("reduce-overhead"). They capture `linear_logprobs_fixed_shape`.
for _fixed in (False, True):
    _tags = {} if _fixed else WAITING_OPERATOR
    _name = f"liger_rl::{name_of(fixed_shape=_fixed)}"
    _operator = torch.library.custom_op(_name, _forward, mutates_args=(), schema=f"({SCHEMA}) -> Tensor[]", **_tags)
    _operator.register_fake(_fake_forward)
    _operator.register_autograd(_differentiate, setup_context=_save)
    torch.library.custom_op(
        f"{_name}_backward", _backward, mutates_args=(), schema=f"({GRADS}, {SCHEMA}) -> Tensor[]", **_tags
    ).register_fake(_fake_backward)


def logprobs_in_graph(
    head: Head,
    options: EngineOptions,
    *,
    wants_gradient: bool,
    targets_name: str,  # the caller's name of the targets, for messages
) -> dict[str, Tensor | None]:
    """The fields of `LogProbs` of all N tokens, by name. `head.live` holds the mask of the tokens that count.

    Tokens that do not count get 0. With `fixed_shape` their values are undefined.

    Raises:
        ValueError: a target outside the vocabulary, raised when the operator runs; never with `fixed_shape`.
    """
    tolerant = options.grad_tolerance != 0.0 and not options.names_chunk and head.low_inputs is None
    bounded, flat = tolerant and wants_gradient, flat_options(options, targets_name)
    operator = getattr(torch.ops.liger_rl, name_of(fixed_shape=options.fixed_shape))
    tensors = head.hidden, head.weight, head.bias, head.low_inputs, head.low_weight, head.targets, head.live.mask
    values = iter(operator(*tensors, *flat, bounded))
    # We return copies, because the caller may write to its results and the backward reads the operator's outputs.
    logps, lse = next(values).clone(), next(values)
    named: dict[str, Tensor | None] = {"logps": logps, "lse": lse.float() if options.lse else None}
    named["entropy"] = next(values).clone() if options.entropy else None
    for name in EXTRAS:
        named[name] = next(values) if name in options.extras else None
    return named
