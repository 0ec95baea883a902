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
    attributes = module.__dict__
    if "forward" not in attributes:
        return True
    own = [name for name in KEPT if getattr(attributes.get(name), "__func__", None) is before.forward]
    leads_there = "forward" in own or ("_old_forward" in own and "_hf_hook" in attributes)
    if leads_there:
        for name in own:
            setattr(module, name, MethodType(after.forward, module))
    return leads_there


def runs_own_forward(module: nn.Module) -> bool:
    """Whether a call of the module computes what its class's forward does, its inputs at most brought to its weights.

    Not so with another function set on the instance, or with a hook that does more (offload, a user's own).
    """
    attributes = module.__dict__
    if "forward" not in attributes:
        return True
    own: Any = type(module).forward
    if getattr(attributes["forward"], "__func__", None) is own:
        return True  # left behind by a hook that was removed
    hook: Any = attributes.get("_hf_hook")
    only_moves = all(type(h).__name__ == "AlignDevicesHook" and not h.offload for h in getattr(hook, "hooks", (hook,)))
    return only_moves and getattr(attributes.get("_old_forward"), "__func__", None) is own
