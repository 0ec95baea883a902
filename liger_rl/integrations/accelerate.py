"""What accelerate does to a module's forward, and how to look behind it.

Its hooks (`device_map`, `dispatch_model`) set `module.forward` on the instance and keep what it was in
`module._old_forward`, which it calls between moving the inputs in and the outputs out.
"""

from types import MethodType
from typing import Any

from torch import nn

KEPT = ("forward", "_old_forward")


def rebind_forward(module: nn.Module, before: Any, after: Any) -> bool:
    """Let the forward that the instance keeps be that of class `after` where it is that of `before`.

    Returns:
        Whether a call of the module now reaches the forward of `after`: False where the instance has a forward of its
        own that does not lead to its class's, and then nothing is changed.
    """
    attributes = vars(module)
    if "forward" not in attributes:
        return True
    own = [name for name in KEPT if getattr(attributes.get(name), "__func__", None) is before.forward]
    leads_there = "forward" in own or ("_old_forward" in own and "_hf_hook" in attributes)
    if leads_there:
        for name in own:
            setattr(module, name, MethodType(after.forward, module))
    return leads_there


def only_moves_inputs(module: nn.Module) -> bool:
    """Whether a forward set on the instance is accelerate's, and only brings the inputs to the weights."""
    hook: Any = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    return all(type(h).__name__ == "AlignDevicesHook" and not h.offload for h in hooks)
