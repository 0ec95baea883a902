"""Ranks that run one model on different batches must run it equally often."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from liger_rl.distributed import gathered_objects
from liger_rl.models.modules import list_modules
from liger_rl.models.tensors import is_dtensor, reshard
from liger_rl.step.body import find_sharding, iterate_wrappers


@contextmanager
def agree_on_counts(groups: list[Any], device: torch.device) -> Iterator[list[int]]:
    """Yields three counts, to be set inside the context. After it they are the maximum over all ranks of the groups.

    A collective. If one rank raises an error inside, every other rank raises a TypeError or ValueError with its text.
    """
    counts, problem = [0, 0, 0], None
    try:
        yield counts
    except Exception as error:
        if not groups:
            raise
        problem = error
    if not groups:
        return
    most = torch.tensor([problem is not None, *counts], dtype=torch.int64, device=device)
    for group in groups:
        most = most.to(pick_device(group, device))
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
    refused, *counts[:] = most.tolist()
    if not refused:
        return
    shared = None
    if problem is not None:
        # Not the error itself, which may be of a kind that does not pickle.
        kind = TypeError if isinstance(problem, TypeError) else ValueError
        shared = kind(f"{problem} (rank {torch.distributed.get_rank()})")
    for group in groups:
        shared = next((error for error in gathered_objects(shared, group, most) if error is not None), None)
    raise cast(Exception, shared if problem is None else problem)


def agree_on_minimum(groups: list[Any], value: int, device: torch.device) -> int:
    """The smallest value of all ranks of the groups. A collective."""
    if not groups:
        return value
    least = torch.tensor(value, dtype=torch.int64, device=device)
    for group in groups:
        least = least.to(pick_device(group, device))
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(least)


def first_device(model: Any) -> torch.device:
    """The device of the model's first parameter, of the same type on all ranks."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


def pick_device(group: Any, device: torch.device) -> torch.device:
    """A device that the group can reduce on, `device` if possible. NCCL cannot reduce tensors in CPU memory."""
    kinds = [entry.split(":")[0] for entry in torch.distributed.get_backend_config(group).split(",")]
    return device if device.type in kinds else torch.device(kinds[0])


def find_rank_groups(model: nn.Module, group: Any) -> list[Any]:
    """The process groups whose ranks run `model` together: `group` if given, or those of DDP and DTensors (FSDP2).

    DeepSpeed's ZeRO-3 has all ranks.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if group is not None:
        if not (distributed and isinstance(group, torch.distributed.ProcessGroup)):
            raise TypeError(f"group must be a process group of torch.distributed or None, got {type(group).__name__}")
        return [group]
    if not (distributed and isinstance(model, nn.Module)):
        return []
    wrapper = find_ddp(model)
    if wrapper is not None:
        return [wrapper.process_group]
    meshes = _list_meshes(model)
    if not meshes:
        reshard(model)
        meshes = _list_meshes(model)
    if not meshes:
        return [torch.distributed.group.WORLD] if find_sharding(model) == "ZeRO-3" else []
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def count_averaging_ranks(model: nn.Module) -> int:
    """The number of ranks over whose batches DDP, FSDP or DeepSpeed averages the gradients; 1 if none is known."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    wrapper = find_ddp(model)
    if wrapper is not None:
        return wrapper.process_group.size()
    for module in list_modules(model):
        # DeepSpeed's engine, FSDP1, FSDP2.
        if isinstance(size := getattr(module, "dp_world_size", None), int):
            return size
        if "FullyShardedDataParallel" in type(module).__name__:
            return cast(Any, module).process_group.size()
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        group = None if state is None else state._fsdp_param_group
        if group is not None and getattr(group, "gradient_divide_factor", None) is None:
            mesh = group.mesh_info
            return getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
    return 1


def find_ddp(model: nn.Module) -> Any:
    """The `DistributedDataParallel` around a swapped model; None if there is none."""
    kind = nn.parallel.DistributedDataParallel
    return next((module for module in iterate_wrappers(model) if isinstance(module, kind)), None)


def _list_meshes(model: nn.Module) -> list[Any]:
    parameters: list[Any] = list(model.parameters())
    return [parameter.device_mesh for parameter in parameters if is_dtensor(parameter)]
