"""The lm_head of a HuggingFace model: checks, probes, and hooks that return something other than its logits.

`install_hooks` puts two hooks on the head. In a thread that is inside `intercept_logits` they return that call's
`answer(hidden)` in place of logits. Other threads get logits at the same time.

`probe_transform` finds the model's softcap and scale. The head returns a few known logits, and the model's output for
them must be one of the transforms that its config names.
"""

import inspect
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_rl.head.checks import FLOAT_DTYPES
from liger_rl.kernels import reference
from liger_rl.kernels.public_call import outside_of_graphs
from liger_rl.kernels.transform import LogitTransform
from liger_rl.models.adapters import HeadParts, read_head
from liger_rl.models.tensors import is_dtensor, plain_type, reshard

# HuggingFace's names. The probe finds out whether a model multiplies by its scale or divides.
SCALE_NAMES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
SOFTCAP_NAMES = ("final_logit_softcapping", "logits_soft_cap")
PROBE_LOGITS = (-60.0, -7.0, -0.5, 0.25, 3.0, 50.0)

# Python modules whose hooks and forwards shard a layer. FSDP's gather the weight around a call, a fused call too. A
# tensor-parallel plan distributes the hidden states before the head, for a fused call too, and the logits after it,
# which a fused call does not have.
TENSOR_PARALLEL_OUTPUT = ("torch.distributed.tensor.", "transformers.integrations.tensor_parallel")
SHARDING = ("torch.distributed.", "transformers.distributed.", "transformers.integrations.tensor_parallel")

HOOK_KEY = -1  # our hooks' key; torch's keys count from 0

# Hooks of accelerate (`device_map`, `dispatch_model`) set `module.forward` on the instance. They keep the replaced
# forward in `module._old_forward`, and call it between moving the inputs in and the outputs out.
FORWARD_ATTRIBUTES = ("forward", "_old_forward")


def _is_defined_in(function: Any, modules: tuple[str, ...]) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(modules)


def _is_sharded(linear: nn.Module) -> bool:
    return is_dtensor(linear.weight) or plain_type(linear) is not type(linear)


@outside_of_graphs
def read_current_head(model: Any, linear_type: type) -> HeadParts:
    """The head as it is now, with our hooks. ValueError if it changed since the swap such that results would differ."""
    name = type(model).__name__
    head = read_head(model.get_output_embeddings(), name)
    check_bypassed_modules(head, name, linear_type, allowed=SHARDING)
    install_hooks(head.module)
    return head


def check_bypassed_modules(head: HeadParts, name: str, linear_type: type, *, allowed: tuple[str, ...] = ()) -> None:
    """ValueError if the head of model `name` has a hook, or a forward set on an instance, that its parts leave out.

    Ours, and those from the Python modules `allowed`, may be left out.
    """
    hooks = sum(
        not _is_defined_in(hook, (*allowed, __name__))
        for module in head.bypassed_modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    if plain_type(head.linear) is not linear_type or hooks:
        raise ValueError(
            f"the head of {name} must be a plain {linear_type.__name__} without hooks, found a "
            f"{type(head.linear).__name__} with {hooks} hooks, which the fused head would leave out; undo that first"
        )
    for module in head.bypassed_modules():
        if not runs_own_forward(module) and not _is_defined_in(module.__dict__["forward"], allowed):
            raise ValueError(
                f"the forward of a {type(module).__name__} in the head of {name} was replaced on the instance, which "
                "the fused head would leave out; undo that, or keep the head in memory (accelerate's offload does it)"
            )


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


@dataclass(eq=False)
class Request:
    """A thread's request to `head` for answer(hidden) in place of logits."""

    head: nn.Module
    answer: Callable[[Tensor], Tensor]
    outer: "Request | None"  # of an enclosing `intercept_logits`, for another head
    hidden: Tensor | None = None  # the head's input; None before the head was called
    output: Tensor | None = None  # answer(hidden)


# Not a ContextVar, which torch.compile cannot trace. A forward never awaits, so a thread runs one at a time.
_thread = threading.local()


@contextmanager
def intercept_logits(head: nn.Module, answer: Callable[[Tensor], Tensor]) -> Iterator[Request]:
    """In this thread, a call of `head` returns answer(hidden) in place of its logits. hidden: (..., H).

    The head's other hooks run around `answer`: FSDP's gather the weight for it and for its backward.
    """
    request = Request(head, answer, getattr(_thread, "request", None))
    _thread.request = request
    try:
        yield request
    finally:
        _thread.request = request.outer


def _find_request(head: nn.Module) -> Request | None:
    request: Request | None = getattr(_thread, "request", None)
    while request is not None and request.head is not head:
        request = request.outer
    return request


class _NoTokens(Tensor):
    """(0, H) hidden states. A linear layer returns them as they are, so that autocast does not cast its weight."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        # The tensor that a collective returns cannot be of this class.
        return result.as_subclass(cls) if type(result) is Tensor else result


def _answer_before_forward(head: nn.Module, args: tuple[Tensor]) -> Tensor | None:
    """The head's last forward pre-hook."""
    request = _find_request(head)
    return None if request is None else _compute_answer(request, *args, in_a_graph=torch.compiler.is_compiling())


@outside_of_graphs
def _compute_answer(request: Request, hidden: Tensor, *, in_a_graph: bool) -> Tensor:
    if request.hidden is not None:
        raise ValueError("the model called its head twice in one forward, which the fused head does not expect")
    request.hidden = hidden
    request.output = request.answer(hidden)
    # The head's own forward runs after this hook. In a graph, adapters cannot multiply a _NoTokens.
    if in_a_graph:
        return hidden[..., :0, :]
    none = torch.empty(0, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    # `as_subclass` would make a view, whose bases torch.compile would follow without end.
    return torch.Tensor._make_subclass(_NoTokens, none)


def _return_answer(head: nn.Module, _args: Any, _logits: Any) -> Tensor | None:
    """The head's first forward hook."""
    request = _find_request(head)
    return None if request is None else request.output


class _RunForLogitsOnly:
    """A forward or a forward hook of `head` that runs only if the head returns logits."""

    def __init__(self, head: nn.Module, original: Callable) -> None:
        self.head, self.original = head, original
        self.__module__ = original.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if _find_request(self.head) is None else None


def install_hooks(head: nn.Module) -> None:
    """Put our two hooks on `head`, or move them into place. Without a request a call is as before.

    Our pre-hook runs last, so that it sees the hidden states of the other pre-hooks. Our hook runs first, so that the
    other hooks see the answer. Hooks that shard logits do not run for an answer.
    """
    pre_hooks, hooks = cast(OrderedDict, head._forward_pre_hooks), cast(OrderedDict, head._forward_hooks)
    if list(pre_hooks)[-1:] != [HOOK_KEY]:
        pre_hooks[HOOK_KEY] = _answer_before_forward
        pre_hooks.move_to_end(HOOK_KEY)
    if list(hooks)[:1] != [HOOK_KEY]:
        hooks[HOOK_KEY] = _return_answer
        hooks.move_to_end(HOOK_KEY, last=False)
    for key, hook in list(hooks.items()):
        if _is_defined_in(hook, TENSOR_PARALLEL_OUTPUT) and not isinstance(hook, _RunForLogitsOnly):
            hooks[key] = _RunForLogitsOnly(head, hook)
    forward: Any = head.__dict__.get("forward")
    if _is_defined_in(forward, SHARDING) and not isinstance(forward, _RunForLogitsOnly):
        head.forward = _RunForLogitsOnly(head, forward)


def remove_hooks(model: nn.Module) -> None:
    """Undo `install_hooks` in every module of the model: an adapter may have replaced the head since."""
    for module in model.modules():
        if module._forward_pre_hooks.pop(HOOK_KEY, None) is None:
            continue
        del module._forward_hooks[HOOK_KEY]
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, _RunForLogitsOnly):
                module._forward_hooks[key] = hook.original
        forward = module.__dict__.get("forward")
        if isinstance(forward, _RunForLogitsOnly):
            module.forward = forward.original


@torch.no_grad()
def read_checked_head(model: PreTrainedModel) -> HeadParts:
    """The parts of the model's head. TypeError or ValueError if they do not reproduce its output."""
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
        # A sharded layer cannot be called outside its model, so its output is not checked.
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


def _check_adapters(head: HeadParts, hidden: Tensor, name: str) -> None:
    """ValueError unless the head and its parts have the same output for `hidden`, with the same dropout."""
    with _fork_random_state(head.module):
        seen = head.module(hidden).float()
    with _fork_random_state(head.module):
        widened = head.widen(hidden, head.linear.weight)
    bias, expected = head.sum_biases(), nn.functional.linear(*widened).float()
    if bias is not None:
        expected += bias.float()
    rounding = 8 * torch.finfo(hidden.dtype).eps * seen.abs().max().item()
    if not torch.allclose(seen, expected, rtol=0.0, atol=rounding):
        raise ValueError(f"the head of {name} computes something other than h @ W.T + b and its LoRA adapters")


def _fork_random_state(module: nn.Module) -> AbstractContextManager[None]:
    """Restores the random state afterwards. So two successive contexts draw the same dropout."""
    return torch.random.fork_rng(devices={p.device for p in module.parameters() if p.device.type == "cuda"})


def probe_transform(model: PreTrainedModel, head: HeadParts) -> LogitTransform:
    """The transform that the model's forward applies to its logits. The head has our hooks.

    ValueError if no known transform explains the model's output, or if a token changes the hidden states before it.
    """
    name = type(model).__name__
    probe = torch.tensor(PROBE_LOGITS, dtype=torch.float32, device="cpu")  # the default device may be another
    output, hidden = _run_two_tokens(model, head, probe, last=2)
    if hidden is None or hidden.shape != (1, 2, head.linear.weight.shape[1]):
        raise ValueError(f"the head of {name} cannot be swapped: its forward does not call it on (B, T, H)")
    change = _run_two_tokens(model, head, probe, last=3)[1] - hidden
    # Rounding may differ, because the experts of a mixture see other groups of tokens.
    if change[:, 0].abs().max() > torch.finfo(hidden.dtype).eps ** 0.5 * hidden[:, 0].abs().max():
        raise ValueError(f"model must be a causal LM; a token of this {name} changes the hidden states before it")
    seen = output.logits.float().cpu()
    candidates = list(_list_transforms(model))
    for transform in candidates:
        expected = reference.transform_logits(probe, None, transform)
        if seen.shape == (1, 2, len(PROBE_LOGITS)) and torch.allclose(seen, expected, rtol=1e-4):
            return transform
    raise ValueError(
        f"the head of {name} cannot be swapped: it maps logits {PROBE_LOGITS} to {seen[0, -1].tolist()}, which none of "
        f"{candidates} does"
    )


def probe_label_shift(model: PreTrainedModel, head: HeadParts) -> bool:
    """Whether position t predicts labels[:, t + 1] in the model's own loss, not labels[:, t]. The head has our hooks.

    Only the first of two tokens has a label. With equal logits the loss is log V if position 0 predicts this label.
    Otherwise it is a mean of no token. True for a model without a loss.
    """
    labels = torch.tensor([[1, -100]], device=model.device)
    equal = torch.zeros(head.linear.weight.shape[0], dtype=torch.float32, device="cpu")
    try:
        output, _ = _run_two_tokens(model, head, equal, last=2, labels=labels)
    except ValueError:
        return True
    loss = getattr(output, "loss", None)
    return not isinstance(loss, Tensor) or not loss.mean().item() > 0.5 * math.log(len(equal))


@torch.no_grad()
def _run_two_tokens(
    model: PreTrainedModel, head: HeadParts, logits: Tensor, *, last: int, **inputs: Any
) -> tuple[Any, Any]:
    """The model's output and the head's input for the ids (1, last), if the head returns `logits` for each token."""

    def answer(hidden: Tensor) -> Tensor:
        return logits.to(hidden.device).expand(*hidden.shape[:-1], -1).clone()

    ids = torch.tensor([[1, last]], device=model.device) % head.linear.weight.shape[0]
    if "attention_mask" in inspect.signature(model.forward).parameters:
        # Doge of transformers 4.57 is causal without a mask alone.
        inputs["attention_mask"] = torch.ones_like(ids)
    try:
        with _fork_random_state(model), _without_checkpoints(model), intercept_logits(head.module, answer) as request:
            output = model(input_ids=ids, use_cache=False, return_dict=True, **inputs)
    except Exception as error:
        name = type(model).__name__
        raise ValueError(f"the head of {name} cannot be swapped: its forward failed on two tokens: {error}") from error
    reshard(model)  # an optimizer made now would get the gathered parameters
    hidden: Any = request.hidden
    return output, hidden.full_tensor() if is_dtensor(hidden) else hidden


@contextmanager
def _without_checkpoints(model: nn.Module) -> Iterator[None]:
    """Without gradient checkpointing: a reentrant checkpoint without a graph warns."""
    checkpointed = [vars(module) for module in model.modules() if vars(module).get("gradient_checkpointing")]
    for attributes in checkpointed:
        attributes["gradient_checkpointing"] = False
    try:
        yield
    finally:
        for attributes in checkpointed:
            attributes["gradient_checkpointing"] = True


def _list_transforms(model: PreTrainedModel) -> Iterator[LogitTransform]:
    holders = (model.config.get_text_config(), model.config, model)

    def named(names: tuple[str, ...]) -> list[float]:
        values = (getattr(holder, name, None) for name in names for holder in holders)
        return list(dict.fromkeys(float(v) for v in values if isinstance(v, (int, float)) and v > 0))

    scales = named(SCALE_NAMES)
    for scale in dict.fromkeys([1.0, *scales, *(1.0 / scale for scale in scales)]):
        for softcap in (None, *named(SOFTCAP_NAMES)):
            yield LogitTransform(scale=scale, softcap=softcap)
