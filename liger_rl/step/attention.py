"""The attention of a row that is a prefix tree: token q sees token k if k <= q < ends[k], within a layer's window.

On a GPU the mask is flex attention's `BlockMask`, whose kernel skips blocks of 128 x 128 pairs that do not see each
other; where flash-attn-4 is installed and can run, that runs in its place (`step/flash.py`). A model with another kind
of attention runs flex attention too: we wrap the function that transformers has
registered for this kind, and the wrapper calls flex attention if it gets a `BlockMask`. No setting of the model
changes, so activation checkpointing recomputes the same. On a CPU the mask is dense.
"""

import sys
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from liger_rl.models.randomness import list_rates
from liger_rl.step import flash
from liger_rl.step.reason import Reason

# Rows of whole blocks: flex attention then takes a quarter less time, because its kernels check no row's end.
BLOCK = 128
STATE_LAYERS = {"linear_attention", "conv", "hybrid"}  # the last have attention, too
WITHOUT_ATTENTION = {"linear_attention", "conv", "mlp", "moe"}
KNOWN_LAYERS = {"full_attention", "sliding_attention", *STATE_LAYERS, *WITHOUT_ATTENTION}
SDPA = 'attn_implementation="sdpa"'
DENSE_ATTENTION = ("sdpa", "eager")  # kinds of attention that take a dense mask


def find_attention_obstacle(
    model: nn.Module, modules: list[nn.Module], config: Any, device: torch.device
) -> Reason | None:
    """Why rows of this model cannot be trees; None if its attention allows them.

    `modules`: those of the model and its wrappers. `config`: the text model's.
    """
    name, kind = type(model).__name__, config._attn_implementation
    types = set(getattr(config, "layer_types", None) or ())
    if types - KNOWN_LAYERS:
        unknown = ", ".join(sorted(types - KNOWN_LAYERS))
        return Reason(f"{name} has layers of type {unknown}, which take no mask of prefixes")
    buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    if [mask for mask in buffers if mask.dtype == torch.bool and mask.dim() == 4]:
        return Reason(f"{name} makes an attention mask of its own")
    if len({str(place) for place in getattr(model, "hf_device_map", {}).values()}) > 1:
        return Reason(f"the layers of {name} are on several devices", 'leave device_map="auto" out')
    if device.type not in ("cpu", "cuda"):
        return Reason(f"flex attention may have no backward on {device.type}")
    if types and types <= WITHOUT_ATTENTION:
        pass
    elif device.type == "cpu":
        if kind not in DENSE_ATTENTION:
            return Reason(f"attention {kind!r} takes no mask of shared prefixes", SDPA)
    elif kind not in ALL_ATTENTION_FUNCTIONS or not _asks_for_function(model):
        return Reason(f"attention {kind!r} cannot run as flex attention, which shared prefixes need", SDPA)
    if device.type != "cpu" and [module for module in modules if "sinks" in module._parameters]:
        return Reason(f"{name} has attention sinks")
    # An adapter's dropout draws for each element of its input, wherever that stands. A shared token draws once.
    adapted: list[Any] = [module for module in modules if "lora_dropout" in module._modules]
    in_adapters = {dropout for layer in adapted for dropout in layer.lora_dropout.values()}
    if list_rates([module for module in modules if module.training and module not in in_adapters]):
        return Reason("dropout draws for each sequence", _name_dropouts(config))
    return None


def _asks_for_function(model: Any) -> bool:
    """Whether attention looks up the function of its kind. Not all classes that do say so."""
    home = sys.modules.get(type(model).__module__)
    return getattr(model, "_supports_attention_backend", False) or hasattr(home, "ALL_ATTENTION_FUNCTIONS")


def _name_dropouts(config: Any) -> str:
    """The options of the model's config that turn its dropout off."""
    rates = {name: rate for name, rate in vars(config).items() if "drop" in name or "jitter_noise" in name}
    names = [name for name, rate in rates.items() if isinstance(rate, float) and rate > 0]
    names = [name for name in names if not name.startswith(("classifier", "summary"))]  # of heads of other classes
    return ", ".join(f"{name}=0" for name in names) or "set the dropout of the model to 0"


def make_masks(
    config: Any,
    ends: Tensor,  # (n,) int64 in CPU memory; whole blocks unless `dense`
    positions: Tensor,  # (n,) int64 in CPU memory, in each token's sequence
    device: torch.device,
    dtype: torch.dtype,  # of an eager mask
    *,
    dense: bool,
) -> Any:
    """The model's `attention_mask`: a mask (1, 1, n, n), or a dict of masks by type of layer."""
    kind, types = config._attn_implementation, set(getattr(config, "layer_types", None) or ())
    layers = types - WITHOUT_ATTENTION
    if types and not layers:
        return None
    if not dense:
        _install_flex_attention(kind)

    def mask(window: int | None) -> Any:
        if not dense:
            return _make_block_mask(ends, positions, window, device)
        place = torch.arange(ends.numel())
        sees = (place <= place[:, None]) & (place[:, None] < ends)
        if window is not None:
            sees &= positions[:, None] - positions < window
        sees = sees[None, None].to(device, non_blocking=True)
        if kind == "sdpa":
            return sees
        return torch.zeros((), dtype=dtype, device=device).where(sees, torch.finfo(dtype).min)

    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if len(layers) > 1:
        masks = {layer: mask(window if layer == "sliding_attention" else None) for layer in sorted(layers)}
        return masks | dict.fromkeys(types - layers)
    return mask(window if layers <= {"sliding_attention"} else None)


def _make_block_mask(ends: Tensor, positions: Tensor, window: int | None, device: torch.device) -> BlockMask:
    """Everything but the number of blocks is computed on the device, so that the host does not wait for itself."""
    n, blocks = ends.numel(), ends.numel() // BLOCK
    seen, at = (x.to(device, torch.int32, non_blocking=True) for x in (ends, positions))
    place = torch.arange(n, dtype=torch.int32, device=device).view(blocks, BLOCK)
    first, last, by_block = place[:, :1], place[:, -1:], seen.view(blocks, BLOCK)
    earlier = first > first.T
    visible = (earlier & (by_block.amax(1) > first)) | torch.eye(blocks, dtype=torch.bool, device=device)
    whole = earlier & (by_block.amin(1) > last)
    if window is not None:
        low, high = (extreme(at.view(blocks, BLOCK), 1) for extreme in (torch.amin, torch.amax))
        visible &= low[:, None] - high < window
        whole &= high[:, None] - low < window

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < seen[key])

    width = window or 0

    def sees_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, query, key) & (at[query] - at[key] < width)

    chosen_mod: Any = sees if window is None else sees_in_window
    chosen_mod.is_tree = True  # tells this module's block masks from others

    def list_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = (~chosen).to(torch.int8).argsort(dim=1, stable=True)
        return chosen.sum(1, dtype=torch.int32)[None, None], order[None, None].int()

    partial, full = list_blocks(visible & ~whole), list_blocks(whole)
    for x in (seen, at):
        torch._dynamo.maybe_mark_dynamic(x, 0)
    mask: Any = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=chosen_mod, seq_lengths=(n, n))
    mask.ndim = 4  # some models check whether a mask has two dimensions
    mask.levels = flash.find_levels(ends, window, device)
    return mask


# --- flex attention in place of others --------------------------------------------------------------------------------


# (kind of attention, whether transformers has it in its local mapping, not in the global one) -> its function, ours
_replaced: dict[tuple[str, bool], tuple[Callable, Callable]] = {}


def _find_mapping(is_local: bool) -> dict[str, Callable]:
    functions: Any = ALL_ATTENTION_FUNCTIONS
    return functions._local_mapping if is_local else functions._global_mapping


def _install_flex_attention(kind: str) -> None:
    """Let attention of this kind run flex attention if it gets a tree's `BlockMask`, until `restore_attention`.

    In the mapping that has it: a local entry would hide what somebody registers later.
    """
    place = kind, kind in _find_mapping(True)
    function = _find_mapping(place[1])[kind]
    if place not in _replaced or function is not _replaced[place][1]:
        _replaced[place] = function, _wrap_attention(function, softcap=kind != "sdpa")
        _find_mapping(place[1])[kind] = _replaced[place][1]


def restore_attention() -> None:
    """Put transformers' attention functions back. A step that needs trees replaces them again."""
    while _replaced:
        (kind, is_local), (function, ours) = _replaced.popitem()
        mapping = _find_mapping(is_local)
        if mapping.get(kind) is ours:  # else somebody has set another one
            mapping[kind] = function


def _wrap_attention(attention: Callable, *, softcap: bool) -> Callable:
    # SDPA ignores a softcap.
    @wraps(attention)
    def attend_with_blocks(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
    ):
        if not (isinstance(attention_mask, BlockMask) and getattr(attention_mask.mask_mod, "is_tree", False)):
            return attention(module, query, key, value, attention_mask, *args, **options)
        cap = options.get("softcap") if softcap else None
        output = _run_flex_attention(query, key, value, attention_mask, options.get("scaling"), cap)
        return output.transpose(1, 2).contiguous(), None

    return attend_with_blocks


def _run_flex_attention(
    query: Tensor,  # (1, heads, n, D)
    key: Tensor,  # (1, key heads, n, D)
    value: Tensor,
    mask: BlockMask,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    dtype, device = value.dtype, query.device.type
    if torch.is_autocast_enabled(device):  # autocast does so for other kinds of attention
        dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    heads, widths = (query.shape[1], key.shape[1]), (query.shape[3], value.shape[3])
    levels = flash.choose_levels(getattr(mask, "levels", None), softcap)
    if levels is not None and flash.can_attend(query.device, dtype, *heads, *widths):
        return flash.attend(query, key, value, levels, scale)
    for x in (query, key, value):
        torch._dynamo.maybe_mark_dynamic(x, 2)
    shape = dtype, *heads, *widths, scale, softcap, mask.mask_mod.__name__
    of_grad = torch.is_grad_enabled(), *(x.requires_grad for x in (query, key, value))
    attend = _compile_attention(*shape, query.device, *of_grad, torch.is_autocast_enabled(device))
    return attend(query, key, value, mask, scale, softcap)


@cache
def _compile_attention(*kind: Any) -> Callable:
    """Flex attention, compiled for each shape of heads, kind of mask, and state of autograd and autocast.

    Dynamo compiles a code object at most 8 times, and then runs attention with all scores in memory. So each kind gets
    a code object of its own, whose only other variants are a first number of tokens, one block, and any number.
    """
    name = f"tree_attention_{_compile_attention.cache_info().currsize}"
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
        kernel_options=cast(Any, {"IS_DIVISIBLE": True}),  # the row has whole blocks
    )  # fmt: skip
