"""The lm_head of a HuggingFace model: checked, tried out, and replaced for the length of a call.

What the model does to its head's output (a softcap, a scale) is found out by trying: the head is made to answer with a
few known logits, and what the model returns for them has to be one of the transforms that its config names.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_rl.dtensors import is_dtensor
from liger_rl.integrations.accelerate import runs_own_forward
from liger_rl.integrations.peft import Head, read_head
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import FLOAT_DTYPES

# HuggingFace's names for what is done to the head's output; whether a model multiplies or divides is seen by trying.
SCALE_NAMES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
SOFTCAP_NAMES = ("final_logit_softcapping",)
PROBE_LOGITS = (-60.0, -7.0, -0.5, 0.25, 3.0, 50.0)

# Where hooks and forwards come from that shard a layer. FSDP's gather its weight around the call and stay; those of a
# tensor-parallel plan bring the hidden states into the layer, and the logits, which are not there, out of it.
TENSOR_PARALLEL_OUTPUT = ("torch.distributed.tensor.", "transformers.integrations.tensor_parallel")
SHARDING = ("torch.distributed.", "transformers.distributed.", "transformers.integrations.tensor_parallel")

KEPT_KEY = -1  # that of no other hook: torch counts them from 0


def _comes_from(function: Any, modules: tuple[str, ...]) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(modules)


def _is_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_gathered(model: nn.Module) -> bool:
    """Whether `fully_shard` gathers parameters of the model and reduces their gradients."""
    return any(map(_is_fsdp, model.modules()))


def plain_type(layer: nn.Module) -> type:
    """The layer's class, before `fully_shard` derived one from it."""
    return type(layer).__bases__[1] if _is_fsdp(layer) else type(layer)


def _is_sharded(linear: nn.Module) -> bool:
    return is_dtensor(linear.weight) or plain_type(linear) is not type(linear)


def current_head(model: Any, linear_type: type) -> Head:
    """The head as it is now, if what was tried at swap time still holds: a hook would be left out of the product."""
    name = type(model).__name__
    head = read_head(model.get_output_embeddings(), name)
    hooks = hook_count(head, but=SHARDING)
    if plain_type(head.linear) is not linear_type or hooks:
        raise ValueError(
            f"the head of {name} was a plain {linear_type.__name__} when it was swapped, "
            f"now it is a {type(head.linear).__name__} with {hooks} hooks, which the fused head would leave out; "
            "unswap first"
        )
    check_own_forwards(head, name, but=SHARDING)
    return head


def hook_count(head: Head, *, but: tuple[str, ...] = ()) -> int:
    """Forward hooks that are left out when the head is taken apart, beside those that come from the modules `but`."""
    return sum(
        not _comes_from(hook, but)
        for part in head.bypassed()
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    )


def check_own_forwards(head: Head, name: str, *, but: tuple[str, ...] = ()) -> None:
    """ValueError where a forward set on an instance is left out when the head, of model `name`, is taken apart, and
    does not come from the modules `but`."""
    for part in head.bypassed():
        if not runs_own_forward(part) and not _comes_from(part.__dict__["forward"], but):
            raise ValueError(
                f"the forward of a {type(part).__name__} in the head of {name} was replaced on the instance, which "
                "the fused head would leave out; undo that, or keep the head in memory (accelerate's offload does it)"
            )


class _Kept:
    """The head for one call: keeps what it is given, and what `answer` gives for it in place of the logits."""

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        self.answer = answer
        self.hidden: Tensor | None = None
        self.output: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.hidden is not None:
            raise ValueError("the model called its head twice in one forward, which the fused head does not expect")
        self.hidden = hidden
        self.output = self.answer(hidden)
        return self.output

    def before(self, _head: nn.Module, args: tuple[Tensor]) -> Tensor:
        """The forward pre-hook of `kept_hidden`."""
        self(*args)
        return args[0][..., :0, :]

    def after(self, *_: Any) -> Tensor | None:
        """The forward hook of `kept_hidden`."""
        return self.output


@contextmanager
def kept_hidden(head: nn.Module, answer: Callable[[Tensor], Tensor]) -> Iterator[_Kept]:
    """The head's hooks run around `answer`: FSDP's gather the weight for it, and for the gradient of what it gives."""
    kept, compiled = _Kept(answer), torch.compiler.is_compiling()
    own = head.__dict__.get("forward")
    # A graph puts an empty dict back as a plain one, on which torch registers no hook.
    pre_hooks, hooks = head._forward_pre_hooks or OrderedDict(), head._forward_hooks or OrderedDict()
    run = {key: hook for key, hook in hooks.items() if not _comes_from(hook, TENSOR_PARALLEL_OUTPUT)}
    if compiled:
        # A graph cannot delete an attribute that the class has too, so the head's own forward runs, on no tokens.
        head._forward_pre_hooks = OrderedDict([*pre_hooks.items(), (KEPT_KEY, kept.before)])
        head._forward_hooks = OrderedDict([(KEPT_KEY, kept.after), *run.items()])
    else:
        # DTensors have no rule for no tokens.
        head.forward = kept
        head._forward_hooks = OrderedDict(run)
    try:
        yield kept
    finally:
        head._forward_pre_hooks, head._forward_hooks = pre_hooks, hooks
        if own is not None:
            head.forward = own
        elif not compiled:
            del head.forward


@torch.no_grad()
def checked_head(model: PreTrainedModel) -> Head:
    name = type(model).__name__
    head = read_head(model.get_output_embeddings(), name)
    linear = head.linear
    if not isinstance(linear, nn.Linear) or (_is_sharded(linear) and plain_type(linear) is not nn.Linear):
        raise TypeError(f"the head of {name} must be an nn.Linear, got {type(linear).__name__}")
    if linear.weight.device.type == "meta":
        raise ValueError(f"the head's weight of {name} must be in memory, it is on meta: not loaded yet, or offloaded")
    if linear.weight.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"the head's weight of {name} must be float32, bfloat16 or float16, got {linear.weight.dtype} in a "
            f"{type(linear).__name__}; keep the head out of the quantisation"
        )
    if _is_sharded(linear):
        # It cannot be tried out: a sharded layer is not called outside its model.
        if head.adapters:
            raise ValueError(f"the head of {name} has adapters and is sharded; swap it before it is")
        return head
    hidden = torch.linspace(-1, 1, linear.weight.shape[1], dtype=linear.weight.dtype, device=linear.weight.device)[None]
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
        expected += term.inputs(hidden, None) @ term.b.float().T
    rounding = 8 * torch.finfo(hidden.dtype).eps * seen.abs().max().item()
    if not torch.allclose(seen, expected, rtol=0.0, atol=rounding):
        raise ValueError(f"the head of {name} computes something other than h @ W.T + b and its LoRA adapters")


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


@torch.no_grad()
def probed_transform(model: PreTrainedModel, head: Head) -> LogitTransform:
    """The transform that does to logits what the model's own forward does to them."""
    name = type(model).__name__
    probe = torch.tensor(PROBE_LOGITS, dtype=torch.float32, device="cpu")  # whatever the default device is

    def answer(hidden: Tensor) -> Tensor:
        return probe.to(hidden.device).expand(*hidden.shape[:-1], -1).clone()

    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        # Dropout in the probe must not move the caller's random numbers.
        with torch.random.fork_rng(devices=devices), kept_hidden(head.module, answer) as kept:
            output = model(input_ids=ids, use_cache=False, return_dict=True)
    except Exception as error:
        raise ValueError(f"the head of {name} cannot be swapped: its forward failed on two tokens: {error}") from error
    for module in filter(_is_fsdp, model.modules()):
        # The root stays gathered after a forward, and an optimizer made now would be given what is gathered.
        cast(Any, module).reshard()
    if kept.hidden is None or kept.hidden.shape != (1, 2, head.linear.weight.shape[1]):
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
        return list(dict.fromkeys(float(v) for v in values if isinstance(v, (int, float)) and v > 0))

    scales = named(SCALE_NAMES)
    for scale in dict.fromkeys([1.0, *scales, *(1.0 / scale for scale in scales)]):
        for softcap in (None, *named(SOFTCAP_NAMES)):
            yield LogitTransform(scale=scale, softcap=softcap)


def _apply(transform: LogitTransform, logits: Tensor) -> Tensor:
    logits = logits * transform.scale
    return logits if transform.softcap is None else torch.tanh(logits / transform.softcap) * transform.softcap
