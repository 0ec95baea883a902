"""Swap a HuggingFace causal LM's head for the fused one: docs/transformers.md.

A fused call runs the model's backbone and the fused head (`project`); any other call is the plain forward. The swap
gives the model a subclass of its class, with one more keyword, and three attributes that a fused call reads.
"""

import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeVar, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import TransformersKwargs

from liger_rl.head.head_options import COMPUTE_OPTIONS
from liger_rl.kernels.argument_checks import check_type
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.models.adapters import unwrap_peft
from liger_rl.models.project import (
    IGNORE_INDEX,
    are_close,
    check_bypassed_modules,
    check_head,
    find_backbone,
    find_difference,
    make_trial_inputs,
    project,
    project_labels,
    read_transform,
    run_alone,
)
from liger_rl.models.randomness import no_graph, without_randomness
from liger_rl.models.router import find_router_loss, has_router_loss, weigh_router_loss
from liger_rl.models.tensors import plain_type, reshard
from liger_rl.models.unknown_layers import keeping_values, list_unknown_layers

__all__ = ["FusedCausalLMOutput", "is_swapped", "swap_lm_head", "unswap_lm_head"]

HEAD_OPTIONS = ("lse", "extras")
HEAD_RESULTS = ("entropy", "temperature", *HEAD_OPTIONS)  # that only the fused forward reads
RESULTS = ("entropy", "lse", *EXTRAS)  # fields of `LogProbs` beside the log-probabilities
FUSED_OPTIONS = ("labels", "shift_labels", "num_items_in_batch", *HEAD_RESULTS)
# Arguments of a plain forward that the fused one checks and does not pass on.
PLAIN_ARGUMENTS = ("ignore_index", "return_dict", "logits_to_keep")
# transformers 5.24 calls it cache, and renames past_key_values in calls; earlier versions have the latter alone.
CACHE = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values"))
MODEL_FIELDS = ("router_logits", CACHE, "hidden_states", "attentions")
# Hooks of accelerate (`device_map`, `dispatch_model`) set `module.forward` on the instance. They keep the replaced
# forward in `module._old_forward`, and call it between moving the inputs in and the outputs out.
FORWARD_ATTRIBUTES = ("forward", "_old_forward")
# In place of fused=True: compare the model; per-token values alone, of rows whose losses are computed elsewhere.
COMPARE, ROWS = "compare", "rows"

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class FusedCausalLMOutput(CausalLMOutputWithPast):
    """The output of a swapped model with `fused=True`.

    `logits` is None. All other fields are those of the plain forward. The loss is () the mean negative log-likelihood
    of the labelled tokens (their sum over `num_items_in_batch` if given), plus the model's weighted router loss if it
    has one: the plain forward's loss. It is None with `labels` if the plain forward does not shift them (Bart, ...).
    """

    loss: Tensor | None = None  # type: ignore[assignment]
    # (B, T) float32, log-probability in nats of labels[b, t] given the tokens before it, or of shift_labels[b, t].
    per_token_logps: Tensor | None = None  # 0 where the label is -100, and with labels at t = 0
    entropy: Tensor | None = None  # (B, T) float32 in nats, of the distribution that predicted each label
    # (B, T), as in `LogProbs`, entry t for labels[b, t]; None unless requested
    lse: Tensor | None = None
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    is_top1: Tensor | None = None
    aux_loss: Tensor | None = None
    router_logits: Any = None


def swap_lm_head(model: Model) -> Model:
    """Give `model` a fused head, reached by `model(..., labels=labels, fused=True)`; returns the same object.

    The plain forward and `generate` are untouched, no parameter is copied or renamed, and tied weights stay tied.
    Each call reads the active LoRA adapters on the head (PEFT). A fused call runs the model's backbone, so what the
    plain forward itself does beside the head is left out. The swap compares both on a few tokens.

    Keyword args: Arguments of the fused call, in addition to the backbone's own:
        labels: (B, T) token ids as for the plain forward, shifted inside. A position of -100 is not projected.
        shift_labels: (B, T) in place of labels, already shifted: position t predicts shift_labels[:, t].
        entropy: bool, also return entropies.
        temperature: float > 0 that divides the logits.
        num_items_in_batch: divisor of the loss, as the Trainer passes it.
        lse, extras: as in `linear_logprobs`.

    Any other argument must be one that the backbone takes, or the call raises TypeError (docs/transformers.md).

    Args:
        model: a causal LM whose head is an `nn.Linear`, with its weights loaded, or a `peft.PeftModel` of one.

    Raises:
        TypeError, ValueError: not a HuggingFace model, or a head or a logit convention that the fused head would not
            reproduce. The model's class and what differs are named, and the model is left as it was.
    """
    swapped: Any = unwrap_peft(model)
    if not isinstance(swapped, PreTrainedModel):
        wraps_one = isinstance(model, nn.Module) and any(isinstance(m, PreTrainedModel) for m in model.modules())
        fix = "swap the model inside of it" if wraps_one else "give its hidden states to linear_logprobs or a loss"
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(swapped).__name__}; {fix}")
    with _swap_lock:
        if not is_swapped(model):
            _swap(swapped)
    return model


_swap_lock = threading.Lock()


def _swap(model: Any) -> None:
    before: Any = type(model)
    name = before.__name__
    head = check_head(model)
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"model must be a causal LM, whose position t predicts token t + 1; {name} is not")
    after, arguments = _derive_fused_class(before), _read_argument_names(model)
    if not rebind_forward(model, before, after):
        raise ValueError(
            f"the forward of this {name} was replaced on the instance (mixed precision of accelerate's prepare "
            "does that), which would hide the fused one; swap the head before it is"
        )
    model._fused_arguments, model._fused_head_type = arguments, plain_type(head.linear)
    model.__class__ = after
    try:
        # Inside of the model's forward, where FSDP has gathered its parameters.
        model(fused=COMPARE)
    except BaseException:
        _restore(model, after, before)
        raise
    finally:
        reshard(model)  # an optimizer made now would get the gathered parameters


def unswap_lm_head(model: Model) -> Model:
    """Undo `swap_lm_head`; harmless on a model that is not swapped. ValueError if the model's class changed since."""
    if not is_swapped(model):
        return model
    swapped: Any = unwrap_peft(model)
    after, before = type(swapped), vars(type(swapped)).get("_class_before_swap")
    if before is None:
        raise ValueError(f"{after.__name__} was derived from the swapped class; undo that first")
    if not _restore(swapped, after, before):
        raise ValueError(f"the forward of this {after.__name__} was replaced after the swap; undo that first")
    return model


def _restore(model: Any, after: type, before: type) -> bool:
    if not rebind_forward(model, after, before):
        return False
    model.__class__ = before
    for name in ("_fused_arguments", "_fused_head_type", "_fused_shift"):
        vars(model).pop(name, None)
    return True


def rebind_forward(module: nn.Module, before: Any, after: Any) -> bool:
    """Replace class `before`'s forward by class `after`'s in the instance's own attributes.

    Returns whether a call of the module now reaches `after`'s forward. If False, the instance has another forward that
    does not call its class's, and nothing was changed.
    """
    attributes = module.__dict__
    if "forward" not in attributes:
        return True
    names = [name for name in FORWARD_ATTRIBUTES if getattr(attributes.get(name), "__func__", None) is before.forward]
    reaches_class = "forward" in names or ("_old_forward" in names and "_hf_hook" in attributes)
    if reaches_class:
        for name in names:
            setattr(module, name, MethodType(after.forward, module))
    return reaches_class


def is_swapped(model: nn.Module) -> bool:
    """Whether `model`, or the model inside a `peft.PeftModel`, has a fused head."""
    return isinstance(unwrap_peft(model), _FusedHead)


def find_swapped(model: nn.Module) -> Any:
    """The swapped model in `model` and its wrappers (PEFT, DDP, torch.compile); None if there is none."""
    # Another thread may be comparing a model whose class is changed already.
    heads = (module for module in model.modules() if isinstance(module, _FusedHead))
    return next((head for head in heads if "_fused_shift" in vars(head)), None)


def _read_argument_names(model: Any) -> frozenset[str]:
    """Names of the arguments that a forward of the model's backbone or of its submodules reads."""
    names = {*PLAIN_ARGUMENTS, *_list_keys(TransformersKwargs)}
    # The arguments of a model do not reach layers without submodules.
    for kind in {type(module) for module in find_backbone(model).modules() if any(True for _ in module.children())}:
        for owner in kind.__mro__:  # a forward may pass its arguments to that of a base class
            if issubclass(owner, nn.Module) and owner is not nn.Module and "forward" in vars(owner):
                names |= _read_names(vars(owner)["forward"])
    return frozenset(names | ({"past_key_values"} if CACHE in names else set()))


def _read_names(forward: Callable) -> set[str]:
    """Parameters of `forward`, keys of the TypedDict of its **kwargs, and every name that its code quotes."""
    try:
        parameters = inspect.signature(forward, eval_str=True).parameters
    except NameError:  # an annotation whose import only type checkers run
        parameters = inspect.signature(forward).parameters
    names = {name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            names.update(*map(_list_keys, get_args(parameter.annotation)))
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return names | {c for c in (code.co_consts if code else ()) if isinstance(c, str) and c.isidentifier()}


def _list_keys(typed_dict: Any) -> frozenset[str]:
    return getattr(typed_dict, "__required_keys__", frozenset()) | getattr(typed_dict, "__optional_keys__", frozenset())


class _FusedHead:
    """Mark of the classes that `_derive_fused_class` makes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles by the plain class, because the derived one cannot be imported by name."""
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *rest = reduced
        before = vars(type(self)).get("_class_before_swap")
        if before is None:
            return reduced
        arguments = tuple(before if argument is type(self) else argument for argument in arguments)
        return (_rebuild, (before, function, arguments), *rest)


def _rebuild(model_class: type, function: Callable, arguments: tuple) -> Any:
    """Unpickle: a swapped model, whose state is set afterwards."""
    model = function(*arguments)
    model.__class__ = _derive_fused_class(model_class)
    return model


# By the id of the plain class, which lives as long as the fused one.
_fused_classes: WeakValueDictionary[int, type] = WeakValueDictionary()


def _derive_fused_class(model_class: Any) -> type:
    fused = _fused_classes.get(id(model_class))
    if fused is None:
        fused = _fused_classes[id(model_class)] = _make_fused_class(model_class)
    return fused


def _make_fused_class(model_class: Any) -> type:
    # A subclass, and not a patched instance: copies and DataParallel's replicas then run their own forward.
    @wraps(model_class.forward)
    def forward(self, *args, fused: bool | str = False, **kwargs):
        if not fused:
            if not kwargs.keys() <= self._fused_arguments:
                _check_plain_arguments(self, kwargs)
            return model_class.forward(self, *args, **kwargs)
        if fused == COMPARE:
            return _check_difference(self, partial(model_class.forward, self))
        names = list(inspect.signature(model_class.forward).parameters)[1:]
        run = _run_rows if fused == ROWS else _fused_forward
        # Dynamo of torch 2.8 cannot break a graph beside a zip with `strict`.
        return run(self, **dict(zip(names, args)), **kwargs)  # noqa: B905

    # The signature names the columns of a data set to the Trainer; accelerate would unwrap this forward away.
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    del forward.__wrapped__

    @wraps(model_class.__init__)
    def __init__(self, *args, **kwargs):
        # A new model is plain: it has no weights yet, and its head was not compared.
        self.__class__ = model_class
        model_class.__init__(self, *args, **kwargs)

    body = {
        "forward": forward,
        "__init__": __init__,
        "__doc__": model_class.__doc__,
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
        "_class_before_swap": model_class,
    }
    # The name stays, because save_pretrained writes it into the config.
    return type(model_class.__name__, (_FusedHead, model_class), body)


def _check_difference(model: Any, plain_forward: Callable[..., Any]) -> None:
    """ValueError if a fused call would give something else, or the model is not causal. Sets `_fused_shift`."""
    difference = find_difference(model, plain_forward)
    if difference is not None:
        raise ValueError(difference)
    inputs, unknown = make_trial_inputs(model, plain_forward), list_unknown_layers(list(model.modules()))
    ids = inputs["input_ids"]
    others = {**inputs, "input_ids": torch.cat([ids[:, :-1], ids[:, :1]], 1)}
    with without_randomness(model, ids.device), no_graph():
        hidden, changed = (keeping_values(unknown)(run_alone)(model, x)[:, :-1] for x in (inputs, others))
        # Rounding may differ, because the experts of a mixture see other groups of tokens.
        if not are_close(changed, hidden):
            name = type(model).__name__
            raise ValueError(f"model must be a causal LM; a token of this {name} changes the hidden states before it")
        with keeping_values(unknown):
            shift = _shifts_labels(model, plain_forward, inputs)
        model._fused_shift = shift


def _shifts_labels(model: Any, plain_forward: Callable[..., Any], inputs: dict[str, Any]) -> bool:
    """Whether position t predicts labels[:, t + 1] in the model's own loss, not labels[:, t].

    The second token alone has a label. What the model adds to a loss is not in the difference of two such losses.
    """
    if hasattr(model.config.get_text_config(), "output_router_logits"):
        inputs = {**inputs, "output_router_logits": False}
    try:
        log_p = plain_forward(**inputs, return_dict=True).logits[0, :2].float().log_softmax(-1)
        # The ids that the first two positions predict most differently.
        apart = log_p[0] - log_p[1]
        losses = []
        for token in (apart.argmin(), apart.argmax()):
            labels = torch.full_like(inputs["input_ids"], IGNORE_INDEX)
            labels[0, 1] = token
            losses.append(plain_forward(**inputs, labels=labels, return_dict=True).loss.mean())
    except Exception:  # a model without a loss, or with logits of its rank's vocabulary alone
        return True
    shifted, unshifted = (log_p[position, apart.argmax()] - log_p[position, apart.argmin()] for position in (0, 1))
    difference = losses[0] - losses[1]
    return not bool((difference - unshifted).abs() < (difference - shifted).abs())


def _run_rows(model: Any, /, *, labels: Tensor, temperature: float, **inputs: Any) -> FusedCausalLMOutput:
    options = {name: inputs.pop(name) for name in (*HEAD_OPTIONS, *COMPUTE_OPTIONS, "entropy") if name in inputs}
    check_bypassed_modules(model, model._fused_head_type)
    transform = replace(read_transform(model), temperature=temperature)
    values, output = project_labels(model, inputs, labels, transform=transform, **options)
    results = {name: getattr(values, name) for name in RESULTS}
    router_logits = getattr(output, "router_logits", None)
    return FusedCausalLMOutput(per_token_logps=values.logps, router_logits=router_logits, **results)


def _fused_forward(
    model: Any,
    /,
    *,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    entropy: bool = False,
    temperature: Any = 1.0,
    num_items_in_batch: Any = None,
    ignore_index: int = IGNORE_INDEX,
    return_dict: bool | None = True,
    logits_to_keep: int | Tensor = 0,
    **inputs: Any,
) -> FusedCausalLMOutput:
    options = {name: inputs.pop(name) for name in HEAD_OPTIONS if name in inputs}
    check_arguments(model, inputs)
    _check_fused_arguments(labels, shift_labels, ignore_index, return_dict, logits_to_keep)
    check_bypassed_modules(model, model._fused_head_type)
    name, targets = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    targets = _check_labels(name, targets, inputs.get("input_ids"))
    router = None
    if has_router_loss(model.config.get_text_config(), inputs):
        inputs["output_router_logits"], router = True, find_router_loss(model)
        if router is None:
            raise ValueError(f"{type(model).__name__} has a router loss of its own; set output_router_logits=False")
    values, output = (project_labels if shift_labels is None else project)(
        model, inputs, targets, transform=replace(read_transform(model), temperature=temperature), entropy=entropy,
        **options,
    )  # fmt: skip
    logps = values.logps
    items = num_items_in_batch
    if items is None:
        counted = targets[:, 1:] if shift_labels is None else targets
        items = (counted >= 0).sum().clamp(min=1)
    loss = -logps.sum() / (items.to(logps.device) if isinstance(items, Tensor) else items)
    fields = {name: getattr(output, name, None) for name in MODEL_FIELDS}
    aux_loss = None if router is None else router.compute(output.router_logits, inputs.get("attention_mask"))
    if aux_loss is not None:
        loss = loss + weigh_router_loss(model, aux_loss).to(loss.device)
    results = {name: getattr(values, name) for name in RESULTS}
    return FusedCausalLMOutput(
        loss=loss if model._fused_shift or shift_labels is not None else None,
        per_token_logps=logps, aux_loss=aux_loss, **results, **fields,
    )  # fmt: skip


def _check_fused_arguments(
    labels: Any, shift_labels: Any, ignore_index: Any, return_dict: Any, logits_to_keep: Any
) -> None:
    if (labels is None) == (shift_labels is None):
        hint = "; transformers' Trainer keeps labels back with label_smoothing_factor: set it to 0, and "
        hint += "smooth by FusedLinearCrossEntropyLoss(label_smoothing=...)"
        raise ValueError(
            "labels or shift_labels must be given with fused=True, one of them, got "
            + (f"neither{hint}" if labels is None else "both")
        )
    if ignore_index != IGNORE_INDEX:
        raise ValueError(f"ignore_index must be {IGNORE_INDEX} with fused=True, got {ignore_index!r}")
    if return_dict is False:
        raise ValueError("return_dict=False has no meaning with fused=True, which returns a FusedCausalLMOutput")
    if isinstance(logits_to_keep, Tensor) or logits_to_keep != 0:
        raise ValueError("logits_to_keep has no meaning with fused=True: the labels say which positions are projected")


def _check_plain_arguments(model: Any, names: Iterable[str]) -> None:
    """TypeError for arguments that say something with fused=True alone, which many plain forwards would ignore."""
    lost = [name for name in names if name in (*HEAD_RESULTS, "fuse") and name not in model._fused_arguments]
    if lost:
        raise TypeError(f"{', '.join(lost)} must not be given to {type(model).__name__} without fused=True")


def check_arguments(model: Any, names: Iterable[str]) -> None:
    """TypeError if the backbone of a swapped model takes no argument of one of these names."""
    unknown = [name for name in names if name not in model._fused_arguments]
    if unknown:
        raise TypeError(
            f"{type(model).__name__} takes no {', '.join(unknown)} with fused=True; it takes its backbone's arguments "
            f"and {', '.join(FUSED_OPTIONS)}"
        )


def _check_labels(name: str, labels: Any, ids: Tensor | None) -> Tensor:
    check_type(name, labels, Tensor, "a tensor")
    if labels.dim() != 2 or (ids is not None and labels.shape != ids.shape):
        expected = "(B, T)" if ids is None else f"(B, T) = {tuple(ids.shape)} from input_ids"
        raise ValueError(f"{name} must be {expected}, got {tuple(labels.shape)}")
    return labels
