"""DTensors in, this rank's tensors out. The placements on the mesh say what each argument of a head is.

    weight Shard(0) over a dimension for data       gathered, as FSDP does; its gradient is the mean over that dimension
    weight Shard(0) over another dimension          its rows are this rank's part of the vocabulary
    weight Replicate over a dimension for data      taken as it is; its gradient is the mean over that dimension
    weight Replicate over another dimension         taken as it is
    hidden Shard(...) over the vocabulary's ranks   gathered; its gradient is summed and scattered
    hidden Shard(...) over other ranks              taken as it is: this rank's tokens
    hidden Partial                                  summed over that dimension

A mesh dimension is for data if its name contains dp, data, batch or replicate. Any other dimension,
also without a name, has ranks with the same tokens.
"""

import re
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_rl.distributed import VocabParallel

DATA_NAME = re.compile(r"dp|data|batch|replicate")


def is_dtensor(value: object) -> bool:
    # No module, no DTensor. We do not import it, because that takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def has_dtensor(*values: object) -> bool:
    return any(map(is_dtensor, values))


# The tensors of a call of one head or two, in which each row is a token, and those in which each row is an id.
TOKENS = ("hidden", "targets", "mask", "needed_mask", "teacher_hidden", "token_weights")
ROWS = ("weight", "bias", "teacher_weight", "teacher_bias")


def localized(call: Any) -> Any:
    """A `HeadCall` or `DivergenceCall` without DTensors. Each gathered tensor takes a collective, its gradient another.

    Raises:
        ValueError: placements that no rule above covers; a vocab_parallel together with a DTensor weight; a teacher's
            DTensor weight that starts at another id on this rank than the weight, or is over other ranks.
    """
    if not has_dtensor(*call.tensors):
        return call
    place: VocabParallel | None = call.vocab_parallel
    teacher_weight: Any = getattr(call, "teacher_weight", None)
    if is_dtensor(call.weight):
        if place is not None:
            raise ValueError("vocab_parallel must be None with a DTensor weight, whose mesh says where its rows belong")
        place = place_of(call.weight)
    if is_dtensor(teacher_weight):
        places = place, place_of(teacher_weight)
        starts = [None if p is None else (p.group.group_name, p.vocab_start) for p in places]
        if starts[0] != starts[1]:
            raise ValueError(
                f"teacher_weight must be sharded over the ranks of weight, its rows starting at the same "
                f"id, got {teacher_weight.placements} on {teacher_weight.device_mesh}"
            )
    group = None if place is None else place.group
    placements = call.hidden.placements if is_dtensor(call.hidden) else ()
    scattered = any(p.is_shard() and _is_over(call.hidden, d, group) for d, p in enumerate(placements))
    if place is not None and scattered:
        place = replace(place, sum_hidden_grad=False)
    fields: dict[str, Any] = {"vocab_parallel": place}
    for name in TOKENS:
        if hasattr(call, name):
            fields[name] = _tokens(getattr(call, name), group, summed=scattered and name == "hidden")
    for name in ROWS:
        if hasattr(call, name):
            fields[name] = _rows(name, getattr(call, name))
    return replace(call, **fields)


def _is_data(mesh: Any, dimension: int) -> bool:
    names = mesh.mesh_dim_names
    return names is not None and DATA_NAME.search(names[dimension]) is not None


def _cuts_rows(placement: Any) -> bool:
    return getattr(placement, "dim", None) == 0  # Shard(0) or fully_shard's _StridedShard(0)


def place_of(weight: Any) -> VocabParallel | None:
    """The place of a DTensor weight; None if each rank has all of its rows."""
    mesh = weight.device_mesh
    dimensions = [d for d, p in enumerate(weight.placements) if _cuts_rows(p) and not _is_data(mesh, d)]
    if not dimensions:
        return None
    if len(dimensions) > 1:
        raise ValueError(
            "weight must be sharded over one mesh dimension beside data's, whose names hold dp, data, batch or "
            f"replicate; got {weight.placements} on {mesh}"
        )
    rows_at_most = -(-weight.shape[0] // mesh.size(dimensions[0]))
    start = min(mesh.get_local_rank(dimensions[0]) * rows_at_most, weight.shape[0])
    return VocabParallel(mesh.get_group(dimensions[0]), start)


def _rows(name: str, value: Any) -> Any:
    """A parameter as this rank needs it: whole over the data dimensions, this rank's part over other dimensions."""
    if not is_dtensor(value):
        return value
    from torch.distributed.tensor import Partial, Replicate

    mesh, ranks = value.device_mesh, 1
    placements, grad_placements = list(value.placements), list(value.placements)
    for dimension, placement in enumerate(value.placements):
        if not (placement.is_replicate() or _cuts_rows(placement)):
            raise ValueError(f"{name} must be Shard(0) or Replicate on its mesh, got {value.placements}")
        if _is_data(mesh, dimension):
            placements[dimension], grad_placements[dimension] = Replicate(), Partial()
            ranks *= mesh.size(dimension)
    cut = [d for d, p in enumerate(value.placements) if _is_data(mesh, d) and _cuts_rows(p)]
    if len(cut) == 1 and hasattr(value.placements[cut[0]], "split_factor"):
        local = _unstrided(value, cut[0])
    else:
        local = _local(value, placements, grad_placements)
    if ranks > 1 and local.requires_grad:
        local.register_hook(lambda grad: grad / ranks)  # the mean of data parallelism: not every backend can average
    return local


def _unstrided(value: Any, strided: int) -> Tensor:
    """[_StridedShard(0) over data, Shard(0)] -> this rank's part, whole over data. The gradient is summed over data.

    fully_shard leaves a tensor-parallel parameter like this: the second mesh dimension cuts it first. We redistribute
    one mesh dimension at a time, because torch 2.8 reduces the gradient to other rows than the _StridedShard has.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, rows, local = value.device_mesh, value.shape[0], value.to_local()
    for dimension, placement in enumerate(value.placements):
        if dimension != strided and _cuts_rows(placement):
            rows_at_most = -(-rows // mesh.size(dimension))
            rows = min(max(rows - mesh.get_local_rank(dimension) * rows_at_most, 0), rows_at_most)
    shape = torch.Size((rows, *local.shape[1:]))
    for dimension in filter(lambda d: _is_data(mesh, d), range(mesh.ndim)):
        ranks = DeviceMesh.from_group(mesh.get_group(dimension), mesh.device_type)
        placement = Shard(0) if dimension == strided else Replicate()
        dtensor = DTensor.from_local(local, ranks, [placement], run_check=False, shape=shape, stride=local.stride())
        local = _local(dtensor, [Replicate()], [Partial()])
    return local


def _is_over(value: Any, dimension: int, group: Any) -> bool:
    return group is not None and value.device_mesh.get_group(dimension).group_name == group.group_name


def _tokens(value: Any, group: Any, *, summed: bool = False) -> Any:
    """A tensor of tokens: whole over the ranks of `group`, this rank's part over other ranks.

    `summed` sums and scatters its gradient over the group.
    """
    if not is_dtensor(value):
        return value
    from torch.distributed.tensor import Partial, Replicate

    placements, grad_placements = list(value.placements), list(value.placements)
    for dimension in range(len(placements)):
        if placements[dimension].is_partial():
            placements[dimension] = grad_placements[dimension] = Replicate()
        if _is_over(value, dimension, group):
            placements[dimension], grad_placements[dimension] = Replicate(), Partial() if summed else Replicate()
    return _local(value, placements, grad_placements)


def _local(value: Any, placements: list, grad_placements: list) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = value.redistribute(placements=placements).to_local(grad_placements=grad_placements)
    # The collective of an AsyncCollectiveTensor may still run. A copy waits for it, and has an address for kernels.
    return local.clone() if isinstance(local, AsyncCollectiveTensor) else local
