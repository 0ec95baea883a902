"""Ranks that run one model on different batches must run it equally often."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from liger_rl.distributed import gathered_objects, has_ranks
from liger_rl.models.tensors import has_dtensor, is_dtensor, is_zero_3, reshard

UNLIMITED = 1 << 62


class Agreement(NamedTuple):
    """What all ranks of a step must do alike: the maximum over the ranks, of `capacity`, `window` and `kept_layers` the
    minimum."""

    live_forwards: int = 0  # with a graph
    idle_forwards: int = 0  # without one
    padded_groups: int = 1  # micro-batches of padded rows that a rank wants ...
    capacity: int = UNLIMITED  # ... and the most that it can make
    kept_layers: int = UNLIMITED  # that keep their activations
    window: int = UNLIMITED  # micro-batches that run in one forward
    trial: int = 0  # the trial that a rank needs next, 0 if it needs none
    refuses: bool = False  # a rank has a reason against a window, the fused forward of a model, or trees of packed rows


_LEAST = tuple(name in ("capacity", "kept_layers", "window") for name in Agreement._fields)


def agree(
    groups: Sequence[Any], wanted: Agreement, device: torch.device, *, problem: Exception | None = None
) -> Agreement:
    """What the ranks of the process groups agree on; `wanted` without a group. One collective for each group.

    If one rank has a `problem`, it raises it, and every other rank raises a TypeError or ValueError with its text.
    """
    if not groups:
        if problem is not None:
            raise problem
        return wanted
    # A minimum is the negative of a maximum.
    signed = [-x if least else x for x, least in zip(map(int, wanted), _LEAST, strict=True)]
    most = torch.tensor([problem is not None, *signed], dtype=torch.int64, device=device)
    for group in groups:
        most = most.to(pick_device(group, device))
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
    has_problem, *numbers = most.tolist()
    if has_problem:
        _raise_shared(groups, problem, most)
    agreed = Agreement(*(-x if least else x for x, least in zip(numbers, _LEAST, strict=True)))
    return agreed._replace(refuses=bool(agreed.refuses))


def _raise_shared(groups: Sequence[Any], problem: Exception | None, buffer: torch.Tensor) -> None:
    shared = None
    if problem is not None:
        # Not the error itself, which may be of a kind that does not pickle.
        kind = TypeError if isinstance(problem, TypeError) else ValueError
        shared = kind(f"{problem} (rank {torch.distributed.get_rank()})")
    for group in groups:
        shared = next((error for error in gathered_objects(shared, group, buffer) if error is not None), None)
    raise cast(Exception, shared if problem is None else problem)


def first_device(model: Any) -> torch.device:
    """The device of the model's first parameter, of the same type on all ranks."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


def pick_device(group: Any, device: torch.device) -> torch.device:
    """A device that the group can reduce on, `device` if possible. NCCL cannot reduce tensors in CPU memory."""
    kinds = [entry.split(":")[0] for entry in torch.distributed.get_backend_config(group).split(",")]
    return device if device.type in kinds else torch.device(kinds[0])


def find_sharding(modules: Sequence[nn.Module]) -> str | None:
    """What shards the parameters of a model's modules: "ZeRO-3", "FSDP1", "DTensor" (FSDP2, tensor parallelism), or
    None."""
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    if [parameter for parameter in parameters if is_zero_3(parameter)]:
        return "ZeRO-3"
    if has_dtensor(parameters):
        return "DTensor"
    return "FSDP1" if any(map(_is_fsdp1, {type(module): module for module in modules}.values())) else None


def _is_fsdp1(module: nn.Module) -> bool:
    return "FullyShardedDataParallel" in type(module).__name__


def find_rank_groups(model: nn.Module, group: Any) -> list[Any]:
    """The process groups whose ranks run `model` together: `group` if given, or those of its wrapper or its DTensors.

    DeepSpeed's ZeRO-3 has all ranks.
    """
    if group is not None:
        if not (has_ranks() and isinstance(group, torch.distributed.ProcessGroup)):
            raise TypeError(f"group must be a process group of torch.distributed or None, got {type(group).__name__}")
        return [group]
    if not (has_ranks() and isinstance(model, nn.Module)):
        return []
    wrapper = find_ddp(model)
    if wrapper is not None:
        return [wrapper.process_group]
    meshes = _list_meshes(model)
    if not meshes:
        reshard(model)
        meshes = _list_meshes(model)
    if not meshes:
        fsdp1: Any = next((module for module in model.modules() if _is_fsdp1(module)), None)
        if fsdp1 is not None:
            return [fsdp1.process_group]
        return [torch.distributed.group.WORLD] if any(map(is_zero_3, model.parameters())) else []
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def count_averaging_ranks(model: nn.Module) -> int:
    """The number of ranks over whose batches DDP, FSDP or DeepSpeed averages the gradients; 1 if none is known."""
    if not has_ranks():
        return 1
    wrapper = find_ddp(model)
    if wrapper is not None:
        return wrapper.process_group.size()
    for module in model.modules():
        # DeepSpeed's engine, FSDP1, FSDP2.
        if isinstance(size := getattr(module, "dp_world_size", None), int):
            return size
        if _is_fsdp1(module):
            return cast(Any, module).process_group.size()
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        group = None if state is None else state._fsdp_param_group
        if group is not None and getattr(group, "gradient_divide_factor", None) is None:
            mesh = group.mesh_info
            return getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
    return 1


def find_ddp(model: nn.Module) -> Any:
    """The `DistributedDataParallel` around a model of transformers; None if there is none."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return module
        if isinstance(module, PreTrainedModel):
            return None
    return None


def _list_meshes(model: nn.Module) -> list[Any]:
    parameters: list[Any] = list(model.parameters())
    return [parameter.device_mesh for parameter in parameters if is_dtensor(parameter)]
