"""DTensors in, this rank's plain tensors out. The placements on the mesh say what each argument of a head is.

    weight Shard(0) over a dimension for data       gathered, as FSDP does; its gradient is the mean over that dimension
    weight Shard(0) over another dimension          its rows are this rank's part of the vocabulary
    weight Replicate over a dimension for data      taken as it is; its gradient is the mean over that dimension
    weight Replicate over another dimension         taken as it is
    hidden Shard(...) over the vocabulary's ranks   gathered; its gradient is summed and scattered
    hidden Shard(...) over other ranks              taken as it is: this rank's tokens
    hidden Partial                                  summed over that dimension

A mesh dimension is for data if its name contains dp, data, batch or replicate. Any other dimension has ranks with the
same tokens. A weight that is sharded over a dimension without a name is refused: FSDP2's default mesh has none.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_rl.distributed import VocabParallel, share_shards

__all__ = ["LocalTensors", "localize"]

DATA_NAME = re.compile(r"dp|data|batch|replicate")


def is_dtensor(value: object) -> bool:
    return has_dtensor((value,))


def is_zero_3(parameter: object) -> bool:
    """Whether DeepSpeed's ZeRO-3 shards the parameter: DeepSpeed sets ds_id on each of a model's."""
    return hasattr(parameter, "ds_id")


def is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was called with this module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def reshard(model: nn.Module) -> None:
    """Shard FSDP2's parameters again. The root's stay gathered after a forward without a backward."""
    for module in filter(is_fsdp, model.modules()):
        cast(Any, module).reshard()


def plain_type(layer: nn.Module) -> type:
    """The layer's class; under `fully_shard`, which derives a class, the class before."""
    return type(layer).__bases__[1] if is_fsdp(layer) else type(layer)


def has_dtensor(values: Sequence[object]) -> bool:
    # No module, no DTensor. We do not import it, because that takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in values)


class LocalTensors(NamedTuple):
    """The plain tensors of one rank, named as the arguments of `linear_logprobs`."""

    hidden: Any
    weight: Any
    bias: Any
    targets: Any
    mask: Any
    vocab_parallel: VocabParallel | None


def localize(
    hidden: Any,
    weight: Any,
    *,
    bias: Any = None,
    targets: Any = None,
    mask: Any = None,
    vocab_parallel: VocabParallel | None = None,
    student: LocalTensors | None = None,
    in_forward: bool = False,
) -> LocalTensors:
    """The plain tensors of this rank, differentiable, with the place of its rows if the vocabulary is sharded.

    Without a DTensor it returns the arguments. Each gathered tensor takes a collective, and its gradient another.
    docs/distributed.md says which placements mean what.

    Args:
        hidden, weight, bias, targets, mask: as in `linear_logprobs`, each a plain tensor, a DTensor or None.
        vocab_parallel: the place of a plain weight's rows.
        student: with a teacher's head, the result for the student's, whose vocabulary must be sharded alike.
        in_forward: the call is in the forward of the weight's module, where FSDP2 has gathered the weight. So a mesh
            without names, as of transformers' tp_plan, shards the vocabulary.

    Raises:
        ValueError: placements that have no meaning; a weight that is sharded on a mesh without names; a vocab_parallel
            together with a DTensor weight; a teacher's DTensor weight that starts at another id on this rank than the
            student's, or is over other ranks.
    """
    if student is not None:
        vocab_parallel = student.vocab_parallel
    if not has_dtensor((hidden, weight, bias, targets, mask)):
        return LocalTensors(hidden, weight, bias, targets, mask, vocab_parallel)
    if not in_forward:
        _check_names("weight", weight)
        _check_names("bias", bias)
    if is_dtensor(weight):
        place = _vocab_parallel(weight)
        if student is not None:
            _check_sharded_alike(weight, place, vocab_parallel)
        elif vocab_parallel is not None:
            raise ValueError("vocab_parallel must be None with a DTensor weight, whose mesh says where its rows belong")
        else:
            vocab_parallel = place
    local_weight, local_bias = _local_rows("weight", weight), _local_rows("bias", bias)
    if is_dtensor(weight) and vocab_parallel is not None:
        share_shards(local_weight, weight)
    group = None if vocab_parallel is None else vocab_parallel.group
    placements = hidden.placements if is_dtensor(hidden) else ()
    scattered = any(p.is_shard() and _is_over(hidden, d, group) for d, p in enumerate(placements))
    if vocab_parallel is not None and scattered:
        vocab_parallel = replace(vocab_parallel, sum_hidden_grad=False)
    local_hidden = _local_tokens(hidden, group, summed=scattered)
    local_targets, local_mask = (_local_tokens(value, group) for value in (targets, mask))
    return LocalTensors(local_hidden, local_weight, local_bias, local_targets, local_mask, vocab_parallel)


def _check_names(name: str, value: Any) -> None:
    if not is_dtensor(value) or value.device_mesh.mesh_dim_names is not None:
        return
    mesh = value.device_mesh
    if any(_cuts_rows(placement) and mesh.size(d) > 1 for d, placement in enumerate(value.placements)):
        raise ValueError(
            f"{name} must be sharded on a mesh whose dimensions have names, got {mesh}; pass mesh_dim_names to "
            'init_device_mesh: ("dp",) if its ranks have different tokens, as with FSDP2, ("tp",) if the vocabulary '
            "is sharded"
        )


def _check_sharded_alike(weight: Any, teacher: VocabParallel | None, student: VocabParallel | None) -> None:
    starts = [None if place is None else (place.group.group_name, place.vocab_start) for place in (teacher, student)]
    if starts[0] != starts[1]:
        raise ValueError(
            f"the teacher's weight must be sharded over the ranks of the student's, its rows starting at the same id, "
            f"got {weight.placements} on {weight.device_mesh}"
        )


def _is_data(mesh: Any, dimension: int) -> bool:
    names = mesh.mesh_dim_names
    return names is not None and DATA_NAME.search(names[dimension]) is not None


def _cuts_rows(placement: Any) -> bool:
    return getattr(placement, "dim", None) == 0  # Shard(0) or fully_shard's _StridedShard(0)


def _vocab_parallel(weight: Any) -> VocabParallel | None:
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


def _local_rows(name: str, value: Any) -> Any:
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


def _local_tokens(value: Any, group: Any, *, summed: bool = False) -> Any:
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
