"""What reads the rows of a batch in training, so that another layout would train the model in another way.

Noise that is scaled by a row's length, statistics of a batch, and a loss inside of a layer. No log-probability of a
trial in evaluation shows them. Known packages' hooks and layers do none of this, NEFTune's hook and batch norms apart:
the hooks of `wandb.watch` read parameters and shapes, and layers of quantized weights compute each token alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from liger_rl.models.unknown_layers import get_origin, is_known, is_own, list_own_code, list_variables, unwrap_call
from liger_rl.step.reason import Reason

NEFTUNE = Reason("NEFTune's noise is scaled by a row's length and drawn for each token", "neftune_noise_alpha=None")
_MODULE = torch.nn.modules.module
_GLOBAL_HOOKS: tuple[dict[int, Callable], ...] = (
    _MODULE._global_forward_hooks, _MODULE._global_forward_pre_hooks,
    _MODULE._global_backward_hooks, _MODULE._global_backward_pre_hooks,
)  # fmt: skip
# Layers of known packages that change in each forward of training.
_KEEPING_KINDS = {
    "torch.nn.modules.batchnorm._NormBase", "torch.nn.utils.parametrizations._SpectralNorm",
    "torch.ao.quantization.fake_quantize.FakeQuantizeBase", "torch.ao.quantization.observer.ObserverBase",
    "deepspeed.moe.sharded_moe.MOELayer", "deepspeed.moe.sharded_moe.TopKGate",
}  # fmt: skip
HOOK_FIX = "leave the hook out, or patch_trl(joined_hooks=True) if it may see joined rows"
RANK_DROPOUT = Reason("an adapter draws once for a whole forward", "rank_dropout=0, module_dropout=0")
LAYERDROP = Reason("layerdrop leaves layers out of a whole forward", "layerdrop=0")
UNTRIED = Reason("its first step shows whether its layers keep values of the batch")


def find_row_reader(
    model: nn.Module, modules: Sequence[nn.Module], *, in_training: bool = False, joined_hooks: bool = False
) -> Reason | None:
    """A hook or layer of a transformers model that reads rows in training mode; None if none is known to.

    `modules`: of the model. `in_training`: as if all of them were in training mode. `joined_hooks`: hooks of unknown
    packages may see rows in any layout.
    """
    body = getattr(model, "base_model", model)
    trained = [module for module in modules if in_training or module.training]
    attributes = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")
    hooked = (module for module in trained if any(map(vars(module).get, attributes)))
    reasons = [_judge_hook(hook, "every layer") for hooks in _GLOBAL_HOOKS for hook in hooks.values() if trained]
    reasons += [
        _judge_hook(function, type(module).__name__)
        for module in hooked
        if module is not model
        for function in _list_hooks(module, is_body=module is body)
    ]
    reasons += [LAYERDROP for module in trained if vars(module).get("layerdrop")]
    reasons += [RANK_DROPOUT for module in trained if _draws_once(module)]
    kinds: Any = dict.fromkeys(map(type, trained))
    reasons += [_judge_kind(kind, kind.forward) for kind in kinds if kind is not type(model)]
    reasons = [reason for reason in reasons if not (joined_hooks and reason is not None and reason.fix == HOOK_FIX)]
    return next((reason for reason in reasons if reason is not None), None)


def _list_hooks(module: nn.Module, *, is_body: bool) -> Iterator[Callable]:
    """Functions that may change what goes into a module or comes out of it, or its gradient."""
    yield from (*module._forward_hooks.values(), *module._backward_hooks.values(), *module._backward_pre_hooks.values())
    if not is_body:  # in front of it stands what counts or logs its calls
        yield from module._forward_pre_hooks.values()
    # A kernel of the hub is set so, too.
    if "forward" in vars(module) and not hasattr(type(module), "kernel_layer_name"):
        yield vars(module)["forward"]


def _draws_once(module: nn.Module) -> bool:
    """Whether an adapter (PEFT's LoHa, LoKr) leaves out ranks or itself by chance."""
    rates = (vars(module).get(name) for name in ("rank_dropout", "module_dropout"))
    return any(rate > 0 for kept in rates if isinstance(kept, dict) for rate in kept.values())


def _judge_hook(hook: Callable, where: str) -> Reason | None:
    function = unwrap_call(hook)
    name = getattr(function, "__qualname__", type(function).__name__)
    if name == "neftune_post_forward_hook":
        return NEFTUNE
    origin = get_origin(function)
    if origin == "torch.nn.utils.spectral_norm":
        return Reason(f"spectral_norm of {where} takes statistics in each forward", "a model without it")
    if is_known(origin):
        return None
    return Reason(f"{origin}.{name}, a hook on {where}, may read the batch's rows", HOOK_FIX)


def _judge_kind(kind: Any, forward: Any) -> Reason | None:
    """Why a layer of this class with this forward reads rows in training."""
    if _KEEPING_KINDS.intersection(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__):
        return Reason(f"{kind.__name__} takes statistics of the batch in training", f"a model without {kind.__name__}")
    code = list_own_code(kind, forward)
    for x in list_variables(code).values() if code else ():
        if isinstance(x, type) and issubclass(x, torch.autograd.Function) and is_own(x, code):
            reason = f"{kind.__name__} calls {x.__name__}, an autograd function that may add a loss"
            return Reason(reason, "add the loss outside of the layer")
    return None
