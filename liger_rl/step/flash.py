"""The attention of a prefix tree by flash-attn-4, in levels of variable lengths.

A row is cut into chains, tokens of which each sees the one before it, and into runs, tokens of a chain that the same
tokens see. The first level is causal attention within each chain. Behind a run's chain stand the other branches that
continue the run: they see all of it, and are the queries of one of the levels that follow. In a level no two runs have
a query in common. A prompt and its completions have one such level, from all completions but the first to the prompt.

    place   0 1 2 3   4 5 6   7 8   9        two chains: 0 to 6 and 7 to 9
    ends    9 9 9 9   7 7 7   9 9   9        behind the run 0 to 3 stand its queries 7 to 9

Outputs of the levels are joined by their log-sum-exps, and each level's backward is that of the joint output. It is
deterministic, which on an H200 takes 6% more time than to add in any order.
"""

import importlib.util
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_rl.kernels.devices import launch_context

logger = logging.getLogger("liger_rl")
PACKAGE = "flash_attn"
CAPABILITY = 9  # Hopper, on which this was measured
WIDTHS = (64, 128)  # of heads
MOST_LEVELS = 4  # each is a pass over its queries and what stands between them
TOLERANCE = 2e-2  # of the check, in shares of the norm; bfloat16 is 3e-3 off


class Level(NamedTuple):
    """Segments of queries and keys, of which the first queries see the first keys and so on."""

    queries: Tensor  # (s + 1,) int32, where segments begin
    keys: Tensor  # (s + 1,) int32
    longest: tuple[int, int]  # segments
    span: slice  # of the row's tokens, which are the queries
    places: Tensor | None  # (k,) int64, the keys among the row's tokens; None: all of them, and attention is causal


def cut_into_levels(ends: Tensor, device: torch.device) -> list[Level] | None:
    """The levels of a tree's `ends`, (n,) int64 in CPU memory; None if there are more than `MOST_LEVELS`."""
    last, place = ends.numpy(), np.arange(ends.numel())
    begins = np.append(True, last[:-1] <= place[1:])  # chains
    cuts = begins | np.append(True, last[1:] != last[:-1])
    chains, runs = np.flatnonzero(begins), np.append(np.flatnonzero(cuts), last.size)
    bounds = np.append(chains, last.size)
    behind = bounds[np.cumsum(begins)[runs[:-1]]]  # the end of each run's chain
    by_level: list[list[tuple[int, int, int, int]]] = []
    inside: list[int] = []  # ends of the runs around that have queries
    for run in np.flatnonzero(last[runs[:-1]] > behind):
        start, stop = int(runs[run]), int(runs[run + 1])
        while inside and inside[-1] <= start:
            inside.pop()
        if len(inside) == len(by_level):
            by_level.append([])
        by_level[len(inside)].append((int(behind[run]), int(last[start]), start, stop))
        inside.append(int(last[start]))
    if len(by_level) >= MOST_LEVELS:
        return None
    return [_make_level(bounds, bounds, None, device), *(_make_further_level(level, device) for level in by_level)]


def _make_further_level(blocks: list[tuple[int, int, int, int]], device: torch.device) -> Level:
    """Of blocks (first and last + 1 query, first and last + 1 key). What stands between two of them sees no key."""
    blocks = sorted(blocks)
    queries, keys = [blocks[0][0]], [0]
    for first, stop, start, end in blocks:
        if first > queries[-1]:
            queries.append(first)
            keys.append(keys[-1])
        queries.append(stop)
        keys.append(keys[-1] + end - start)
    places = np.concatenate([np.arange(start, end) for *_, start, end in blocks])
    return _make_level(np.array(queries), np.array(keys), places, device)


def _make_level(queries: np.ndarray, keys: np.ndarray, places: np.ndarray | None, device: torch.device) -> Level:
    span = slice(int(queries[0]), int(queries[-1]))
    of_queries, of_keys = (
        torch.from_numpy(x.astype(np.int32)).to(device, non_blocking=True) for x in (queries - span.start, keys)
    )
    longest = int(np.diff(queries).max()), int(np.diff(keys).max())
    index = None if places is None else torch.from_numpy(places).to(device, non_blocking=True)
    return Level(of_queries, of_keys, longest, span, index)


# --- attention --------------------------------------------------------------------------------------------------------


class _TreeAttention(torch.autograd.Function):
    """Of tensors (n, heads, width)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, levels: list[Level], scale: float | None
    ) -> Tensor:
        from liger_rl.step.attention_merge_triton import merge_attention

        kernel, _ = _load_kernels()
        output = lse = query  # of the first level, which has all queries
        for level in levels:
            own = query[level.span], *_take_keys(level, key, value)
            of_level = kernel(*own, softmax_scale=scale, return_lse=True, **_list_segments(level))[:2]
            if level.places is None:
                output, lse = of_level
            else:
                merge_attention(output[level.span], lse[:, level.span], *of_level)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.levels, ctx.scale = levels, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        _, kernel = _load_kernels()
        upstream = upstream.contiguous()
        for level in ctx.levels:
            span = level.span
            own = query[span], *_take_keys(level, key, value), output[span], upstream[span], lse[:, span].contiguous()
            of_level = kernel(*own, softmax_scale=ctx.scale, deterministic=True, **_list_segments(level))
            if level.places is None:
                grads = of_level
            else:
                grads[0][span].add_(of_level[0])
                for grad, of_keys in zip(grads[1:], of_level[1:], strict=True):
                    grad[level.places] += of_keys  # no place is twice among them: the order does not matter
        return *grads, None, None


def _take_keys(level: Level, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if level.places is None else tuple(x.index_select(0, level.places) for x in tensors)


def _list_segments(level: Level) -> dict[str, Any]:
    return {
        "cu_seqlens_q": level.queries,
        "cu_seqlens_k": level.keys,
        "max_seqlen_q": level.longest[0],
        "max_seqlen_k": level.longest[1],
        "causal": level.places is None,
    }


def attend(query: Tensor, key: Tensor, value: Tensor, levels: list[Level], scale: float | None = None) -> Tensor:
    """(1, heads, n, width) the attention of a tree, of tensors of this shape."""
    flat = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # the backward of x[0] makes a copy
    with launch_context(query.device):
        return _TreeAttention.apply(*flat, levels, scale).transpose(0, 1)[None]


# --- whether it can run -----------------------------------------------------------------------------------------------


@cache
def _load_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    # torch's flex attention calls these two names as well.
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


@cache
def is_installed() -> bool:
    """Not by an import, which takes seconds."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except ValueError:  # somebody has put a module without a spec there
        return False
    folders = spec.submodule_search_locations if spec else None
    return any(Path(folder, "cute", "interface.py").exists() for folder in folders or ())


def find_levels(ends: Tensor, window: int | None, device: torch.device) -> list[Level] | str | None:
    """The levels of a tree, or why it has none; None where flash-attn-4 is not installed."""
    if not is_installed():
        return None
    if window is not None:
        return "layers have a window"
    return cut_into_levels(ends, device) or f"shared prefixes are nested more than {MOST_LEVELS - 1} deep"


def choose_levels(levels: list[Level] | str | None, softcap: float | None) -> list[Level] | None:
    """The levels, if these kernels may run them. Says why not, once for each reason."""
    if levels is None or torch.compiler.is_compiling():  # a compiler cannot trace these kernels
        return None
    if softcap is not None:
        levels = "scores have a softcap"
    if isinstance(levels, str):
        _say_why_not(levels)
        return None
    return levels


@cache
def _say_why_not(reason: str) -> None:
    logger.info("attention of shared prefixes: flex attention, not flash-attn-4: %s", reason)


@cache
def can_attend(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, value_width: int
) -> bool:
    """Whether the kernels are there and give the attention of a small tree. Says what runs, once for each shape."""
    if not is_installed():
        return False
    reason = _find_obstacle(device, dtype, width, value_width)
    if reason is None:
        # In a thread of its own: a checkpoint around the layer would count the tensors that its autograd saves.
        with ThreadPoolExecutor(1) as thread:
            reason = thread.submit(_try_kernels, device, dtype, heads, key_heads, width).result()
    what = f"flex attention, not flash-attn-4: {reason}" if reason else "flash-attn-4"
    logger.info("attention of shared prefixes, %d heads of %d: %s", heads, width, what)
    return reason is None


def _find_obstacle(device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != CAPABILITY:
        return "the GPU is no Hopper"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {dtype}"
    if width not in WIDTHS or value_width != width:
        return f"heads have {width} and {value_width} columns, not {' or '.join(map(str, WIDTHS))}"
    return None


def _try_kernels(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int) -> str | None:
    """Why not; the kernels compile here, which takes some seconds."""
    first = [300] * 90 + [150] * 60 + [300] * 100 + list(range(251, 301))
    ends = torch.tensor([*first, *[400] * 60, *[380] * 20, *[400] * 20])  # some queries see no key of a level
    n = ends.numel()
    generator = torch.Generator(device).manual_seed(0)
    *columns, upstream = (
        torch.randn(1, count, n, width, generator=generator, device=device).to(dtype)
        for count in (heads, key_heads, key_heads, heads)
    )
    place = torch.arange(n)
    sees = ((place <= place[:, None]) & (place[:, None] < ends)).to(device)

    def attend_densely(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(heads // key_heads, 1) for x in (key, value))
        scores = (query @ key.mT * width**-0.5).masked_fill(~sees, -torch.inf)
        return scores.softmax(-1) @ value

    def run(attention: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        inputs = [x.to(kind).requires_grad_() for x in columns]
        with torch.enable_grad():
            output = attention(*inputs)
            return [output.detach(), *torch.autograd.grad(output, inputs, upstream.to(kind))]

    try:
        levels = cut_into_levels(ends, device)
        assert levels is not None
        found = run(partial(attend, levels=levels), dtype)
        expected = run(attend_densely, torch.float64)
    except torch.OutOfMemoryError:  # says nothing about the kernels
        raise
    except Exception as error:  # of a compiler, or of versions that do not go together
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    off = float(torch.stack([(x - y).norm() / y.norm() for x, y in zip(found, expected, strict=True)]).amax())
    return None if off < TOLERANCE else f"its outputs or gradients are {off:.0e} off"
