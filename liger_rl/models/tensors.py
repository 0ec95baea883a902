"""DTensors in, this rank's plain tensors out. The mesh of a head's weight says what its rows are.

    Shard(0), or Shard(0) and Replicate, over dimensions for data   gathered, as FSDP does; its gradient is their mean
    Replicate over dimensions for data                              taken as it is; its gradient is their mean
    Shard(0) on another mesh, of one dimension                      this rank's part of the vocabulary
    Replicate on another mesh, of one dimension                     taken as it is

A mesh dimension is for data if its name contains dp, data, batch or replicate. Any other dimension has ranks with the
same tokens. A weight that is sharded over a dimension without a name is refused: FSDP2's default mesh has none.
"""

import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

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
    return module is not None and bool([value for value in values if isinstance(value, module.DTensor)])


class LocalTensors(NamedTuple):
    """The plain tensors of one rank, named as the arguments of `linear_logprobs`."""

    hidden: Any
    weight: Any
    bias: Any
    vocab_parallel: VocabParallel | None


def localize(
    hidden: Any,
    weight: Any,
    *,
    bias: Any = None,
    vocab_parallel: VocabParallel | None = None,
    in_forward: bool = False,
) -> LocalTensors:
    """The plain tensors of this rank, differentiable, with the place of its rows if the vocabulary is sharded.

    Without a DTensor it returns the arguments. Each gathered tensor takes a collective, and its gradient another.
    docs/distributed.md says which placements mean what.

    Args:
        hidden, weight, bias: as in `linear_logprobs`, each a plain tensor, a DTensor or None.
        vocab_parallel: the place of a plain weight's rows.
        in_forward: the call is in the forward of the weight's module, where FSDP2 has gathered the weight. So a mesh
            without names, as of transformers' tp_plan, shards the vocabulary.

    Raises:
        ValueError: placements that have no meaning; a weight that is sharded on a mesh without names; a vocab_parallel
            together with a DTensor weight.
    """
    if not has_dtensor((hidden, weight, bias)):
        return LocalTensors(hidden, weight, bias, vocab_parallel)
    _check_replicated(hidden)
    for name, value in (("weight", weight), ("bias", bias)):
        _check_rows(name, value, in_forward)
    local_weight, local_bias = _local_rows(weight), _local_rows(bias)
    if is_dtensor(weight):
        if vocab_parallel is not None:
            raise ValueError("vocab_parallel must be None with a DTensor weight, whose mesh says where its rows belong")
        vocab_parallel = _find_place(weight)
        if vocab_parallel is not None:
            share_shards(local_weight, weight)
    local_hidden = _local(hidden, hidden.placements, hidden.placements) if is_dtensor(hidden) else hidden
    return LocalTensors(local_hidden, local_weight, local_bias, vocab_parallel)


def _check_replicated(hidden: Any) -> None:
    if is_dtensor(hidden) and not all(placement.is_replicate() for placement in hidden.placements):
        raise ValueError(
            f"hidden must be a plain tensor or Replicate on its mesh, got {hidden.placements}; pass hidden.to_local() "
            "if the ranks have other tokens, hidden.redistribute(...) to Replicate if they share a vocabulary"
        )


def _check_rows(name: str, value: Any, in_forward: bool) -> None:
    """ValueError for a parameter that is neither FSDP2's nor a tensor-parallel plan's."""
    if not is_dtensor(value):
        return
    mesh = value.device_mesh
    meaningful = _is_for_data(mesh) or mesh.ndim == 1
    if not meaningful or not all(_cuts_rows(placement) or placement.is_replicate() for placement in value.placements):
        raise ValueError(
            f"{name} must be Shard(0) or Replicate on a mesh for data, as of fully_shard, or on one of one dimension, "
            f"as of a tensor-parallel plan; got {value.placements} on {mesh}"
        )
    cut = any(_cuts_rows(placement) and mesh.size(d) > 1 for d, placement in enumerate(value.placements))
    if cut and mesh.mesh_dim_names is None and not in_forward:
        raise ValueError(
            f"{name} must be sharded on a mesh whose dimensions have names, got {mesh}; pass mesh_dim_names to "
            'init_device_mesh: ("dp",) if its ranks have different tokens, as with FSDP2, ("tp",) if the vocabulary '
            "is sharded"
        )


def _is_for_data(mesh: Any) -> bool:
    names = mesh.mesh_dim_names
    return names is not None and all(DATA_NAME.search(name) for name in names)


def _cuts_rows(placement: Any) -> bool:
    from torch.distributed.tensor import Shard

    return type(placement) is Shard and placement.dim == 0  # not fully_shard's _StridedShard, of rows in another order


def _find_place(weight: Any) -> VocabParallel | None:
    """The place of a DTensor weight; None if each rank has all of its rows."""
    mesh = weight.device_mesh
    if _is_for_data(mesh) or weight.placements[0].is_replicate():
        return None
    rows_at_most = -(-weight.shape[0] // mesh.size())
    return VocabParallel(mesh.get_group(), min(mesh.get_local_rank() * rows_at_most, weight.shape[0]))


def _local_rows(value: Any) -> Any:
    """A parameter as this rank needs it: whole over dimensions for data, else this rank's part."""
    if not is_dtensor(value):
        return value
    from torch.distributed.tensor import Partial, Replicate

    mesh = value.device_mesh
    if not _is_for_data(mesh):
        return _local(value, value.placements, value.placements)
    local = _local(value, [Replicate()] * mesh.ndim, [Partial()] * mesh.ndim)
    ranks = mesh.size()
    if ranks > 1 and local.requires_grad:
        local.register_hook(lambda grad: grad / ranks)  # the mean of data parallelism: not every backend can average
    return local


def _local(value: Any, placements: Sequence[Any], grad_placements: Sequence[Any]) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = value.redistribute(placements=placements).to_local(grad_placements=grad_placements)
    # The collective of an AsyncCollectiveTensor may still run. A copy waits for it, and has an address for kernels.
    return local.clone() if isinstance(local, AsyncCollectiveTensor) else local
