"""Swap a HuggingFace causal LM's head for the fused one: docs/transformers.md.

The model's own forward runs, and its head returns log-probabilities in place of logits. So any architecture works. The
softcap and the scale that follow the head are probed at the swap.
"""

import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache, wraps
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import TransformersKwargs

from liger_rl.head.head_options import COMPUTE_OPTIONS
from liger_rl.head.logprobs import LogProbs, linear_logprobs
from liger_rl.kernels.argument_checks import check_type
from liger_rl.models.adapters import unwrap_peft
from liger_rl.models.lm_head import (
    install_hooks,
    intercept_logits,
    probe_label_shift,
    probe_transform,
    read_checked_head,
    read_current_head,
    rebind_forward,
    remove_hooks,
)
from liger_rl.models.modules import list_modules
from liger_rl.models.tensors import localize, plain_type

__all__ = ["FusedCausalLMOutput", "is_swapped", "swap_lm_head", "unswap_lm_head"]

IGNORE_INDEX = -100
HEAD_OPTIONS = (*COMPUTE_OPTIONS, "lse", "extras")
HEAD_RESULTS = ("entropy", "temperature", *HEAD_OPTIONS)  # that only the fused forward reads
FUSED_OPTIONS = ("labels", "shift_labels", "num_items_in_batch", *HEAD_RESULTS)
# Arguments of a plain forward that the fused one checks and does not pass on.
PLAIN_ARGUMENTS = ("ignore_index", "return_dict", "logits_to_keep")
# transformers 5.24 calls it cache, and renames past_key_values in calls; earlier versions have the latter alone.
CACHE = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values"))
MODEL_FIELDS = ("aux_loss", "router_logits", CACHE, "hidden_states", "attentions")

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
    Each call reads the active LoRA adapters on the head (PEFT).

    Keyword args: Arguments of the fused call, in addition to the model's own:
        labels: (B, T) token ids as for the plain forward, shifted inside. A position of -100 is not projected.
        shift_labels: (B, T) in place of labels, already shifted: position t predicts shift_labels[:, t].
        entropy: bool, also return entropies.
        temperature: float > 0 that divides the logits.
        num_items_in_batch: divisor of the loss, as the Trainer passes it.
        lse, extras, chunk_tokens, chunk_vocab: as in `linear_logprobs`.

    Any other argument must be one that the model takes, or the call raises TypeError (docs/transformers.md).

    Args:
        model: a causal LM whose head is an `nn.Linear`, with its weights loaded, or a `peft.PeftModel` of one.

    Raises:
        TypeError, ValueError: not a HuggingFace model, or a head or a logit convention that the fused head would not
            reproduce. The model's class and the reason are named, and the model is left as it was.
    """
    swapped: Any = unwrap_peft(model)
    check_type("model", swapped, PreTrainedModel, "a transformers PreTrainedModel")
    with _swap_lock:
        if not is_swapped(model):
            _swap(swapped)
    return model


_swap_lock = threading.Lock()


def _swap(swapped: Any) -> None:
    head = read_checked_head(swapped)
    before: Any = type(swapped)
    name = before.__name__
    if not swapped.can_generate() or swapped.config.is_encoder_decoder:
        raise ValueError(f"model must be a causal LM, whose position t predicts token t + 1; {name} is not")
    after = _derive_fused_class(before)
    install_hooks(head.module)
    try:
        transform = probe_transform(swapped, head)
        if not rebind_forward(swapped, before, after):
            raise ValueError(
                f"the forward of this {name} was replaced on the instance (mixed precision of accelerate's prepare "
                "does that), which would hide the fused one; swap the head before it is"
            )
    except ValueError:
        remove_hooks(swapped)
        raise
    swapped._fused_transform = transform
    swapped._fused_shift = probe_label_shift(swapped, head)
    swapped._fused_head_type = plain_type(head.linear)
    swapped._fused_arguments = _read_argument_names(swapped)
    swapped.__class__ = after


def unswap_lm_head(model: Model) -> Model:
    """Undo `swap_lm_head`; harmless on a model that is not swapped. ValueError if the model's class changed since."""
    if not is_swapped(model):
        return model
    swapped: Any = unwrap_peft(model)
    after, before = type(swapped), vars(type(swapped)).get("_class_before_swap")
    if before is None:
        raise ValueError(f"{after.__name__} was derived from the swapped class; undo that first")
    if not rebind_forward(swapped, after, before):
        raise ValueError(f"the forward of this {after.__name__} was replaced after the swap; undo that first")
    swapped.__class__ = before
    del swapped._fused_transform, swapped._fused_shift, swapped._fused_head_type, swapped._fused_arguments
    remove_hooks(swapped)
    return model


def is_swapped(model: nn.Module) -> bool:
    """Whether `model`, or the model inside a `peft.PeftModel`, has a fused head."""
    return isinstance(unwrap_peft(model), _FusedHead)


def find_swapped(model: nn.Module) -> Any:
    """The swapped model in `model` and its wrappers (PEFT, DDP, torch.compile); None if there is none."""
    return next((module for module in list_modules(model) if isinstance(module, _FusedHead)), None)


def _read_argument_names(model: nn.Module) -> frozenset[str]:
    """Names of the arguments that a forward of `model` or of its submodules reads."""
    names = {*PLAIN_ARGUMENTS, *_list_keys(TransformersKwargs)}
    # The arguments of a model do not reach layers without submodules.
    for kind in {type(module) for module in list_modules(model) if any(True for _ in module.children())}:
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


@cache
def _derive_fused_class(model_class: Any) -> type:
    # A subclass, and not a patched instance: copies and DataParallel's replicas then run their own forward.
    @wraps(model_class.forward)
    def forward(self, *args, fused: bool = False, **kwargs):
        if not fused:
            if not kwargs.keys() <= self._fused_arguments:
                _check_plain_arguments(self, kwargs)
            return model_class.forward(self, *args, **kwargs)
        return _fused_forward(self, model_class.forward, args, **kwargs)

    # The signature names the columns of a data set to the Trainer; accelerate would unwrap this forward away.
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    del forward.__wrapped__

    @wraps(model_class.__init__)
    def __init__(self, *args, **kwargs):
        # A new model is plain: it has no weights yet, and its head was not probed.
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


def _fused_forward(
    model: Any,
    plain_forward: Callable,
    args: tuple,
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
    **kwargs: Any,
) -> FusedCausalLMOutput:
    options = {name: kwargs.pop(name) for name in HEAD_OPTIONS if name in kwargs}
    check_arguments(model, kwargs)
    if (labels is None) == (shift_labels is None):
        hint = "; transformers' Trainer keeps labels back with label_smoothing_factor: set it to 0, and "
        hint += "smooth by FusedLinearCrossEntropyLoss(label_smoothing=...)"
        raise ValueError(
            "labels or shift_labels must be given with fused=True, one of them, got "
            + (f"neither{hint}" if labels is None else "both")
        )
    if ignore_index != IGNORE_INDEX:
        raise ValueError(f"ignore_index must be {IGNORE_INDEX} with fused=True")
    if return_dict is False:
        raise ValueError("return_dict=False has no meaning with fused=True, which returns a FusedCausalLMOutput")
    if isinstance(logits_to_keep, Tensor) or logits_to_keep != 0:
        raise ValueError("logits_to_keep has no meaning with fused=True: the labels say which positions are projected")
    ids = kwargs.get("input_ids", args[0] if args else None)
    targets = _read_targets(labels, shift_labels, ids)
    transform = replace(model._fused_transform, temperature=temperature)

    head = read_current_head(model, model._fused_head_type)
    dtypes: dict[str, torch.dtype] = {}  # of `_pack_results`

    def per_token(hidden: Tensor) -> Tensor:
        """(..., H) -> (..., columns). It runs within the head's call, around which FSDP gathers the weight."""
        hidden, weight = head.widen(hidden.to(head.linear.weight.device), head.linear.weight)
        local = localize(hidden, weight, bias=head.sum_biases(), in_forward=True)
        result = linear_logprobs(
            local.hidden,
            local.weight,
            targets.to(hidden.device),
            bias=local.bias,
            vocab_parallel=local.vocab_parallel,
            transform=transform,
            entropy=entropy,
            **options,
        )
        packed, found = _pack_results(result)
        dtypes.update(found)
        return packed

    with intercept_logits(head.module, per_token) as request:
        output = plain_forward(model, *args, return_dict=True, **kwargs)
    assert request.output is not None  # the probe at the swap has seen that the forward calls its head
    values = _unpack_results(request.output, dtypes)
    logps = values.pop("logps")
    if num_items_in_batch is None:
        num_items_in_batch = (targets >= 0).sum().clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logps.device)
    loss = -logps.sum() / num_items_in_batch
    fields = {name: getattr(output, name, None) for name in MODEL_FIELDS}
    if fields["aux_loss"] is not None:
        loss = loss + router_loss(model, fields["aux_loss"]).to(loss.device)
    if shift_labels is None:
        logps = nn.functional.pad(logps[:, :-1], (1, 0))
        for name, value in values.items():
            values[name] = torch.cat([torch.zeros_like(value[:, :1]), value[:, :-1]], 1)
    return FusedCausalLMOutput(
        loss=loss if model._fused_shift or shift_labels is not None else None,
        per_token_logps=logps,
        **values,
        **fields,
    )


def _read_targets(labels: Tensor | None, shift_labels: Tensor | None, ids: Any) -> Tensor:
    """(B, T) ids that each position predicts."""
    name, targets = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    targets = _check_labels(name, targets, ids)
    if shift_labels is not None:
        return targets
    return nn.functional.pad(targets[:, 1:], (0, 1), value=IGNORE_INDEX)


def _pack_results(result: LogProbs) -> tuple[Tensor, dict[str, torch.dtype]]:
    """(..., columns) float32, all results as one answer of a head, and the dtypes of the results by name."""
    values = {name: value for name, value in result._asdict().items() if value is not None}
    return torch.stack([x.float() for x in values.values()], -1), {name: x.dtype for name, x in values.items()}


def _unpack_results(packed: Tensor, dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
    return {name: column.to(dtype) for (name, dtype), column in zip(dtypes.items(), packed.unbind(-1), strict=True)}


def _check_plain_arguments(model: Any, names: Iterable[str]) -> None:
    """TypeError for arguments that say something with fused=True alone, which many plain forwards would ignore."""
    lost = [name for name in names if name in (*HEAD_RESULTS, "fuse") and name not in model._fused_arguments]
    if lost:
        raise TypeError(f"{', '.join(lost)} must not be given to {type(model).__name__} without fused=True")


def check_arguments(model: Any, names: Iterable[str]) -> None:
    """TypeError if a swapped model takes no argument of one of these names."""
    unknown = [name for name in names if name not in model._fused_arguments]
    if unknown:
        raise TypeError(
            f"{type(model).__name__} takes no {', '.join(unknown)} with fused=True; it takes its own arguments and "
            f"{', '.join(FUSED_OPTIONS)}"
        )


def _check_labels(name: str, labels: Any, ids: Tensor | None) -> Tensor:
    check_type(name, labels, Tensor, "a tensor")
    if labels.dim() != 2 or (ids is not None and labels.shape != ids.shape):
        expected = "(B, T)" if ids is None else f"(B, T) = {tuple(ids.shape)} from input_ids"
        raise ValueError(f"{name} must be {expected}, got {tuple(labels.shape)}")
    return labels


def router_loss(model: Any, aux_loss: Tensor) -> Tensor:
    """A mixture of experts' aux_loss, weighted as the model's own loss weighs it."""
    for holder in (model, model.config):
        if hasattr(holder, "router_aux_loss_coef"):
            return holder.router_aux_loss_coef * aux_loss
    raise ValueError(f"{type(model).__name__} returns an aux_loss, but names no router_aux_loss_coef to weigh it by")
