"""The HuggingFace model of a step: its inputs, its fused forward, and how its batch may be rearranged.

The other modules of a step reach the model through this one.
"""

import inspect
import itertools
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_rl.fused_linear.loss_module import FusedLinearLoss
from liger_rl.head.head_options import COMPUTE_OPTIONS
from liger_rl.hints import hint
from liger_rl.models.modules import list_modules, list_parameters
from liger_rl.models.swap import (
    FUSED_OPTIONS,
    IGNORE_INDEX,
    PLAIN_ARGUMENTS,
    find_swapped,
    swap_lm_head,
)
from liger_rl.models.swap import router_loss as router_loss
from liger_rl.models.tensors import is_dtensor, is_zero_3
from liger_rl.step.attention import find_attention_obstacle
from liger_rl.step.reason import Reason
from liger_rl.step.router import find_router_module
from liger_rl.step.row_readers import find_row_reader

# Attention that takes the ends of packed sequences.
LINEAR_ATTENTION = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# Attention that builds a mask for packed sequences: flex attention of blocks, maybe compiled for each length of a row,
# the others of all pairs of tokens.
MASKED_ATTENTION = ("flex_attention", "sdpa", "eager")
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
# Models without rotary embeddings. A token's default position is its column in the first list, and its number among the
# attended tokens of its row in the second.
POSITION_IS_COLUMN = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen")
POSITION_IS_COUNT = ("opt",)
# Models with layers of a state that have no other positions, unless they have a rotary embedding.
WITHOUT_POSITIONS = ("falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba")
# Models with a state that padding on the left changes, which begins anew at position 0.
FEELS_PADDING = ("recurrent_gemma",)
DYNAMIC_ROPE = Reason("the rotary embedding depends on the longest row of the batch (rope_type dynamic or longrope)")
# Models whose tokens depend on later ones and whose config does not say so, in transformers 5.17 even as decoders.
NOT_CAUSAL = {"big_bird", "cpmant", "doge", "megatron-bert", "paligemma", "rembert", "roformer", "xlm", "xlnet"}
COMPILED = Reason("the model is compiled, and would be compiled again for each batch", "torch_compile=False")
ACTIVATED_LORA = Reason("activated LoRA begins at a token of each sequence")
ROUTER_LOSS = Reason(
    "the router's loss is of all tokens of the batch",
    "router_aux_loss_coef=0, output_router_logits=False elsewhere",
)
USE_CACHE = Reason("use_cache=True keeps keys and values", "use_cache=False")
# Per-token inputs that a step can rearrange.
TOKEN_INPUTS = ("attention_mask", "position_ids")
# Which tokens are of an image. A batch stays as it is if one is not 0.
TYPE_INPUTS = ("token_type_ids", "mm_token_type_ids")
# Inputs of a batch whose sequences were packed into one row.
PACKED_INPUTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
# Arguments of the forward that the fused head reads itself, or that come from the loss.
RESERVED = {*FUSED_OPTIONS, *PLAIN_ARGUMENTS, "fused", "num_logits_to_keep"}


@dataclass(frozen=True, kw_only=True)
class Body:
    """How the model and its inputs allow the rows of a batch to be rearranged."""

    obstacle: Reason | None  # why the batch must stay as it is; None if rows may be rearranged
    drops_left_padding: bool  # rows may lose their padding on the left, because the model takes positions or has none
    needs_positions: bool  # these rows need their position_ids
    causal: bool  # no token depends on a later one
    has_router_loss: bool  # the model returns a router loss, a mean over all tokens of the batch
    rotary: bool  # only differences of a sequence's positions matter
    counts_attended: bool  # a token's default position is its number among its row's attended tokens
    packs_by_default: bool  # attention's time is linear in the number of packed sequences
    takes_sequence_ends: bool  # attention takes the sequences' ends
    no_packing: Reason | None  # why rows cannot be packed; None if a trial may decide
    no_tree: Reason | None  # why rows cannot be trees of shared prefixes; None if a trial may decide
    config: Any  # of the model's text
    dtype: torch.dtype  # of the model's parameters
    positions: int  # number of positions that the model has, up to which its rotary embedding is fixed; 0 if unknown


def read_body(model: nn.Module, swapped: Any, inputs: Mapping[str, Any], ids: Tensor, obstacle: Reason | None) -> Body:
    """The body from the config, the forward and the inputs. `obstacle`: one that the caller knows."""
    config = swapped.config.get_text_config()
    takes_positions = "position_ids" in inspect.signature(swapped.forward).parameters
    # A tower of images has other attention and positions than the text.
    kinds = ((module, getattr(module, "config", None)) for module in list_modules(swapped))
    text = next((module for module, kind in kinds if getattr(kind, "model_type", None) == config.model_type), swapped)
    rotary = any(name.endswith("inv_freq") for module in list_modules(text) for name in module._buffers)
    causal = NOT_CAUSAL.isdisjoint((config.model_type, swapped.config.model_type)) and getattr(
        config, "is_causal", True
    )
    causal = causal and all(getattr(module, "is_causal", None) is not False for module in list_modules(text))
    counts = config.model_type in POSITION_IS_COUNT and takes_positions and inputs.get("position_ids") is None
    known_positions = inputs.get("position_ids") is not None or rotary or config.model_type in POSITION_IS_COLUMN
    # Llama 4 scales queries by their columns, whatever position_ids are.
    known_positions = takes_positions and known_positions and not getattr(config, "attn_temperature_tuning", False)
    known_positions = known_positions and config.model_type not in FEELS_PADDING
    without_positions = config.model_type in WITHOUT_POSITIONS and not rotary
    attention = config._attn_implementation
    body = Body(
        obstacle=_find_obstacle(model, swapped.config, inputs, ids) or obstacle or find_row_reader(swapped),
        drops_left_padding=(known_positions or without_positions) and inputs.get("attention_mask") is not None,
        # A model of images may take several positions for a token. By default they are columns.
        needs_positions=not (without_positions or (rotary and config is not swapped.config)),
        causal=causal,
        has_router_loss=has_router_loss(config, inputs),
        rotary=rotary,
        counts_attended=counts,
        packs_by_default=_is_linear(attention),
        takes_sequence_ends="flash" in attention and "cu_seq_lens_q" in getattr(swapped, "_fused_arguments", ()),
        no_packing=_find_packing_obstacle(type(swapped).__name__, config, takes_positions, causal, inputs),
        no_tree=None,
        config=config,
        dtype=next(swapped.parameters()).dtype,
        positions=int(min(getattr(config, "max_position_embeddings", None) or 0, read_static_positions(config))),
    )
    no_tree = _find_tree_obstacle(model, swapped, body, counts or known_positions, inputs, ids.device)
    return replace(body, no_tree=no_tree)


def _find_obstacle(model: nn.Module, config: Any, inputs: Mapping[str, Any], ids: Tensor) -> Reason | None:
    for module in iterate_wrappers(model):
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            return Reason("prompt learning of PEFT puts tokens of its own before each sequence")
    known = TOKEN_INPUTS if config.model_type in NOT_CAUSAL else (*TOKEN_INPUTS, *TYPE_INPUTS)
    unknown = [name for name, value in inputs.items() if name not in known and not is_plain(value)]
    if PACKED_INPUTS.intersection(unknown):
        return Reason("its sequences are packed into one row already", "padding_free=False, packing=False")
    if unknown:
        return Reason(f"it has {', '.join(sorted(unknown))}, which belong to tokens by their place in the batch")
    shapes: dict[str, tuple] = dict.fromkeys(("attention_mask", *TYPE_INPUTS), (ids.shape,))
    shapes["position_ids"] = (ids.shape, (1, ids.shape[1]))
    for name, allowed in shapes.items():
        column = inputs.get(name)
        if column is not None and not (isinstance(column, Tensor) and column.shape in allowed):
            return Reason(f"its {name} is not (B, T)")
    return DYNAMIC_ROPE if ids.shape[1] > read_static_positions(config.get_text_config()) else None


def has_router_loss(config: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether the model returns a router loss, by its config or its inputs."""
    router = inputs.get("output_router_logits")
    return bool(getattr(config, "output_router_logits", False) if router is None else router)


def is_plain(value: Any) -> bool:
    """Whether a model's input is one value for all tokens."""
    return isinstance(value, (type(None), bool, int, float, str))


def read_static_positions(config: Any) -> float:
    """The longest row for which the rotary embedding does not depend on the row's length."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limit = float("inf")
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        name = kind.get("rope_type") or ""
        if "dynamic" in name or name == "longrope":
            length = kind.get("original_max_position_embeddings")
            length = length or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, length or config.max_position_embeddings)
    return limit


def _is_linear(attention: str) -> bool:
    return attention in LINEAR_ATTENTION or "flash-attn" in attention  # the latter from the hub


def _find_packing_obstacle(
    name: str, config: Any, takes_positions: bool, causal: bool, inputs: Mapping[str, Any]
) -> Reason | None:
    attention = config._attn_implementation
    if not takes_positions:
        return Reason(f"the forward of {name} takes no position_ids of its own")
    if not causal:
        return Reason(f"{name} is not causal")
    unpackable = set(getattr(config, "layer_types", None) or ()) - PACKABLE_LAYERS
    if unpackable:
        return Reason(f"{name} has layers of type {', '.join(sorted(unpackable))}")
    if not _is_linear(attention) and attention not in MASKED_ATTENTION:
        return Reason(f"attention {attention!r} is none of {', '.join((*LINEAR_ATTENTION, *MASKED_ATTENTION))}")
    return USE_CACHE if inputs.get("use_cache") else None


def _find_tree_obstacle(
    model: nn.Module, swapped: Any, body: Body, takes_positions: bool, inputs: Mapping[str, Any], device: torch.device
) -> Reason | None:
    if not (takes_positions and body.causal):
        return Reason(f"{type(swapped).__name__} is not a causal model of text that takes position_ids")
    if has_activated_lora(model):
        return ACTIVATED_LORA
    if inputs.get("use_cache"):
        return USE_CACHE
    if body.has_router_loss and find_router_module(swapped) is None:
        return Reason(f"{type(swapped).__name__} has a router loss of its own", ROUTER_LOSS.fix)
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in list_modules(model)):
        return COMPILED
    return find_attention_obstacle(swapped, body.config, device)


def has_activated_lora(model: nn.Module) -> bool:
    """Whether an adapter of PEFT's activated LoRA is on the model."""
    variants = (v for module in list_modules(model) for v in (getattr(module, "lora_variant", None) or {}).values())
    return any("ALora" in type(variant).__name__ for variant in variants)


_shardings: WeakKeyDictionary[nn.Module, tuple[Any, str, str | None]] = WeakKeyDictionary()


def find_sharding(model: nn.Module) -> str | None:
    """What shards the model's parameters: "ZeRO-3", "FSDP1", "DTensor" (FSDP2, tensor parallelism), or None.

    Looked for once: sharding replaces a model's first parameter, or its class, or gives it an attribute.
    """
    first = next(model.parameters(), None)
    known, state = _shardings.get(model), f"{type(first)} {is_zero_3(first)}"
    if known is None or known[0]() is not first or known[1] != state:
        known = (weakref.ref(first) if first is not None else lambda: None), state, _look_for_sharding(model)
        _shardings[model] = known
    return known[2]


def _look_for_sharding(model: nn.Module) -> str | None:
    parameters = list_parameters(model)
    if any(map(is_zero_3, parameters)):
        return "ZeRO-3"
    if any(is_dtensor(parameter) for parameter in parameters):
        return "DTensor"
    is_fsdp1 = any("FullyShardedDataParallel" in type(module).__name__ for module in list_modules(model))
    return "FSDP1" if is_fsdp1 else None


def iterate_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules around the swapped model, the outermost first; all modules if none is swapped."""
    swapped = find_swapped(model)
    return itertools.takewhile(lambda module: module is not swapped, list_modules(model))


def get_swapped_model(model: Any) -> Any:
    """The model with a swapped head inside `model`. The first call swaps the head."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a causal LM of transformers, got {type(model).__name__}")
    swapped = find_swapped(model)
    return find_swapped(swap_lm_head(model)) if swapped is None else swapped


def read_model_inputs(
    model: nn.Module,
    swapped: Any,
    batch: Mapping[str, Any],
    loss: FusedLinearLoss,
    extra: Mapping[str, Any],
    options: Collection[str],  # names of the step's own keywords
) -> dict[str, Any]:
    """The model's inputs except the token ids.

    ValueError for a column that the forward does not name, TypeError for an extra input that neither the model nor a
    wrapper around it reads.
    """
    name, columns = type(swapped).__name__, ("mask", *loss.COLUMNS)
    accepted = inspect.signature(swapped.forward).parameters
    known = {"input_ids", *columns}
    inputs = {name for name in accepted if name not in RESERVED}
    unknown = [name for name in batch if name not in known and name not in inputs]
    unknown += [name for name in extra if name in known or name in RESERVED]
    if unknown:
        raise ValueError(
            f"batch has no column {', '.join(map(repr, unknown))}{_hint_input(unknown[0], loss, columns)}; it has "
            f"input_ids, {', '.join(columns)} and the other arguments of the forward of {name}, without "
            "labels and what follows the head"
        )
    read = {name for module in iterate_wrappers(model) for name in inspect.signature(module.forward).parameters}
    # What PEFT's wrappers read of their keywords.
    read |= {name for module in iterate_wrappers(model) for name in getattr(module, "special_peft_forward_args", ())}
    unread = [key for key in extra if key not in {*read, *FUSED_OPTIONS, *swapped._fused_arguments}]
    if unread:
        raise TypeError(
            f"{name} takes no {', '.join(unread)} with fused=True{_hint_input(unread[0], loss, options)}; a step takes "
            f"{', '.join(options)} and the arguments of the model's forward"
        )
    arguments = {name: value for name, value in batch.items() if name not in known} | dict(extra)
    if "use_cache" in swapped._fused_arguments:  # some models pass it on without naming it
        arguments.setdefault("use_cache", False)
    return arguments


def _hint_input(name: str, loss: FusedLinearLoss, known: Collection[str]) -> str:
    """What a name may stand for that is neither a column nor a keyword of a step."""
    kind, settings = type(loss), loss.list_options()
    if name == "labels":
        return " (mask says which of the input_ids count)"
    if name in settings:
        return f" ({name} is an option of {kind.__name__})"
    return hint(name, list(known)) or hint(name, settings).replace("?", f" of {kind.__name__}?")


def fused_forward(
    model: nn.Module,
    loss: FusedLinearLoss,
    inputs: dict[str, Any],
    *,
    others: bool,  # also entropies, extras and lists that the loss reads
    temperature: float | None = None,  # None: the loss's
) -> Any:
    """The model's output with log-probabilities of the tokens of `input_ids` where inputs["counted"] is set."""
    inputs = dict(inputs)
    labels = torch.where(inputs.pop("counted"), inputs["input_ids"], IGNORE_INDEX)
    options = {
        name: getattr(loss.options, name) for name in (*COMPUTE_OPTIONS, *(("entropy", "lse", "extras") * others))
    }
    at = loss.transform.temperature if temperature is None else temperature
    return model(labels=labels, fused=True, temperature=at, **options, **inputs)


@contextmanager
def no_graph() -> Iterator[None]:
    """`torch.no_grad` for a forward that is followed by one with a graph.

    Autocast caches the weights that it casts. Before torch 2.10 the next forward would take these, without a graph.
    """
    with torch.no_grad():
        yield
    torch.clear_autocast_cache()
