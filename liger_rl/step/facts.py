"""What a model allows a step to do with the rows of its batches: read once for each optimizer step.

`read_facts` looks at the config, the modules and the forward. `fit_facts` adds what depends on the inputs of a batch.
What neither says is found by trials (`trial`).
"""

import inspect
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_rl.models.project import TYPE_INPUTS
from liger_rl.models.router import find_router_loss, has_router_loss
from liger_rl.models.swap import find_swapped
from liger_rl.models.unknown_layers import list_code, list_unknown_layers
from liger_rl.step.attention import find_attention_obstacle
from liger_rl.step.memory import has_reentrant_checkpoints
from liger_rl.step.ranks import find_sharding
from liger_rl.step.reason import Reason
from liger_rl.step.row_readers import find_row_reader
from liger_rl.step.states import StateLayers, find_state_layers, has_closed_states

# Models without rotary embeddings. A token's default position is its column in the first list, and its number among the
# attended tokens of its row in the second.
POSITION_IS_COLUMN = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen")
POSITION_IS_COUNT = ("opt",)
# Models with layers of a state that have no other positions, unless they have a rotary embedding.
WITHOUT_POSITIONS = (
    "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "mamba", "mamba2", "nemotron_h", "zamba", "zamba2",
)  # fmt: skip
# Models with a state that padding on the left changes, which begins anew at position 0.
FEELS_PADDING = ("recurrent_gemma", "deepseek_v4")
DYNAMIC_ROPE = Reason("the rotary embedding depends on the longest row of the batch (rope_type dynamic or longrope)")
# Models whose tokens depend on later ones and whose config does not say so, in transformers 5.17 even as decoders.
NOT_CAUSAL = {"big_bird", "cpmant", "doge", "megatron-bert", "paligemma", "rembert", "roformer", "xlm", "xlnet"}
COMPILED = Reason("the model is compiled, and would be compiled again for each batch", "torch_compile=False")
ACTIVATED_LORA = Reason("activated LoRA begins at a token of each sequence")
PROMPT_LEARNING = Reason("prompt learning of PEFT puts tokens of its own before each sequence")
ROUTER_LOSS = Reason(
    "the router's loss is of all tokens of the batch",
    "router_aux_loss_coef=0, output_router_logits=False elsewhere",
)
USE_CACHE = Reason("use_cache=True keeps keys and values", "use_cache=False")
# On an H200 the host takes as long for what belongs to a weight, in a forward and a backward, as the device for this
# many FLOP of it, with Liger's kernels. Without them the device takes longer for the same weights. Measured at 37,000
# tokens, in one forward against two: Qwen3 0.6B 368 ms against 396, with LoRA 421 against 603; LoRA on 1.7B 707 against
# 710, with 11 GiB more; 0.6B without Liger's kernels 615 against 584. An older GPU takes longer.
HOST_FLOP, MEASURED_CAPABILITY = 6e11, 9
# Per-token inputs that a step can rearrange.
TOKEN_INPUTS = ("attention_mask", "position_ids")
# Inputs of a batch whose sequences were packed into one row.
PACKED_INPUTS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """How a model and its inputs allow the rows of a batch to be rearranged."""

    name: str  # of the model's class
    config: Any  # of the model's text
    dtype: torch.dtype  # of the model's parameters
    device: torch.device  # of the model's first parameter
    sharding: str | None  # what shards the parameters, see `find_sharding`
    has_reentrant_checkpoints: bool
    has_activated_lora: bool
    unknown_layers: Sequence[nn.Module]  # layers of no known package, which a trial looks at
    code: frozenset[Any]  # of the model's layers, see `list_code`
    states: StateLayers | None  # layers with a state that a tree reaches
    obstacle: Reason | None  # why the batch must stay as it is; None if rows may be rearranged
    no_tree: Reason | None  # why rows cannot be trees of shared prefixes; None if a trial may decide
    causal: bool  # no token depends on a later one
    reads_types: bool  # attention depends on `TYPE_INPUTS` also in text
    rotary: bool  # only differences of a sequence's positions matter
    takes_positions: bool  # the forward takes position_ids
    positions_are_known: bool  # a token's default position is a function of its row and its mask
    has_no_positions: bool  # the model's layers have a state, and no other positions
    needs_positions: bool  # rows without left padding need their position_ids
    positions: int  # number of positions that the model has, up to which its rotary embedding is fixed; 0 if unknown
    longest_row: float  # for which the rotary embedding does not depend on the row's length
    router_is_known: bool  # the model's router loss, if it has one, can be computed of other rows
    # Up to so many tokens a step's forward and backward take the host longer than the device; 0 if it is not known.
    host_tokens: float = 0.0
    vocab: float = math.inf  # number of ids that the model embeds; inf if unknown, as beside ids of images
    # Of a batch, by `fit_facts`.
    drops_left_padding: bool = False  # rows may lose padding on the left: the model takes positions or has none
    has_router_loss: bool = False  # the model returns a router loss, a mean over all tokens of the batch
    packed: frozenset[str] | None = None  # which of `PACKED_INPUTS` packed rows have; None: a row is one sequence
    counts_attended: bool = False  # a token's default position is its number among its row's attended tokens


def read_facts(model: Any, wrapper: nn.Module | None = None, *, joined_hooks: bool = False) -> Facts:
    """The facts of a causal LM of transformers, inside of `wrapper` if it has one.

    `joined_hooks`: see `find_row_reader`.
    """
    # Attributes are looked up in `vars`, because `getattr` of a missing one of a module takes a microsecond.
    inner = list(model.modules())
    modules = inner if wrapper is None or wrapper is model else list(wrapper.modules())
    name, config, first = type(model).__name__, model.config.get_text_config(), next(model.parameters())
    # A tower of images has other attention and positions than the text.
    kinds = ((module, vars(module).get("config")) for module in inner)
    text = next((module for module, kind in kinds if getattr(kind, "model_type", None) == config.model_type), model)
    text_modules = inner if text is model else list(text.modules())
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    rotary = bool([1 for module in text_modules for buffer in module._buffers if buffer.endswith("inv_freq")])
    reads_types = model.config.model_type in NOT_CAUSAL
    causal = not reads_types and config.model_type not in NOT_CAUSAL
    causal = causal and getattr(config, "is_causal", True)
    causal = causal and not [module for module in text_modules if vars(module).get("is_causal") is False]
    has_no_positions = config.model_type in WITHOUT_POSITIONS and not rotary
    longest_row, sharding = read_static_positions(config), find_sharding(modules)
    return Facts(
        name=name,
        config=config,
        dtype=first.dtype,
        device=first.device,
        sharding=sharding,
        has_reentrant_checkpoints=has_reentrant_checkpoints(modules),
        has_activated_lora=has_activated_lora(modules),
        unknown_layers=list_unknown_layers(inner),
        code=list_code(inner),
        states=find_state_layers(text_modules),
        obstacle=_find_wrapper_obstacle(modules, model) or find_row_reader(model, inner, joined_hooks=joined_hooks),
        no_tree=_find_tree_obstacle(modules, model, causal and (takes_positions or has_no_positions)),
        causal=causal,
        reads_types=reads_types,
        rotary=rotary,
        takes_positions=takes_positions,
        positions_are_known=rotary or config.model_type in POSITION_IS_COLUMN,
        has_no_positions=has_no_positions,
        # A model of images may take several positions for a token. By default they are columns.
        needs_positions=not (has_no_positions or (rotary and config is not model.config)),
        positions=int(min(getattr(config, "max_position_embeddings", None) or 0, longest_row)),
        longest_row=longest_row,
        router_is_known=find_router_loss(model) is not None,
        host_tokens=0.0 if sharding is not None else _count_host_tokens(model, inner, first.device),
        vocab=getattr(model.get_input_embeddings(), "num_embeddings", math.inf) if config is model.config else math.inf,
    )


def _count_host_tokens(model: Any, modules: list[nn.Module], device: torch.device) -> float:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < MEASURED_CAPABILITY:
        return 0.0
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    outside = {id(getattr(table, "weight", None)) for table in tables}
    weights = [weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in outside]
    if not weights or not all(weight.is_floating_point() for weight in weights):  # packed weights hide their size
        return 0.0
    trained = [weight.numel() for weight in weights if weight.requires_grad]
    size = sum(weight.numel() for weight in weights)
    # Beside larger frozen weights these are adapters. A layer and its two are one function of half as much again.
    layers = len(weights) - (0.75 * len(trained) if 2 * sum(trained) < size else 0)
    forwards = [vars(module).get("forward", type(module).forward) for module in modules]
    is_fused = any("liger_kernel" in str(getattr(forward, "__module__", "")) for forward in forwards)
    return (1 if is_fused else 0.5) * HOST_FLOP * layers / (4 * size + 2 * sum(trained))


def fit_facts(facts: Facts, inputs: Mapping[str, Any], ids: Tensor, *, may_be_packed: bool = False) -> Facts:
    """The facts of a batch, from the names and shapes of its inputs.

    `may_be_packed`: rows with position_ids and no mask are sequences one after the other.
    """
    config, given = facts.config, inputs.get("position_ids") is not None
    counts = config.model_type in POSITION_IS_COUNT and facts.takes_positions and not given
    # Llama 4 scales queries by their columns, whatever position_ids are.
    known = facts.has_no_positions or (facts.takes_positions and (given or facts.positions_are_known))
    known = known and not getattr(config, "attn_temperature_tuning", False) and config.model_type not in FEELS_PADDING
    has_router, no_tree = has_router_loss(config, inputs), facts.no_tree
    if no_tree is None and not (counts or known):
        no_tree = Reason(f"{facts.name} is not a causal model of text that takes position_ids")
    if no_tree is None and inputs.get("use_cache"):
        no_tree = USE_CACHE
    if no_tree is None and has_router and not facts.router_is_known:
        no_tree = Reason(f"{facts.name} has a router loss of its own", ROUTER_LOSS.fix)
    has_mask = inputs.get("attention_mask") is not None
    masks = [name for name in ("attention_mask", *TYPE_INPUTS) if inputs.get(name) is not None]
    is_packed = may_be_packed and given and facts.causal and not masks
    return replace(
        facts,
        packed=PACKED_INPUTS.intersection(inputs) if is_packed else None,
        obstacle=facts.obstacle or _find_input_obstacle(facts, inputs, ids, is_packed),
        no_tree=no_tree,
        drops_left_padding=known and has_mask,
        has_router_loss=has_router,
        counts_attended=counts,
    )


def _find_wrapper_obstacle(modules: list[nn.Module], model: nn.Module) -> Reason | None:
    for module in itertools.takewhile(lambda module: module is not model, modules):
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            return PROMPT_LEARNING
    return None


def _find_input_obstacle(facts: Facts, inputs: Mapping[str, Any], ids: Tensor, is_packed: bool) -> Reason | None:
    known = (*TOKEN_INPUTS, *(() if facts.reads_types else TYPE_INPUTS), *(PACKED_INPUTS if is_packed else ()))
    unknown = [name for name, value in inputs.items() if name not in known and not is_plain(value)]
    if PACKED_INPUTS.intersection(unknown):
        return Reason("its sequences are packed into one row already")
    if unknown:
        return Reason(f"it has {', '.join(sorted(unknown))}, which belong to tokens by their place in the batch")
    shapes: dict[str, tuple] = dict.fromkeys(("attention_mask", *TYPE_INPUTS), (ids.shape,))
    shapes["position_ids"] = (ids.shape, (1, ids.shape[1]))
    for name, allowed in shapes.items():
        column = inputs.get(name)
        if column is not None and not (isinstance(column, Tensor) and column.shape in allowed):
            return Reason(f"its {name} is not (B, T)")
    # Given positions may be larger than the row is long.
    has_positions = inputs.get("position_ids") is not None and not is_packed
    is_dynamic = facts.longest_row < math.inf and (has_positions or ids.shape[1] > facts.longest_row)
    return DYNAMIC_ROPE if is_dynamic else None


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
            length = length or config.max_position_embeddings
            # A row of this length keeps what a longer one before it has made of a dynamic embedding.
            limit = min(limit, length if name == "longrope" else length - 1)
    return limit


def _find_tree_obstacle(modules: list[nn.Module], model: Any, takes_positions: bool) -> Reason | None:
    if not takes_positions:
        return Reason(f"{type(model).__name__} is not a causal model of text that takes position_ids")
    if has_activated_lora(modules):
        return ACTIVATED_LORA
    if [module for module in modules if "_orig_mod" in module._modules or module._compiled_call_impl is not None]:
        return COMPILED
    if has_closed_states(modules):
        return Reason(f"{type(model).__name__} has layers with a state that no sequence can be given")
    config = model.config.get_text_config()
    return find_attention_obstacle(model, modules, config, next(model.parameters()).device)


def has_activated_lora(modules: Collection[Any]) -> bool:
    """Whether an adapter of PEFT's activated LoRA is on one of the modules."""
    variants = (v for module in modules for v in (vars(module).get("lora_variant") or {}).values())
    return any("ALora" in type(variant).__name__ for variant in variants)


def iterate_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules around the swapped model, the outermost first; all modules if none is swapped."""
    swapped = find_swapped(model)
    return itertools.takewhile(lambda module: module is not swapped, model.modules())
