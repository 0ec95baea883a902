"""The HuggingFace model of a step: its inputs, its fused forward, and the ways in which its batch may be rearranged.

The other modules of a step know the model through this one alone.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.fused_linear.loss_module import FusedLinearLoss
from liger_rl.head.head_options import HOW
from liger_rl.models.lm_head import is_gathered
from liger_rl.models.swap import (
    FUSED_OPTIONS,
    IGNORE_INDEX,
    PLAIN_ARGUMENTS,
    check_arguments,
    find_swapped,
    swap_lm_head,
)
from liger_rl.models.swap import router_loss as router_loss
from liger_rl.step import tree_attention

# Attention that takes the ends of packed sequences.
LINEAR = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# Attention that builds a mask for packed sequences. Flex attention's mask is of blocks, and may be compiled for each
# length of a row. The others' masks are of all pairs of tokens.
MASKED = ("flex_attention", "sdpa", "eager")
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
# Models without rotary embeddings in which a token's default position is its column, or its number among the tokens of
# its row that the attention mask has.
POSITION_IS_COLUMN = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen")
POSITION_IS_COUNT = ("opt",)
LONGEST = "the rotary embedding depends on the longest row of the batch"  # of a rank, not of the model
# Models whose tokens depend on later ones and whose config does not say so, in transformers 5.17 even as decoders.
NOT_CAUSAL = {"big_bird", "cpmant", "doge", "megatron-bert", "rembert", "roformer", "xlm", "xlnet"}
INVOCATIONS = "an adapter begins at a token of each row"  # PEFT's activated LoRA
# Inputs of single tokens that a step can rearrange.
CARRIED = ("attention_mask", "position_ids", "support")
# Arguments of the forward that the fused head answers itself, or that the loss gives it.
RESERVED = {*FUSED_OPTIONS, *PLAIN_ARGUMENTS, "fused", "num_logits_to_keep"} - {"support"}


@dataclass(frozen=True, kw_only=True)
class Body:
    """How the rows of a batch may be rearranged, by the model and by its inputs."""

    obstacle: str | None  # why the batch must stay as it is; None if rows may be chosen
    rolls: bool  # rows may lose their padding on the left, because the model takes positions
    causal: bool  # no token depends on a later one
    router: bool  # the model returns a router loss, a mean over all tokens of the batch
    rotary: bool  # only differences of a sequence's positions matter
    counts: bool  # a token's default position is its number among its row's attended tokens
    packs: bool  # attention takes time linear in the number of packed sequences
    varlen: bool  # attention takes the sequences' ends
    no_packing: str | None  # why rows cannot be packed; None if a trial may decide
    no_tree: str | None  # why rows cannot be trees of shared prefixes; None if a trial may decide
    config: Any  # of the model's text
    dtype: torch.dtype  # of the model's parameters
    positions: int  # number of positions that the model has, up to which its rotary embedding is fixed; 0 if unknown


def body_of(model: nn.Module, swapped: Any, inputs: Mapping[str, Any], ids: Tensor, obstacle: str | None) -> Body:
    """The body by the config, the forward and the inputs. `obstacle` is one that the caller knows."""
    config = swapped.config.get_text_config()
    takes_positions = "position_ids" in inspect.signature(swapped.forward).parameters
    takes_positions = takes_positions and config is swapped.config  # a model of images too has several for a token
    rotary = any(name.endswith("inv_freq") for name, _ in swapped.named_buffers())
    causal = config.model_type not in NOT_CAUSAL and getattr(config, "is_causal", True)
    causal = causal and all(getattr(module, "is_causal", None) is not False for module in swapped.modules())
    counts = config.model_type in POSITION_IS_COUNT and takes_positions and inputs.get("position_ids") is None
    known_positions = inputs.get("position_ids") is not None or rotary or config.model_type in POSITION_IS_COLUMN
    # Llama 4 scales queries by their columns, whatever position_ids are.
    by_column = getattr(config, "attn_temperature_tuning", False)
    router = inputs.get("output_router_logits")
    router = bool(getattr(config, "output_router_logits", False) if router is None else router)
    return Body(
        obstacle=_obstacle(model, config, inputs, ids) or obstacle,
        rolls=takes_positions and known_positions and not by_column and inputs.get("attention_mask") is not None,
        causal=causal,
        router=router,
        rotary=rotary,
        counts=counts,
        packs=_is_linear(config._attn_implementation),
        varlen="flash" in config._attn_implementation and "cu_seq_lens_q" in getattr(swapped, "_fused_arguments", ()),
        no_packing=_no_packing(type(swapped).__name__, config, takes_positions, causal, inputs),
        no_tree=_no_tree(
            model,
            swapped,
            config,
            counts or (takes_positions and known_positions and not by_column),
            causal,
            router,
            inputs,
            ids,
        ),
        config=config,
        dtype=next(swapped.parameters()).dtype,
        positions=int(min(getattr(config, "max_position_embeddings", None) or 0, _static_positions(config))),
    )


def _obstacle(model: nn.Module, config: Any, inputs: Mapping[str, Any], ids: Tensor) -> str | None:
    for module in wrappers_of(model):
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            return "the adapter puts tokens of its own before each row"
    if inputs.get("support") is not None:
        inputs["support"].check_rows(ids, "input_ids")
    unknown = [name for name, value in inputs.items() if name not in CARRIED and not is_plain(value)]
    if unknown:
        return f"what {', '.join(sorted(unknown))} says of single tokens is not known"
    for name, shapes in (("attention_mask", (ids.shape,)), ("position_ids", (ids.shape, (1, ids.shape[1])))):
        column = inputs.get(name)
        if column is not None and not (isinstance(column, Tensor) and column.shape in shapes):
            return f"{name} is not (B, T)"
    return LONGEST if ids.shape[1] > _static_positions(config) else None


def is_plain(value: Any) -> bool:
    """Whether a model's input says the same of each token."""
    return isinstance(value, (type(None), bool, int, float, str))


def _static_positions(config: Any) -> float:
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
    return attention in LINEAR or "flash-attn" in attention  # the latter from the hub


def _no_packing(name: str, config: Any, takes_positions: bool, causal: bool, inputs: Mapping[str, Any]) -> str | None:
    attention = config._attn_implementation
    if not takes_positions:
        return f"the forward of {name} takes no position_ids of its own"
    if not causal:
        return f"{name} is not causal"
    unpackable = set(getattr(config, "layer_types", None) or ()) - PACKABLE_LAYERS
    if unpackable:
        return f"{name} has layers of type {', '.join(sorted(unpackable))}"
    if not _is_linear(attention) and attention not in MASKED:
        return f"attention {attention!r} is none of {', '.join((*LINEAR, *MASKED))}"
    return "use_cache is set" if inputs.get("use_cache") else None


def _no_tree(
    model: nn.Module,
    swapped: Any,
    config: Any,
    takes_positions: bool,
    causal: bool,
    router: bool,
    inputs: Mapping[str, Any],
    ids: Tensor,
) -> str | None:
    if not (takes_positions and causal):
        return f"{type(swapped).__name__} is not a causal model of text that takes position_ids"
    if inputs.get("support") is not None:
        return "a support has a row for each token of each sequence"
    if has_invocations(model):
        return INVOCATIONS
    if inputs.get("use_cache"):
        return "use_cache is set"
    if router:
        return "the router loss is of all tokens"
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
        return "a compiled model would be compiled again"
    return tree_attention.lacks(swapped, config, ids.device)


def has_invocations(model: nn.Module) -> bool:
    variants = (v for module in model.modules() for v in (getattr(module, "lora_variant", None) or {}).values())
    return any("ALora" in type(variant).__name__ for variant in variants)


def wrappers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules around the swapped model, from outside; all modules if none is swapped."""
    swapped = find_swapped(model)
    return itertools.takewhile(lambda module: module is not swapped, model.modules())


def swapped_model(model: Any) -> Any:
    """The model with a swapped head inside `model`; swaps the head at the first call."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a causal LM of transformers, got {type(model).__name__}")
    swapped = find_swapped(model)
    return find_swapped(swap_lm_head(model)) if swapped is None else swapped


def model_inputs(
    model: nn.Module, swapped: Any, batch: Mapping[str, Any], columns: tuple[str, ...], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The model's inputs except the token ids. Raises ValueError for names that its **kwargs would swallow.

    Raises TypeError for an extra input that neither the model nor a wrapper around it knows.
    """
    accepted = inspect.signature(swapped.forward).parameters
    known = {"input_ids", *columns}
    inputs = {name for name in accepted if name not in RESERVED} | {"support"}
    unknown = [name for name in batch if name not in known and name not in inputs]
    unknown += [name for name in extra if name in known or name in RESERVED]
    if unknown:
        raise ValueError(
            f"batch has no column {', '.join(map(repr, unknown))}; it has input_ids, support, {', '.join(columns)} "
            f"and the other arguments of the forward of {type(swapped).__name__}, without labels and what follows "
            "the head"
        )
    read = {name for module in wrappers_of(model) for name in inspect.signature(module.forward).parameters}
    # What PEFT's wrappers read of their keywords.
    read |= {name for module in wrappers_of(model) for name in getattr(module, "special_peft_forward_args", ())}
    check_arguments(swapped, [name for name in extra if name not in {*read, *FUSED_OPTIONS}])
    arguments = {name: value for name, value in batch.items() if name not in known} | dict(extra)
    if "use_cache" in swapped._fused_arguments:  # some models pass it on without naming it
        arguments.setdefault("use_cache", False)
    return arguments


def fused_forward(
    model: nn.Module,
    loss: FusedLinearLoss,
    inputs: dict[str, Any],
    *,
    others: bool,  # also what the loss reads besides log-probabilities
    temperature: float | None = None,  # None: the loss's
) -> Any:
    """The model's output with log-probabilities of the tokens in `counted`, an input beside `input_ids`."""
    inputs = dict(inputs)
    labels = torch.where(inputs.pop("counted"), inputs["input_ids"], IGNORE_INDEX)
    options = {name: getattr(loss.options, name) for name in (*HOW, *(("entropy", "lse", "extras", "topk") * others))}
    at = loss.transform.temperature if temperature is None else temperature
    return model(labels=labels, fused=True, temperature=at, **options, **inputs)


@contextmanager
def no_graph() -> Iterator[None]:
    """`torch.no_grad` for a forward before one with a graph.

    Autocast keeps the weights that it has cast. Torch before 2.10 then takes those without a graph.
    """
    with torch.no_grad():
        yield
    torch.clear_autocast_cache()


def reshard(model: nn.Module) -> None:
    """Makes FSDP2's parameters DTensors again: the root's are whole after a forward without a backward."""
    if is_gathered(model):
        for module in model.modules():
            getattr(module, "reshard", lambda: None)()
