"""Swap a HuggingFace causal LM's head for the fused one: per-token log-probabilities without logits.

    model = swap_lm_head(AutoModelForCausalLM.from_pretrained(...))
    out = model(input_ids, attention_mask=attention_mask, labels=labels, fused=True, entropy=True)
    out.per_token_logps, out.entropy, out.loss

The model's own forward still runs, with its head replaced for the length of the call by one that keeps the hidden
states it is given. So whatever the model does before the head (a final norm, a scale) is in, for any architecture,
and what it does after the head (a softcap, a scale) is tried out at swap time and has to be one that we know.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from liger_rl.integrations.accelerate import rebind_forward, runs_own_forward
from liger_rl.integrations.liger_layers import apply_liger_layers, check_liger_layers
from liger_rl.integrations.peft import Head, base_model, read_head
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import FLOAT_DTYPES, linear_logprobs

# HuggingFace's names for what is done to the head's output; whether a model multiplies or divides is seen by trying.
SCALE_NAMES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
SOFTCAP_NAMES = ("final_logit_softcapping",)
PROBE_LOGITS = (-60.0, -7.0, -0.5, 0.25, 3.0, 50.0)
IGNORE_INDEX = -100
HEAD_OPTIONS = ("grad_tolerance", "unbiased", "chunk_tokens", "chunk_vocab")


@dataclass
class FusedCausalLMOutput(ModelOutput):
    """What a swapped model returns with `fused=True`.

    Attributes:
        loss: () mean negative log-likelihood of the labelled tokens (their sum over `num_items_in_batch` where that
            is given), plus the model's weighted router loss if it has one: the plain forward's loss.
        per_token_logps: (B, T) float32, log-probability in nats of labels[b, t] given the tokens before it; 0 where
            the label is -100 and at t = 0, which nothing predicts. With `shift_labels`, of shift_labels[b, t].
        entropy: (B, T) float32 in nats, of the distribution that predicted each label; None unless asked for.
        aux_loss, router_logits, past_key_values, hidden_states, attentions: the model's own, as in its plain forward.
    """

    loss: Tensor | None = None
    per_token_logps: Tensor | None = None
    entropy: Tensor | None = None
    aux_loss: Tensor | None = None
    router_logits: Any = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None


MODEL_FIELDS = ("aux_loss", "router_logits", "past_key_values", "hidden_states", "attentions")


Model = TypeVar("Model", bound=nn.Module)


def swap_lm_head(model: Model, *, liger_layers: bool = False) -> Model:
    """Give `model` a fused head, reached by `model(..., labels=labels, fused=True)`; returns the same object.

    The plain forward and `generate` are untouched, no parameter is copied or renamed and tied weights stay tied.
    LoRA adapters on the head (PEFT) become low-rank terms of its product and are never merged; which of them are
    active is read at each call. Arguments of the fused call, beside the model's own:

        labels: (B, T) token ids as for the plain forward (they are shifted inside); -100 is not projected at all.
        shift_labels: (B, T) in place of labels: already shifted, position t predicts shift_labels[:, t].
        entropy: bool, also return entropies.
        temperature: float > 0 that divides the logits.
        num_items_in_batch: divisor of the loss, as the Trainer passes it.
        grad_tolerance, unbiased, chunk_tokens, chunk_vocab: as in `linear_logprobs`.

    Args:
        model: a causal LM whose head is an `nn.Linear`, with its weights loaded, or a `peft.PeftModel` of one.
        liger_layers: also put liger-kernel's RMSNorm, RoPE and SwiGLU or GeGLU into the body, on CUDA, its fused cross
            entropy left off. They stay in after `unswap_lm_head`, and RoPE is replaced for the whole process.

    Raises:
        ImportError: liger_layers without liger-kernel.
        TypeError: not a HuggingFace model, or a head that is not a plain `nn.Linear` with or without LoRA.
        ValueError: a head or a logit convention that the fused head would not reproduce; the model's class and the
            reason are named, and the model is left as it was.
    """
    swapped: Any = base_model(model)
    if not _is_pretrained(swapped):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(swapped).__name__}")
    if liger_layers:
        check_liger_layers(swapped)
    if not is_swapped(model):
        _swap(swapped)
    if liger_layers:
        apply_liger_layers(swapped)
    return model


def _swap(swapped: Any) -> None:
    head = _checked_head(swapped)
    before: Any = type(swapped)
    name = before.__name__
    if not swapped.can_generate() or swapped.config.is_encoder_decoder:
        raise ValueError(f"model must be a causal LM, whose position t predicts token t + 1; {name} is not")
    transform = _probed_transform(swapped, head)
    after = _with_fused_head(before)
    if not rebind_forward(swapped, before, after):
        raise ValueError(
            f"the forward of this {name} was replaced on the instance (mixed precision of accelerate's prepare does "
            "that), which would hide the fused one; swap the head before it is"
        )
    swapped._fused_transform = transform
    swapped._fused_head_type = type(head.linear)
    swapped.__class__ = after


def unswap_lm_head(model: Model) -> Model:
    """Undo `swap_lm_head`; harmless on a model that is not swapped.

    Raises:
        ValueError: something else changed the model's class after the swap and has to be undone first.
    """
    if not is_swapped(model):
        return model
    swapped: Any = base_model(model)
    after, before = type(swapped), vars(type(swapped)).get("_class_before_swap")
    if before is None:
        raise ValueError(f"{after.__name__} was derived from the swapped class; undo that first")
    if not rebind_forward(swapped, after, before):
        raise ValueError(f"the forward of this {after.__name__} was replaced after the swap; undo that first")
    swapped.__class__ = before
    del swapped._fused_transform, swapped._fused_head_type
    return model


def is_swapped(model: nn.Module) -> bool:
    """Whether `model`, or the model inside a `peft.PeftModel`, has a fused head."""
    return isinstance(base_model(model), _FusedHead)


def _is_pretrained(model: object) -> bool:
    return isinstance(model, PreTrainedModel)


def swapped_inside(model: nn.Module) -> Any:
    """The swapped model in `model`, in whatever wraps it (PEFT, DDP, torch.compile); None where there is none."""
    return next((module for module in model.modules() if isinstance(module, _FusedHead)), None)


class _FusedHead:
    """Mark of the classes that `_with_fused_head` makes."""


@cache
def _with_fused_head(model_class: Any) -> type:
    # A subclass, and not a patched instance: copy.deepcopy of the model then works, and so does undoing it.
    @wraps(model_class.forward)
    def forward(self, *args, fused: bool = False, **kwargs):
        if not fused:
            return model_class.forward(self, *args, **kwargs)
        return _fused_forward(self, model_class.forward, args, kwargs)

    body = {"forward": forward, "__module__": model_class.__module__, "_class_before_swap": model_class}
    # The name stays, because save_pretrained writes it into the config.
    return type(model_class.__name__, (_FusedHead, model_class), body)


def _fused_forward(model, plain_forward, args: tuple, kwargs: dict) -> FusedCausalLMOutput:
    labels = kwargs.pop("labels", None)
    shift_labels = kwargs.pop("shift_labels", None)
    entropy = kwargs.pop("entropy", False)
    temperature = kwargs.pop("temperature", 1.0)
    num_items_in_batch = kwargs.pop("num_items_in_batch", None)
    options = {name: kwargs.pop(name) for name in HEAD_OPTIONS if name in kwargs}
    if (labels is None) == (shift_labels is None):
        raise ValueError("labels or shift_labels must be given with fused=True, one of them, got both or neither")
    if kwargs.pop("ignore_index", IGNORE_INDEX) != IGNORE_INDEX:
        raise ValueError(f"ignore_index must be {IGNORE_INDEX} with fused=True")
    if kwargs.pop("return_dict", True) is False:
        raise ValueError("return_dict=False has no meaning with fused=True, which returns a FusedCausalLMOutput")
    logits_to_keep = kwargs.pop("logits_to_keep", 0)
    if isinstance(logits_to_keep, Tensor) or logits_to_keep != 0:
        raise ValueError("logits_to_keep has no meaning with fused=True: the labels say which positions are projected")
    if shift_labels is not None:
        targets = _checked_labels("shift_labels", shift_labels, args, kwargs)
    else:
        targets = _shifted(_checked_labels("labels", labels, args, kwargs))
    transform = replace(model._fused_transform, temperature=temperature)

    head = _current_head(model)
    kwargs["return_dict"] = True
    with _kept_hidden(head.module) as kept:
        output = plain_forward(model, *args, **kwargs)
    assert kept.hidden is not None  # seen at swap time: the forward calls its head
    hidden = kept.hidden.to(head.linear.weight.device)
    targets = targets.to(hidden.device)
    per_token = linear_logprobs(
        hidden,
        head.linear.weight,
        targets,
        bias=head.bias(),
        low_rank=head.low_rank(hidden),
        transform=transform,
        entropy=entropy,
        **options,
    )

    count = (targets >= 0).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, Tensor):
        count = count.to(hidden.device)
    loss = -per_token.logps.sum() / count
    fields = {name: getattr(output, name, None) for name in MODEL_FIELDS}
    if fields["aux_loss"] is not None:
        loss = loss + router_loss(model, fields["aux_loss"]).to(loss.device)
    logps, entropies = per_token
    if shift_labels is None:
        logps, entropies = _unshifted(logps), None if entropies is None else _unshifted(entropies)
    return FusedCausalLMOutput(loss=loss, per_token_logps=logps, entropy=entropies, **fields)


def _current_head(model) -> Head:
    """The head as it is now, if what was tried at swap time still holds: a hook would be left out of the product."""
    name = type(model).__name__
    head = read_head(model.get_output_embeddings(), name)
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in head.bypassed())
    if type(head.linear) is not model._fused_head_type or hooks:
        raise ValueError(
            f"the head of {name} was a plain {model._fused_head_type.__name__} when it was swapped, "
            f"now it is a {type(head.linear).__name__} with {hooks} hooks, which the fused head would leave out; "
            "unswap first"
        )
    for part in head.bypassed():
        if not runs_own_forward(part):
            raise ValueError(
                f"the forward of a {type(part).__name__} in the head of {name} was replaced on the instance, which "
                "the fused head would leave out; undo that, or keep the head in memory (accelerate's offload does it)"
            )
    return head


def _checked_labels(name: str, labels: Any, args: tuple, kwargs: dict) -> Tensor:
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(labels).__name__}")
    ids = kwargs.get("input_ids", args[0] if args else None)
    if labels.dim() != 2 or (ids is not None and labels.shape != ids.shape):
        expected = "(B, T)" if ids is None else f"(B, T) = {tuple(ids.shape)} from input_ids"
        raise ValueError(f"{name} must be {expected}, got {tuple(labels.shape)}")
    return labels


def _shifted(labels: Tensor) -> Tensor:
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def _unshifted(values: Tensor) -> Tensor:
    return nn.functional.pad(values[:, :-1], (1, 0))


def router_loss(model: Any, aux_loss: Tensor) -> Tensor:
    """A mixture of experts' aux_loss, weighted as the model's own loss weighs it."""
    for holder in (model, model.config):
        if hasattr(holder, "router_aux_loss_coef"):
            return holder.router_aux_loss_coef * aux_loss
    raise ValueError(f"{type(model).__name__} returns an aux_loss, but names no router_aux_loss_coef to weigh it by")


class _Kept:
    """The head for one call: keeps what it is given and answers with stand-in logits, one word wide."""

    def __init__(self, stand_in: Tensor | None = None) -> None:
        self.hidden: Tensor | None = None
        self.stand_in = stand_in

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.hidden is not None:
            raise ValueError("the model called its head twice in one forward, which the fused head does not expect")
        self.hidden = hidden
        stand_in = hidden.new_zeros(1) if self.stand_in is None else self.stand_in.to(hidden.device)
        return stand_in.expand(*hidden.shape[:-1], -1).clone()


@contextmanager
def _kept_hidden(head: nn.Module, stand_in: Tensor | None = None) -> Iterator[_Kept]:
    kept = _Kept(stand_in)
    before = vars(head).get("forward")
    head.forward = kept
    try:
        yield kept
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


@torch.no_grad()
def _checked_head(model: PreTrainedModel) -> Head:
    name = type(model).__name__
    head = read_head(model.get_output_embeddings(), name)
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
    hidden = torch.linspace(-1, 1, linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device)[None]
    expected = nn.functional.linear(hidden, linear.weight, linear.bias)
    if not torch.equal(linear(hidden), expected):
        raise ValueError(f"the head of {name}, a {type(linear).__name__}, computes something other than h @ W.T + b")
    if head.module is not linear:
        _check_adapters(head, hidden, name)
    return head


def _check_adapters(head: Head, hidden: Tensor, name: str) -> None:
    """The head's own output on `hidden` against that of its parts, with the same random numbers in the dropout."""
    with _same_random_numbers(hidden.device):
        seen = head.module(hidden).float()
    with _same_random_numbers(hidden.device):
        bias, terms = head.bias(), head.low_rank(hidden)
    expected = nn.functional.linear(hidden, head.linear.weight).float()
    if bias is not None:
        expected += bias.float()
    for term in terms:
        expected += term.rows(hidden, None).float() @ term.b.float().T
    rounding = 8 * torch.finfo(hidden.dtype).eps * seen.abs().max().item()
    if not torch.allclose(seen, expected, rtol=0.0, atol=rounding):
        raise ValueError(f"the head of {name} computes something other than h @ W.T + b and its LoRA adapters")


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


@torch.no_grad()
def _probed_transform(model: PreTrainedModel, head: Head) -> LogitTransform:
    """The transform that does to logits what the model's own forward does to them."""
    name = type(model).__name__
    probe = torch.tensor(PROBE_LOGITS, dtype=torch.float32)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        # Dropout in the probe must not move the caller's random numbers.
        with torch.random.fork_rng(devices=devices), _kept_hidden(head.module, probe) as kept:
            output = model(input_ids=ids, use_cache=False, return_dict=True)
    except Exception as error:
        raise ValueError(f"the head of {name} cannot be swapped: its forward failed on two tokens: {error}") from error
    if kept.hidden is None or kept.hidden.shape != (1, 2, head.linear.in_features):
        raise ValueError(f"the head of {name} cannot be swapped: its forward does not call it on (B, T, H)")
    seen = output.logits.float().cpu()
    candidates = list(_candidates(model))
    for transform in candidates:
        if seen.shape == (1, 2, len(PROBE_LOGITS)) and torch.allclose(seen, _apply(transform, probe), rtol=1e-4):
            return transform
    raise ValueError(
        f"the head of {name} cannot be swapped: it maps logits {PROBE_LOGITS} to {seen[0, -1].tolist()}, which none of "
        f"{candidates} does"
    )


def _candidates(model: PreTrainedModel) -> Iterator[LogitTransform]:
    holders = (model.config.get_text_config(), model.config, model)

    def named(names: tuple[str, ...]) -> list[float]:
        values = (getattr(holder, name, None) for name in names for holder in holders)
        return list(dict.fromkeys(float(v) for v in values if isinstance(v, int | float) and v > 0))

    scales = named(SCALE_NAMES)
    for scale in dict.fromkeys([1.0, *scales, *(1.0 / scale for scale in scales)]):
        for softcap in (None, *named(SOFTCAP_NAMES)):
            yield LogitTransform(scale=scale, softcap=softcap)


def _apply(transform: LogitTransform, logits: Tensor) -> Tensor:
    logits = logits * transform.scale
    return logits if transform.softcap is None else torch.tanh(logits / transform.softcap) * transform.softcap
