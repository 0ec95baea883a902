"""Ranks that run one model on batches of their own, and have to run it equally often."""

from typing import Any

import torch
from torch import nn

from liger_rl.head.dtensors import is_dtensor
from liger_rl.integrations.head import is_gathered
from liger_rl.integrations.live_rows import Plan


def agreed(plan: Plan | None, groups: list[Any], device: torch.device) -> tuple[int, int]:
    """-> how many micro-batches with a backward, and without, every rank of the groups runs. None is a rank that has
    refused its batch, which the others then refuse, too."""
    if plan is not None and not groups:
        return len(plan.parts), len(plan.idle)
    counts = [0, 0, 1] if plan is None else [len(plan.parts), len(plan.idle), 0]
    most = torch.tensor(counts, device=device)
    for group in groups:
        most = most.to(_device_of(group, device))
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
    steps, forwards, refused = most.tolist() if groups else counts
    if refused and plan is not None:
        raise ValueError(
            "max_tokens and packing must be possible on every rank, and another rank has refused its batch"
        )
    return steps, forwards


def _device_of(group: Any, device: torch.device) -> torch.device:
    """`device`, or the group's where it has none of that kind: DDP and FSDP2 move a batch in CPU memory themselves."""
    kinds = [entry.split(":")[0] for entry in torch.distributed.get_backend_config(group).split(",")]
    return device if device.type in kinds else torch.device(kinds[0])


def rank_groups(model: nn.Module, group: Any) -> list[Any]:
    """Process groups whose ranks run `model` together: the given one, or those of DDP, FSDP and DTensors."""
    if group is not None:
        return [group]
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    wrapper = data_parallel(model)
    if wrapper is not None:
        return [wrapper.process_group]
    found = _meshes(model)
    if not found and is_gathered(model):
        for part in model.modules():  # after a forward without a backward, the root's parameters are whole
            getattr(part, "reshard", lambda: None)()
        found = _meshes(model)
    if not found:
        return []
    mesh = max(found, key=lambda mesh: mesh.ndim)
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def data_parallel(model: nn.Module) -> Any:
    """The `DistributedDataParallel` in what wraps a swapped model; None where there is none."""
    for part in model.modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            return part
        if hasattr(part, "_fused_transform"):
            break
    return None


def _meshes(model: nn.Module) -> list[Any]:
    parameters: list[Any] = list(model.parameters())
    return [parameter.device_mesh for parameter in parameters if is_dtensor(parameter)]
