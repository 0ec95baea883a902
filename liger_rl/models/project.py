"""A causal LM's per-token values without its logits: the one forward of TRL's models and of swapped ones.

    hidden = backbone(inputs).last_hidden_state
    logits = transform(hidden @ weight.T + bias)        of the output embeddings; never in memory

The scale and the softcap are in the model's config. What the config does not say is found by `find_difference`, which
compares these two lines with the model's plain forward on a few tokens. A model that does something else is refused.
"""

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_rl.head.checks import FLOAT_DTYPES
from liger_rl.head.logprobs import LogProbs, linear_logprobs
from liger_rl.kernels.public_call import outside_of_graphs
from liger_rl.kernels.statistics import map_fields
from liger_rl.kernels.transform import LogitTransform
from liger_rl.models.adapters import HeadParts, read_head
from liger_rl.models.randomness import no_graph, seeded, without_randomness
from liger_rl.models.tensors import is_dtensor, is_fsdp, is_zero_3, localize, plain_type
from liger_rl.models.unknown_layers import keeping_values, list_unknown_layers

IGNORE_INDEX = -100
# HuggingFace's names. Configs multiply the logits by the first, and divide them by `DIVISOR`.
FACTORS, DIVISOR = ("logit_scale", "output_multiplier", "lm_head_multiplier"), "logits_scaling"
MULTIPLIES = ("hyperclovax",)  # model types that multiply by `DIVISOR`
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
# Of `find_difference`. A softcap bends logits of this size, and a factor moves their log-probabilities by many nats.
TOKENS, LOGIT, IDS = 8, 64.0, 32
LARGEST_HIDDEN = 1e4  # which float16 holds
# Which tokens are of an image; 0 for text.
TYPE_INPUTS = ("token_type_ids", "mm_token_type_ids")
ROUNDINGS = 6  # the most roundings by which two logits of one product may differ ...
LEAST_ROUNDING = 2.0**-12  # ... which is TF32's in a float32 product


class Projection(NamedTuple):
    """What a model gives for a batch of tokens."""

    values: LogProbs  # (B, T)
    output: Any  # of the backbone


def project(
    model: Any, inputs: Mapping[str, Any], targets: Tensor, *, transform: LogitTransform, **options: Any
) -> Projection:
    """Log-probabilities (B, T) of targets[:, t] by the position t of the batch; 0 where a target is negative.

    Args:
        model: a causal LM of transformers, in whose forward this runs.
        inputs: the arguments of its backbone.
        targets: (B, T) token ids.
        transform: that of the model, with the temperature of the call.
        options: in_float32, casts_weight and options of `linear_logprobs`.

    Raises:
        TypeError, ValueError: a head that is no linear layer here, and as `linear_logprobs`.
    """
    output = find_backbone(model)(**inputs)
    return Projection(project_hidden(model, get_hidden(output), targets, transform=transform, **options), output)


def project_labels(model: Any, inputs: Mapping[str, Any], labels: Tensor, **options: Any) -> Projection:
    """`project` of labels as the plain forward takes them: entry t is of labels[:, t], which position t - 1 predicts.

    Entries are 0 at t = 0 and where the label is -100.
    """
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    values, output = project(model, inputs, targets, **options)
    return Projection(map_fields(values, lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)), output)


def project_hidden(
    model: Any,
    hidden: Tensor,  # (B, T, H)
    targets: Tensor,  # (B, T) or (B, T, K)
    *,
    transform: LogitTransform,
    in_float32: bool = False,  # the product is a float32 one, also under autocast
    casts_weight: bool = False,  # outside of autocast the product has the dtype of the hidden states
    **options: Any,
) -> LogProbs:
    """Log-probabilities from the hidden states that a backbone returns.

    A sharded head is made whole, or its ranks fold their rows: `localize`.
    """
    head = read_head(model.get_output_embeddings(), type(model).__name__)

    def compute(hidden: Tensor) -> LogProbs:
        weight = head.linear.weight
        if is_zero_3(weight):
            options["gather"] = gather_zero_3
        hidden, weight = head.widen(hidden, weight)
        local = localize(hidden, weight, bias=head.sum_biases(), in_forward=True)
        return linear_logprobs(
            local.hidden, local.weight, targets.to(local.weight.device), bias=local.bias,
            vocab_parallel=local.vocab_parallel, transform=transform, **options,
        )  # fmt: skip

    device = head.linear.weight.device
    hidden = hidden.to(device)
    context: AbstractContextManager = nullcontext()
    if in_float32:
        hidden, context = hidden.float(), torch.autocast(device.type, enabled=False)
    with context:
        if casts_weight and not torch.is_autocast_enabled(device.type):
            options["compute_dtype"] = hidden.dtype
        return _call_inside(head.linear, compute, hidden) if is_fsdp(head.linear) else compute(hidden)


def _call_inside(module: nn.Module, function: Callable[[Tensor], LogProbs], hidden: Tensor) -> LogProbs:
    """`function(hidden)` in place of the module's forward, around which FSDP2's hooks gather a weight of its own.

    A tensor-parallel plan's hooks, which distribute hidden states and logits, are left out.
    """
    tables: tuple[Any, ...] = (module._forward_pre_hooks, module._forward_hooks)
    whole = [dict(table) for table in tables]
    for table in tables:
        for key in [key for key, hook in table.items() if _is_of(hook, TENSOR_PARALLEL)]:
            del table[key]
    vars(module)["forward"] = lambda x: tuple(function(x))
    try:
        return LogProbs(*module(hidden))
    finally:
        del vars(module)["forward"]
        for table, hooks in zip(tables, whole, strict=True):
            table.clear()
            table.update(hooks)


def gather_zero_3(*parameters: Tensor) -> AbstractContextManager:
    """A context in which parameters that DeepSpeed's ZeRO-3 shards are whole."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    # A tied weight is whole already, and would be sharded behind the context.
    sharded = [p for p in parameters if is_zero_3(p) and p.ds_status != ZeroParamStatus.AVAILABLE]  # type: ignore[attr-defined]
    return deepspeed.zero.GatheredParameters(sharded) if sharded else nullcontext()


def find_backbone(model: Any) -> nn.Module:
    """The module of a causal LM that returns the head's hidden states. ValueError if it has none."""
    backbone = model.base_model
    if backbone is model or model.config.get_text_config() is not model.config:
        # transformers 4.57 names the text's tower alone as the base of a model of images. Llama 4's text names none.
        backbone = getattr(model, "model", backbone)
    if backbone is model:
        raise ValueError(f"{type(model).__name__} has no backbone apart from its head")
    return backbone


def get_hidden(output: Any) -> Tensor:
    """(B, T, H)"""
    hidden = getattr(output, "last_hidden_state", None)
    return output[0] if hidden is None else hidden


def read_transform(model: Any) -> LogitTransform:
    """The scale and the softcap that the config of the model's text names, with a temperature of 1."""
    config = model.config.get_text_config()
    numbers = {name: getattr(config, name, None) for name in (*FACTORS, DIVISOR, *SOFTCAPS)}
    known = {name: float(x) for name, x in numbers.items() if isinstance(x, (int, float)) and x > 0}
    scale = next((known[name] for name in FACTORS if name in known), None)
    if scale is None and DIVISOR in known:
        scale = known[DIVISOR] if config.model_type in MULTIPLIES else 1 / known[DIVISOR]
    softcap = next((known[name] for name in SOFTCAPS if name in known), None)
    return LogitTransform(scale=1.0 if scale is None else scale, softcap=softcap)


# --- the comparison with the plain forward ----------------------------------------------------------------------------

_lock = threading.Lock()  # a comparison changes the model while it runs


class _Differs(Exception):
    """What differs."""


@outside_of_graphs
def find_difference(model: Any, plain_forward: Callable[..., Any]) -> str | None:
    """What `project` and the model's plain forward do not have in common on a few tokens; None if they agree.

    The hidden states that the head gets must be those that the backbone returns, and the log-probabilities must agree.
    They are compared with larger hidden states, too, for which no softcap and no scale is small. All ranks of a sharded
    model compare it at once.
    """
    with _lock:
        try:
            with without_randomness(model, model.device), _make_one_dtype(model), no_graph():
                _compare(model, plain_forward)
        except torch.OutOfMemoryError:
            raise
        except _Differs as difference:
            return str(difference)
        except Exception as error:
            return f"{type(model).__name__} fails on {TOKENS} tokens: {type(error).__name__}: {error}"
    return None


def _make_one_dtype(model: Any) -> AbstractContextManager:
    """Autocast for a model whose head has another dtype than its body, which it cannot run without."""
    head, device = check_head(model).linear.weight.dtype, model.device.type
    if head == next(find_backbone(model).parameters()).dtype or torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, torch.bfloat16)


def _compare(model: Any, plain_forward: Callable[..., Any]) -> None:
    name, head, inputs = type(model).__name__, check_head(model), make_trial_inputs(model, plain_forward)
    # Layers that keep values of each forward give the same in each.
    unknown = list_unknown_layers(list(model.modules()))
    run_plain, run_backbone = keeping_values(unknown)(_run_plain), keeping_values(unknown)(run_alone)
    hidden, logits = run_plain(plain_forward, head, inputs, 1.0, name)
    returned = _get_whole(run_backbone(model, inputs))
    if returned.shape != hidden.shape or not are_close(returned, hidden):
        raise _Differs(f"the head of {name} gets other hidden states than those that its backbone returns")
    _compare_logits(model, hidden, logits)
    factor = min(LOGIT / max(logits.abs().max().item(), 1e-30), LARGEST_HIDDEN / max(hidden.abs().max().item(), 1e-30))
    _compare_logits(model, *run_plain(plain_forward, head, inputs, factor, name))


def _compare_logits(model: Any, hidden: Tensor, logits: Tensor) -> None:
    """hidden (1, T, H), logits (1, T, V) float32: the log-probabilities of some ids are those of the head's product."""
    name, transform, size = type(model).__name__, read_transform(model), logits.abs().max().item()
    if not math.isfinite(size):
        raise _Differs(f"the plain forward of {name} has logits that are not finite")
    # Where something was added to some logits, the largest or the smallest is among these.
    spread = torch.linspace(0, logits.shape[-1] - 1, IDS, device=logits.device).long()
    ids = torch.cat([logits.argmax(-1, True), logits.argmin(-1, True), spread.expand(*logits.shape[:-1], -1)], -1)
    expected = logits.log_softmax(-1).gather(-1, ids)[0].T
    # A row for each id: so the engine of training runs, which takes one target for each token.
    rows = hidden.expand(len(expected), -1, -1)
    seen = project_hidden(model, rows, ids[0].T, transform=transform).logps.to(expected.device)
    difference = (seen - expected).abs().max().item()
    if not difference <= ROUNDINGS * _get_rounding(model, hidden) * max(size, 1.0):
        raise _Differs(
            f"the plain forward of {name} has other log-probabilities than h @ W.T + b of its head and {transform}: "
            f"they differ by {difference:.3g} nats where logits are up to {size:.3g}"
        )


def run_alone(model: Any, inputs: dict[str, Any]) -> Tensor:
    """(1, T, H) the hidden states that the backbone returns, with the random numbers of every such run."""
    with seeded(model.device):
        return get_hidden(find_backbone(model)(**inputs))


def make_trial_inputs(model: Any, plain_forward: Callable[..., Any]) -> dict[str, Any]:
    """A row of a few tokens."""
    vocab = model.config.get_text_config().vocab_size
    ids = (torch.arange(3, 3 + TOKENS, device=model.device) % vocab)[None]
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    parameters = inspect.signature(plain_forward).parameters.keys()
    if "attention_mask" in parameters:
        # Doge of transformers 4.57 is causal without a mask alone.
        inputs["attention_mask"] = torch.ones_like(ids)
    # Gemma 3 of transformers 4.57 demands them in training.
    taken = parameters & inspect.signature(find_backbone(model).forward).parameters.keys()
    return inputs | {name: torch.zeros_like(ids) for name in TYPE_INPUTS if name in taken}


def _run_plain(
    plain_forward: Callable[..., Any], head: HeadParts, inputs: dict[str, Any], factor: float, name: str
) -> tuple[Tensor, Tensor]:
    """(1, T, H) `factor` times the hidden states that the head gets, and the (1, T, V) float32 logits for them."""
    calls: list[Tensor] = []
    thread = threading.get_ident()  # others may run the model at the same time

    def enlarge(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if threading.get_ident() != thread:
            return None
        calls.append(arguments[0] * factor if factor != 1.0 else arguments[0])
        return calls[-1], *arguments[1:]

    hook = head.module.register_forward_pre_hook(enlarge, prepend=True)
    try:
        with seeded(inputs["input_ids"].device):
            output = plain_forward(**inputs, return_dict=True)
    finally:
        hook.remove()
    if len(calls) != 1:
        raise _Differs(f"the forward of {name} must call its head once, it did {len(calls)} times")
    return _get_whole(calls[0]), _gather_vocabulary(output.logits, head.linear.weight).float()


def _gather_vocabulary(logits: Any, weight: Any) -> Tensor:
    """(1, T, V). A tensor-parallel plan may leave each rank the logits of its part of the vocabulary."""
    if is_dtensor(weight) and not is_dtensor(logits) and logits.shape[-1] < weight.shape[0]:
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.Size((*logits.shape[:-1], weight.shape[0]))
        stride = (shape[1] * shape[2], shape[2], 1)
        mesh = weight.device_mesh
        logits = DTensor.from_local(logits, mesh, [Shard(2)] * mesh.ndim, run_check=False, shape=shape, stride=stride)
    return _get_whole(logits)


def _get_whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def are_close(values: Tensor, expected: Tensor) -> bool:
    """Whether two runs on the same tokens agree, to some roundings of their norm."""
    rounding = max(LEAST_ROUNDING, torch.finfo(values.dtype).eps)
    values, expected = values.float(), expected.float()
    return bool((values - expected).norm() <= 2 * rounding * expected.norm())


def _get_rounding(model: Any, hidden: Tensor) -> float:
    kinds = [hidden.dtype, model.get_output_embeddings().weight.dtype]
    if torch.is_autocast_enabled(hidden.device.type):
        kinds.append(torch.get_autocast_dtype(hidden.device.type))
    return max(LEAST_ROUNDING, *(torch.finfo(kind).eps for kind in kinds))


# --- the head ---------------------------------------------------------------------------------------------------------

# Python modules whose hooks and forwards shard a layer. `localize` does what they do.
TENSOR_PARALLEL = ("torch.distributed.tensor.", "transformers.integrations.tensor_parallel")
SHARDING = (*TENSOR_PARALLEL, "torch.distributed.", "transformers.distributed.", "deepspeed.")


def check_head(model: PreTrainedModel) -> HeadParts:
    """The parts of the model's head. TypeError or ValueError if it is no linear layer in memory."""
    name = type(model).__name__
    module = model.get_output_embeddings()
    if module is None:
        raise TypeError(f"model must be a causal LM with a head, {name} has no output embeddings")
    head = read_head(module, name)
    linear = head.linear
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"the head of {name} must be an nn.Linear, got {type(linear).__name__}")
    if linear.weight.device.type == "meta":
        raise ValueError(f"the head's weight of {name} must be in memory, it is on meta: not loaded yet, or offloaded")
    if linear.weight.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"the head's weight of {name} must be float32, bfloat16 or float16, got {linear.weight.dtype} in a "
            f"{type(linear).__name__}; keep the head out of the quantisation"
        )
    return head


@outside_of_graphs
def check_bypassed_modules(model: Any, linear_type: type) -> None:
    """ValueError if the head has a hook, or a forward set on an instance, that `project` leaves out."""
    name = type(model).__name__
    head = read_head(model.get_output_embeddings(), name)
    hooks = sum(
        not _is_of(hook, SHARDING)
        for module in head.bypassed_modules()
        for hooks in (
            module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
        )
        for hook in hooks.values()
    )  # fmt: skip
    if plain_type(head.linear) is not linear_type or hooks:
        raise ValueError(
            f"the head of {name} must be a plain {linear_type.__name__} without hooks, found a "
            f"{type(head.linear).__name__} with {hooks} hooks, which the fused head would leave out; undo that first"
        )
    for module in head.bypassed_modules():
        if not runs_own_forward(module) and not _is_of(module.__dict__["forward"], SHARDING):
            raise ValueError(
                f"the forward of a {type(module).__name__} in the head of {name} was replaced on the instance, which "
                "the fused head would leave out; undo that, or keep the head in memory (accelerate's offload does it)"
            )


def _is_of(function: Any, modules: tuple[str, ...]) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(modules)


def runs_own_forward(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's forward. A hook may move inputs to the weights' device."""
    attributes = module.__dict__
    if "forward" not in attributes:
        return True
    class_forward: Any = type(module).forward
    if getattr(attributes["forward"], "__func__", None) is class_forward:
        return True  # left behind by a hook that was removed
    hook: Any = attributes.get("_hf_hook")
    only_moves = all(type(h).__name__ == "AlignDevicesHook" and not h.offload for h in getattr(hook, "hooks", (hook,)))
    return only_moves and getattr(attributes.get("_old_forward"), "__func__", None) is class_forward
