"""Ranks that run one model on different batches, and must run it equally often."""

from typing import Any

import torch
from torch import nn

from liger_rl.call.dtensors import is_dtensor
from liger_rl.step.live_rows import Plan
from liger_rl.step.model_body import reshard


def agreed(plan: Plan | None, groups: list[Any], device: torch.device) -> tuple[int, int]:
    """The numbers of micro-batches with a backward and without one that every rank of the groups runs.

    None is the plan of a rank that has refused its batch. Every other rank then raises ValueError.
    """
    counts = [0, 0, 1] if plan is None else [len(plan.live), len(plan.idle), 0]
    if groups:
        most = torch.tensor(counts, device=device)
        for group in groups:
            most = most.to(_device_of(group, device))
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
        counts = most.tolist()
    steps, forwards, refused = counts
    if refused and plan is not None:
        raise ValueError(
            "max_tokens and packing must be possible on every rank, and another rank has refused its batch"
        )
    return steps, forwards


def _device_of(group: Any, device: torch.device) -> torch.device:
    """`device`, or the group's kind: DDP and FSDP2 move a batch in CPU memory themselves, and NCCL cannot reduce it."""
    kinds = [entry.split(":")[0] for entry in torch.distributed.get_backend_config(group).split(",")]
    return device if device.type in kinds else torch.device(kinds[0])


def rank_groups(model: nn.Module, group: Any) -> list[Any]:
    """Process groups whose ranks run `model` together: the caller's, or the groups of DDP, FSDP and DTensors."""
    if group is not None:
        return [group]
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
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
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return module
        if hasattr(module, "_fused_transform"):
            break
    return None


def _meshes(model: nn.Module) -> list[Any]:
    parameters: list[Any] = list(model.parameters())
    return [parameter.device_mesh for parameter in parameters if is_dtensor(parameter)]
