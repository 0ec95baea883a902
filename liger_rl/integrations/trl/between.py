"""What a user's code does between the micro-batches of an optimizer step.

TRL runs each micro-batch forward and backward before the next one. A window runs all of them behind the last one. Code
that acts in between, or that sees the gradient of each micro-batch, keeps them apart (`find_own_code`). What changes a
model in between without such code is seen by its `Fingerprint`.
"""

import itertools
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import nn
from transformers import PreTrainedModel

from liger_rl.integrations.trl.settings import get_settings
from liger_rl.models.project import runs_own_forward
from liger_rl.models.unknown_layers import KNOWN_PACKAGES, unwrap_call
from liger_rl.step.reason import Reason

# Methods with a trainer's loss or its calls of the model, and others that run for each micro-batch.
CALLS = ("_get_per_token_logps_and_entropies", "_compute_kl_logps", "_get_last_hidden_state")
LOSS_METHODS = ("compute_loss", "_compute_loss", *CALLS)
METHODS = (
    *LOSS_METHODS, "training_step", "_prepare_inputs", "_prepare_input", "compute_loss_context_manager",
    "autocast_smart_context_manager", "floating_point_ops", "_prepare_context_parallel_inputs",
)  # fmt: skip
TRAINERS = ("trl.trainer", "trl.extras", "transformers", "accelerate", "torch", "contextlib", "liger_rl")
# Who wraps models has hooks on parameters that follow TRL's gradients. Hooks of PEFT's layers are linear.
WRAPPERS = ("torch.distributed", "torch.nn.parallel", "deepspeed", "accelerate", "peft")
CALLBACKS = ("transformers", "trl", "liger_rl")
# These do nothing to a model whose modules are all in training mode.
PLAIN_TRAIN = (nn.Module.train, PreTrainedModel.train, nn.parallel.DistributedDataParallel.train)
_of_trl: WeakSet[Any] = WeakSet()  # functions that have been judged
JOINED_HOOKS = "patch_trl(joined_hooks=True), if it may see joined micro-batches"


def warn(trainer: Any, text: str) -> None:
    """Log a warning, unless the trainer's `log_level` says otherwise."""
    if trainer.args.log_level == "passive" or trainer.args.get_process_log_level() <= logging.WARNING:
        logging.getLogger("liger_rl.trl").warning("%s: %s", type(trainer).__name__, text)


def is_trl_trainer(trainer: Any) -> bool:
    """Whether the trainer is TRL's, or of a subclass."""
    return any(kind.__module__.startswith("trl.trainer.") for kind in type(trainer).__mro__)


def list_own_methods(trainer: Any, names: Iterable[str] = LOSS_METHODS) -> list[str]:
    """Those of the methods that anybody but TRL and transformers defines."""
    own = []
    for name, function in list_functions(trainer, names):
        if function in _of_trl:
            continue
        if is_of(function):
            _of_trl.add(function)
        else:
            own.append(name)
    return own


def list_functions(owner: Any, names: Iterable[str]) -> list[tuple[str, Any]]:
    """Attributes of an object and of its classes by their names. A method may call that of the next class."""
    places = (vars(owner), *map(vars, type(owner).__mro__))
    return [(name, values[name]) for name in names for values in places if name in values]


def is_of(function: Any, packages: tuple[str, ...] = TRAINERS) -> bool:
    """Whether a function, and what it decorates, is of one of the packages."""
    while function is not None:
        function = unwrap_call(function)
        # The __module__ of a decorator's function is that of the function that it decorates.
        origin = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if not f"{origin}.".startswith(tuple(f"{name}." for name in packages)):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def find_own_code(trainer: Any, wrapped: nn.Module) -> Reason | None:
    """A callback, a hook or a backward of the user's that acts between micro-batches. `wrapped` has our forward."""
    parameters = StateReader(trainer.model).parameters
    if list_own_methods(trainer.accelerator, ("backward",)):
        return Reason("the accelerator has a backward of its own")
    if any("_in_backward_optimizers" in vars(p) for p in parameters):
        return Reason("an optimizer steps in the backward")
    if get_settings().joined_hooks:
        return None
    callbacks = [trainer.callback_handler, *trainer.callback_handler.callbacks]
    functions = {f: callback for callback in callbacks for _, f in list_functions(callback, ("on_substep_end",))}
    for function, callback in functions.items():
        if not is_of(function, CALLBACKS):
            return Reason(f"{type(callback).__name__} has an on_substep_end", JOINED_HOOKS)
    for p in parameters:
        hooks = [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]
        if p.requires_grad and not all(is_of(hook, WRAPPERS) for hook in hooks):
            return Reason("a hook sees the gradient of each micro-batch", JOINED_HOOKS)
    return _find_outer_hook(trainer.model, wrapped)


def _find_outer_hook(model: nn.Module, wrapped: nn.Module) -> Reason | None:
    """A hook, or another forward, of the module whose forward is ours or of one around it."""
    around = [*itertools.takewhile(lambda module: module is not wrapped, model.modules()), wrapped]
    for module in around:
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        hooks += [] if runs_own_forward(module) else [vars(module)["forward"]]
        if not all(is_of(hook, tuple(KNOWN_PACKAGES)) for hook in hooks):
            return Reason(f"a hook on {type(module).__name__} sees each micro-batch", JOINED_HOOKS)
    return None


class Fingerprint(NamedTuple):
    """The state of a model that the micro-batches of one window must have in common."""

    versions: list[int]  # of parameters and buffers, how often each was written to
    trained: list[bool]
    adapters: list[Any]  # of each layer of PEFT, which are active, and their scales


class StateReader:
    """Reads the fingerprint of a model whose modules stay the same. `checkpoints`: functions of its layers that have
    them, as it is built."""

    def __init__(self, model: nn.Module) -> None:
        modules: list[Any] = [model]
        for module in modules:  # `model.modules()` takes ten times as long
            modules += {} if module is None else module._modules.values()
        self._modules = modules = [module for module in modules if module is not None]
        self.parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        self._buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        self.checkpoints = {
            module: module._gradient_checkpointing_func
            for module in modules
            if vars(module).get("gradient_checkpointing") and hasattr(module, "_gradient_checkpointing_func")
        }
        self._tuners: list[Any] = [module for module in modules if hasattr(type(module), "_active_adapter")]

    def is_training(self, wrapper: nn.Module) -> bool:
        """Whether `train()` of the model and its wrapper would change nothing."""
        modules = [wrapper, *self._modules]
        methods = [vars(module).get("train", type(module).train) for module in modules]
        return all(method in PLAIN_TRAIN for method in methods) and all(module.training for module in modules)

    def read(self) -> Fingerprint:
        return Fingerprint(
            [0 if x.is_inference() else x._version for tensors in (self.parameters, self._buffers) for x in tensors],
            [parameter.requires_grad for parameter in self.parameters],
            [
                (str(layer._active_adapter), layer._disable_adapters, *vars(layer).get("scaling", {}).items())
                for layer in self._tuners
            ],
        )
