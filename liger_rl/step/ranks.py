"""Ranks that run one model on different batches, and must run it equally often."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from liger_rl.distributed import gathered_objects
from liger_rl.models.local_tensors import is_dtensor
from liger_rl.step.model_body import reshard, wrappers_of


@contextmanager
def agreement(groups: list[Any], device: torch.device) -> Iterator[list[int]]:
    """A context that yields three counts of this rank; after it they are the largest of all ranks of the groups.

    A collective. If one rank raises an error in it, every other rank raises a TypeError or ValueError with its text.
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
        most = most.to(_device_of(group, device))
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


def first_device(model: Any) -> torch.device:
    """The device of a model's first parameter, which is of one kind on all ranks."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


def _device_of(group: Any, device: torch.device) -> torch.device:
    """`device`, or the group's kind of device: NCCL cannot reduce a tensor in CPU memory, where parameters may be."""
    kinds = [entry.split(":")[0] for entry in torch.distributed.get_backend_config(group).split(",")]
    return device if device.type in kinds else torch.device(kinds[0])


def rank_groups(model: nn.Module, group: Any) -> list[Any]:
    """Process groups whose ranks run `model` together: the caller's, or the groups of DDP, FSDP and DTensors."""
    if group is not None:
        return [group]
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not (distributed and isinstance(model, nn.Module)):
        return []
    wrapper = data_parallel(model)
    if wrapper is not None:
        return [wrapper.process_group]
    meshes = _meshes(model)
    if not meshes:
        reshard(model)
        meshes = _meshes(model)
    if not meshes:
        return []
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def data_parallel(model: nn.Module) -> Any:
    """The `DistributedDataParallel` around a swapped model; None if there is none."""
    kind = nn.parallel.DistributedDataParallel
    return next((module for module in wrappers_of(model) if isinstance(module, kind)), None)


def _meshes(model: nn.Module) -> list[Any]:
    parameters: list[Any] = list(model.parameters())
    return [parameter.device_mesh for parameter in parameters if is_dtensor(parameter)]
