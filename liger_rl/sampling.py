"""Draw token ids from an lm_head, without the logits: the sampler that agrees with `linear_logprobs` to the bit."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from liger_rl.call.checks import check_count, check_dense, check_flag, check_transform
from liger_rl.call.dtensors import has_dtensor
from liger_rl.call.head_call import HeadCall
from liger_rl.call.keywords import named_keywords
from liger_rl.call.options import IDENTITY, HeadOptions
from liger_rl.call.support import Limits, Support, check_limits
from liger_rl.call.tokens import improper_temperatures
from liger_rl.engines import sampling
from liger_rl.engines.graphs import never_in_a_graph
from liger_rl.kernels.transform import LogitTransform

__all__ = ["Sampled", "sample_tokens"]


class Sampled(NamedTuple):
    """The draws of tokens shaped (B, T) or (N,)."""

    ids: Tensor
    """int64, in [0, V)."""
    logps: Tensor
    """float32 log-probabilities of the ids in nats, over all ids that could be drawn. Without a top_k, top_p or min_p
    they are those of `linear_logprobs(..., batch_invariant=True)`, with one those of the same call with the support."""
    support: Support | None
    """The ids that each token could be drawn from, ascending. None unless asked for."""
    fallbacks: Tensor
    """() int64: tokens that were drawn from tiles of logits, because more than 1024 ids are candidates, or because a
    limit may reach ids with probabilities under 2^-120. With fixed_shape they were not drawn: their id is -1. 0 where
    all tokens are drawn from tiles."""


@named_keywords
@never_in_a_graph
@torch.no_grad()
def sample_tokens(
    hidden: Tensor,
    weight: Tensor,
    *,
    seed: int,
    positions: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    support: bool = False,
    fixed_shape: bool = False,
    bias: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    compute_dtype: torch.dtype | None = None,
) -> Sampled:
    """Draw one id for each row of `hidden` from softmax(transform(hidden @ weight.T + bias) / temperature).

    No gradient is made. On a GPU whose products have an epilogue the logits never reach memory: without limits the
    draw takes 1.1 times the product, of few tokens 1.4. With limits the exponentials of a few hundred tokens are kept
    at a time, 128 MiB in float16, and the host waits for the number of fallbacks, and for the support's size. It also
    waits for the check of a temperature for each token.

    A draw depends on the token's hidden state, the head, `seed` and the token's position alone, on every run.

    Args:
        hidden: (B, T, H) or (N, H), float32, bfloat16 or float16.
        weight: (V, H), in hidden's dtype unless under autocast or with a compute_dtype.
        seed: int in [0, 2^63).
        positions: (B, T) or (N,) int64 in [0, 2^63): tokens with the same seed, position and hidden state get the
            same id. None numbers the tokens of this call. In a generation loop pass, for example,
            sequence * max_length + step.
        temperature: above 0, a number or shaped like the tokens; 0 takes the largest logit, of equal ones the first,
            and gives log-probabilities at temperature 1. The transform's own temperature must be 1.
        top_k, top_p, min_p: limits, by the rules of `Support.from_logits`; None for a temperature of 0.
        support: whether to return what could be drawn. Needs a limit, and excludes fixed_shape.
        fixed_shape: the host does not wait, so a CUDA graph can hold the call. Change `positions` in place between its
            replays. With limits it needs a GPU whose products have an epilogue.
        bias, transform, compute_dtype: as in `linear_logprobs`.

    Raises:
        TypeError, ValueError: as `linear_logprobs`; a limit out of range, or one that does not go with the rest.
    """
    check_flag("support", support)
    check_flag("fixed_shape", fixed_shape)
    check_count("seed", seed, least=0)
    if seed >= 1 << 63:
        raise ValueError(f"seed must be below 2^63, got {seed}")
    check_limits(top_k=top_k, top_p=top_p, min_p=min_p)
    check_transform(transform)
    if has_dtensor(hidden, weight, bias, positions):
        raise ValueError("hidden, weight, bias and positions must be no DTensors; gather the head first")
    if transform.per_token or transform.temperature != 1.0:
        raise ValueError(f"transform.temperature must be 1, because temperature has it; got {transform.temperature}")
    greedy = not isinstance(temperature, Tensor) and temperature == 0
    check_dense("hidden", hidden)
    check_dense("weight", weight)
    vocab = weight.shape[0] if weight.dim() else 0
    limits = Limits(None if top_k is None or top_k >= vocab else top_k, top_p, min_p)
    if greedy and (top_k, top_p, min_p) != (None, None, None):
        raise ValueError("top_k, top_p and min_p must be None with temperature=0, which draws nothing")
    if support and fixed_shape:
        raise ValueError("support must be False with fixed_shape: the host has to know how many ids there are")
    if support and limits.none:
        raise ValueError("support must be False without a top_k, top_p or min_p: every id could be drawn")
    call = HeadCall(
        hidden=hidden, weight=weight, bias=bias, options=HeadOptions(
            transform=transform if greedy else replace(transform, temperature=temperature),
            compute_dtype=compute_dtype, batch_invariant=True, fixed_shape=fixed_shape,
        ),
        targets=torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device),
    )  # fmt: skip
    dtype, shape = call.check_tensors(), call.targets.shape
    if positions is None:
        positions = torch.arange(shape.numel(), device=hidden.device).view(shape)
    elif check_dense("positions", positions, hidden, "hidden").dtype != torch.int64:
        raise TypeError(f"positions must be int64, got {positions.dtype}")
    elif positions.shape != shape:
        raise ValueError(f"positions must be {tuple(shape)} from hidden, got {tuple(positions.shape)}")
    if shape.numel() == 0:
        none = call.targets.view(-1)
        empty = sampling.support_of(sampling.Lists(none, none)) if support else None
        return Sampled(call.targets, torch.zeros(shape, device=hidden.device), empty, none.sum())
    if not fixed_shape:
        for improper in improper_temperatures(temperature, call.targets, None):
            if improper.item():
                raise ValueError(f"temperature must be positive and finite at each token; {improper.item()} are not")
    uniforms = None if greedy else sampling.uniforms_of(seed, positions.reshape(-1))
    drawn = sampling.sample(call, dtype, limits, uniforms, with_lists=support)
    found = None if drawn.lists is None or not support else sampling.support_of(drawn.lists)
    return Sampled(drawn.ids.view(shape), drawn.logps.view(shape), found, drawn.fallbacks)
