"""The attention of a row that is a prefix tree: token q sees token k if k <= q < ends[k], within a layer's window.

On a GPU the mask is flex attention's `BlockMask`. Its kernel leaves out blocks of 128 x 128 pairs that do not see each
other. A model of another kind of attention runs flex attention too: the function that transformers has registered for
this kind is wrapped, and the wrapper calls flex attention where it gets a `BlockMask`. No setting of the model changes,
so a layer that is run again in the backward does the same. On a CPU the mask is dense.
"""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BLOCK = 128
LAYERS = {"full_attention", "sliding_attention"}
DENSE = ("sdpa", "eager")  # kinds of attention that take a dense mask


def lacks(model: nn.Module, config: Any, device: torch.device) -> str | None:
    """Why rows of this model cannot be trees; None if its attention allows it. `config` is that of its text."""
    name, kind = type(model).__name__, config._attn_implementation
    if not {"position_ids", "attention_mask"} <= set(inspect.signature(model.forward).parameters):
        return f"the forward of {name} takes no position_ids or no attention_mask"
    layers = set(getattr(config, "layer_types", None) or ()) - LAYERS
    if layers:
        return f"{name} has layers of type {', '.join(sorted(layers))}"
    if any(mask.dtype == torch.bool and mask.dim() == 4 for mask in model.buffers()):
        return f"{name} has a mask of columns of its own"
    if len({str(place) for place in getattr(model, "hf_device_map", {}).values()}) > 1:
        return f"{name} is split over devices"
    if device.type not in ("cpu", "cuda"):
        return f"flex attention may have no backward on {device.type}"
    if device.type == "cpu":
        if kind not in DENSE:
            return f"attention {kind!r} takes no dense mask, as trees have on a CPU"
    elif kind not in ALL_ATTENTION_FUNCTIONS or not getattr(model, "_supports_attention_backend", False):
        return f"attention {kind!r} cannot be replaced by flex attention"
    if device.type != "cpu" and any(hasattr(module, "sinks") for module in model.modules()):
        return f"{name} has attention sinks"
    return "dropout draws for each sequence" if any(map(_drops, model.modules())) else None


def _drops(module: nn.Module) -> bool:
    """Whether the module draws: it is a dropout, or has the rate of a functional one or of a router's noise."""
    if not module.training:
        return False
    rates = [value for name, value in vars(module).items() if "drop" in name or "jitter_noise" in name]
    rates += [module.p] if isinstance(module, nn.modules.dropout._DropoutNd) else []
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def masks(
    config: Any,
    ends: Tensor,  # (n,) int64 in CPU memory
    positions: Tensor,  # (n,) int64 in CPU memory, in each token's sequence
    device: torch.device,
    dtype: torch.dtype,  # of an eager mask
    *,
    dense: bool,
) -> Any:
    """What the model's `attention_mask` has to be: a mask (1, 1, n, n), or a dict of them by type of layer."""
    kind = config._attn_implementation
    if not dense:
        _flex_serves(kind)

    def mask(window: int | None) -> Any:
        if not dense:
            return _block_mask(ends, positions, window, device)
        place = torch.arange(ends.numel())
        sees = (place <= place[:, None]) & (place[:, None] < ends)
        if window is not None:
            sees &= positions[:, None] - positions < window
        sees = sees[None, None].to(device, non_blocking=True)
        if kind == "sdpa":
            return sees
        return torch.zeros((), dtype=dtype, device=device).where(sees, torch.finfo(dtype).min)

    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    layers = set(getattr(config, "layer_types", None) or ())
    if len(layers) > 1:
        return {layer: mask(window if layer == "sliding_attention" else None) for layer in sorted(layers)}
    return mask(None if layers == {"full_attention"} else window)


def _block_mask(ends: Tensor, positions: Tensor, window: int | None, device: torch.device) -> BlockMask:
    n = ends.numel()
    blocks = -(-n // BLOCK)
    padding = (0, blocks * BLOCK - n)
    # A padded token neither sees nor is seen.
    ends = nn.functional.pad(ends, padding)
    place = torch.arange(blocks * BLOCK).view(blocks, BLOCK)
    first, last = place[:, :1], place[:, -1:].clamp(max=n - 1)
    by_block = ends.view(blocks, BLOCK)
    least = by_block.amin(1)
    least[-1] = by_block[-1, : BLOCK - padding[1]].amin()
    earlier = first > first.T
    some = (earlier & (by_block.amax(1) > first)) | torch.eye(blocks, dtype=torch.bool)
    whole = earlier & (least > last)
    if window is not None:
        known = nn.functional.pad(positions, padding, mode="constant", value=int(positions[-1])).view(blocks, BLOCK)
        low, high = known.amin(1), known.amax(1)
        some &= low[:, None] - high < window
        whole &= high[:, None] - low < window
    if padding[1]:  # a kernel may not look whether a key of a whole block is there
        whole[-1] = whole[:, -1] = False
    seen = ends.to(device, torch.int32, non_blocking=True)
    at = nn.functional.pad(positions, padding).to(device, torch.int32, non_blocking=True)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < seen[key])

    width = window or 0

    def sees_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, query, key) & (at[query] - at[key] < width)

    chosen_mod: Any = sees if window is None else sees_in_window
    chosen_mod.is_tree = True  # other masks of blocks are not this module's

    def lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = (~chosen).to(torch.int8).argsort(dim=1, stable=True)
        numbers = (chosen.sum(1), order)
        counts, indices = (x[None, None].to(device, torch.int32, non_blocking=True) for x in numbers)
        return counts, indices

    partial, full = lists(some & ~whole), lists(whole)
    for x in (seen, at):
        torch._dynamo.maybe_mark_dynamic(x, 0)
    mask: Any = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=chosen_mod, seq_lengths=(n, n))
    mask.ndim = 4  # some models ask whether a mask has two dimensions
    return mask


# --- flex attention in place of others --------------------------------------------------------------------------------


@cache
def _flex_serves(kind: str) -> None:
    """Makes flex attention run where attention of this kind gets a tree's `BlockMask`. It holds for the process."""
    ALL_ATTENTION_FUNCTIONS[kind] = _with_blocks(ALL_ATTENTION_FUNCTIONS[kind], softcap=kind != "sdpa")


def _with_blocks(attention: Callable, *, softcap: bool) -> Callable:
    # SDPA has no softcap and leaves it out.
    @wraps(attention)
    def either(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any):
        if not (isinstance(attention_mask, BlockMask) and getattr(attention_mask.mask_mod, "is_tree", False)):
            return attention(module, query, key, value, attention_mask, *args, **options)
        cap = options.get("softcap") if softcap else None
        output = _flex(query, key, value, attention_mask, options.get("scaling"), cap)
        return output.transpose(1, 2).contiguous(), None

    return either


def _flex(
    query: Tensor,  # (1, heads, n, D)
    key: Tensor,  # (1, key heads, n, D)
    value: Tensor,
    mask: BlockMask,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    dtype, device = value.dtype, query.device.type
    if torch.is_autocast_enabled(device):  # as it converts the arguments of other kinds of attention
        dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    for x in (query, key, value):
        torch._dynamo.maybe_mark_dynamic(x, 2)
    heads = query.shape[1], key.shape[1]
    attend = _compiled(dtype, *heads, query.shape[3], value.shape[3], scale, softcap, mask.mask_mod.__name__)
    return attend(query, key, value, mask, scale, softcap)


@cache
def _compiled(*shape: Any) -> Callable:
    """Compiled flex attention of its own for each shape of heads and kind of mask.

    Dynamo counts recompilations by code object, up to a limit, so each has a code object of its own.
    """
    name = f"tree_attention_{_compiled.cache_info().currsize}"
    return torch.compile(FunctionType(_attend.__code__.replace(co_name=name), globals(), name))


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: Any, softcap: Any) -> Any:
    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    groups = query.shape[1] // key.shape[1]
    if groups & (groups - 1):  # flex attention takes powers of two
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return flex_attention(
        query, key, value, score_mod=None if softcap is None else capped, block_mask=mask, scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )  # fmt: skip
