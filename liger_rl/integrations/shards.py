"""This rank's rows of an lm_head whose vocabulary a process group holds in equal parts, in the order of its ranks."""

import torch.distributed as dist
from torch import Tensor

from liger_rl.distributed import VocabParallel


def vocab_shard(
    group: "dist.ProcessGroup | None",
    weight: Tensor,
    bounds: tuple[int, int] | None = None,
    *,
    sum_hidden_grad: bool = False,
) -> VocabParallel | None:
    """-> the shard that `weight` (V / ranks, H) is; None if one rank holds the whole vocabulary.

    `bounds` are the vocab_start_index and vocab_end_index that a caller states. Without `sum_hidden_grad` the caller's
    own backward adds the ranks' gradients of hidden.
    """
    rows = weight.shape[0]
    if bounds is not None and bounds[1] - bounds[0] != rows:
        raise ValueError(
            f"vocab_end_index must be vocab_start_index + {rows} from the weight's rows, "
            f"got {bounds[0]} and {bounds[1]}"
        )
    if group is None or dist.get_world_size(group) == 1:
        return None
    start = dist.get_rank(group) * rows if bounds is None else bounds[0]
    return VocabParallel(group, start, sum_hidden_grad=sum_hidden_grad)
