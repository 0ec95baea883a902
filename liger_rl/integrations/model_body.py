"""What a HuggingFace causal LM, and what it is given, allow to be done to the rows of a batch."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from liger_rl.head.support import Support

# Attention that is given the ends of packed sequences, and what builds a mask for them: flex attention one of blocks,
# which it may compile for each length of a row, the others one of all pairs of tokens.
LINEAR = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
MASKED = ("flex_attention", "sdpa", "eager")
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
# Models without rotary embeddings in whose forwards a token's position is its column, where none is given. Others, such
# as OPT, count the attention mask.
POSITION_IS_COLUMN = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen")
LONGEST = "the rotary embedding depends on the longest row of the batch"  # of a rank, not of the model
# Models whose tokens depend on later ones and that do not say so, in transformers 5.17 even as decoders.
NOT_CAUSAL = {"big_bird", "cpmant", "doge", "megatron-bert", "rembert", "roformer", "xlm", "xlnet"}
CARRIED = ("attention_mask", "position_ids", "support")


@dataclass(frozen=True, kw_only=True)
class Body:
    """What may be done to the rows of a batch, by the model and by its inputs.

    Attributes:
        obstacle: why the batch has to stay as it is; None where rows may be chosen.
        rolls: rows may lose their padding on the left, because positions can be given to the model.
        causal: no token depends on a later one.
        router: the model returns a router loss, a mean over all tokens of the batch.
        rotary: a sequence's positions matter up to a constant.
        packs: attention takes time linear in the number of packed sequences.
        varlen: attention is given the sequences' ends.
        no_packing: why rows cannot be packed; None where nothing speaks against a try.
        positions: positions that the model has, at least, and for all of which its rotary embedding is the same; 0
            where that is not known.
    """

    obstacle: str | None
    rolls: bool
    causal: bool
    router: bool
    rotary: bool
    packs: bool
    varlen: bool
    no_packing: str | None
    positions: int


def body_of(model: nn.Module, swapped: Any, inputs: Mapping[str, Any], ids: Tensor, kept: str | None) -> Body:
    """From the config, the forward and the inputs beside the token ids; `kept` is why the caller keeps the batch as it
    is, or None."""
    config = swapped.config.get_text_config()
    attention_kind = config._attn_implementation
    takes_positions = "position_ids" in inspect.signature(swapped.forward).parameters
    rotary = any(name.endswith("inv_freq") for name, _ in swapped.named_buffers())
    attention, given = inputs.get("attention_mask"), inputs.get("position_ids")
    causal = config.model_type not in NOT_CAUSAL and getattr(config, "is_causal", True)
    causal = causal and all(getattr(part, "is_causal", None) is not False for part in swapped.modules())
    obstacle = kept or _obstacle(model, config, inputs, ids)
    alone = config is swapped.config  # a model of text alone, whose positions are one number a token
    known_positions = given is not None or rotary or config.model_type in POSITION_IS_COLUMN
    # Llama 4 scales queries by their columns, whatever position_ids say.
    by_column = getattr(config, "attn_temperature_tuning", False)
    router = inputs.get("output_router_logits")
    return Body(
        obstacle=obstacle,
        rolls=takes_positions and alone and known_positions and not by_column and attention is not None,
        causal=causal,
        router=bool(getattr(config, "output_router_logits", False) if router is None else router),
        rotary=rotary,
        packs=_is_linear(attention_kind),
        varlen="flash" in attention_kind and "cu_seq_lens_q" in swapped._fused_arguments,
        no_packing=_no_packing(swapped, config, takes_positions and alone, causal, inputs),
        positions=int(min(getattr(config, "max_position_embeddings", None) or 0, _static_positions(config))),
    )


def _obstacle(model: nn.Module, config: Any, inputs: Mapping[str, Any], ids: Tensor) -> str | None:
    plain = (type(None), bool, int, float, str)
    unknown = [name for name, value in inputs.items() if name not in CARRIED and not isinstance(value, plain)]
    if unknown:
        return f"what {', '.join(sorted(unknown))} says of single tokens is not known"
    for name in ("attention_mask", "position_ids"):
        column = inputs.get(name)
        shapes = (ids.shape,) if name == "attention_mask" else (ids.shape, (1, ids.shape[1]))
        if column is not None and not (isinstance(column, Tensor) and column.shape in shapes):
            return f"{name} is not (B, T)"
    support = inputs.get("support")
    if support is not None and not (isinstance(support, Support) and support.tokens == ids.numel()):
        return "support has not a row for each token"
    for part in model.modules():
        if hasattr(part, "_fused_transform"):
            break
        if getattr(getattr(part, "active_peft_config", None), "is_prompt_learning", False):
            return "the adapter puts tokens of its own before each row"
    if ids.shape[1] > _static_positions(config):
        return LONGEST
    return None


def _static_positions(config: Any) -> float:
    """Length of rows up to which the rotary embedding does not depend on the length."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [found, *(value for value in found.values() if isinstance(value, dict))]
    limit = float("inf")
    for kind in kinds:
        name = kind.get("rope_type") or ""
        if "dynamic" in name or name == "longrope":
            own = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, own or config.max_position_embeddings)
    return limit


def _is_linear(attention: str) -> bool:
    return attention in LINEAR or "flash-attn" in attention  # the latter from the hub


def _no_packing(
    swapped: Any, config: Any, takes_positions: bool, causal: bool, inputs: Mapping[str, Any]
) -> str | None:
    name, attention = type(swapped).__name__, config._attn_implementation
    if not takes_positions:
        return f"the forward of {name} takes no position_ids of its own"
    if not causal:
        return f"{name} is not causal"
    others = set(getattr(config, "layer_types", None) or ()) - PACKABLE_LAYERS
    if others:
        return f"{name} has layers of type {', '.join(sorted(others))}"
    if not _is_linear(attention) and attention not in MASKED:
        return f"attention {attention!r} is none of {', '.join((*LINEAR, *MASKED))}"
    if inputs.get("use_cache"):
        return "use_cache is set"
    return None
