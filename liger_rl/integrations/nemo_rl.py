"""NeMo-RL's log-probabilities from hidden states, by its own signature, on this package's head: docs/nemo_rl.md."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from liger_rl.call.head_call import shared_errors
from liger_rl.distributed import gathered_rows, vocab_shard
from liger_rl.integrations.patching import Framework, Patch
from liger_rl.logprobs import linear_logprobs

__all__ = [
    "from_parallel_hidden_states_to_logprobs",
    "is_patched",
    "patch_nemo_rl",
    "patched_nemo_rl",
    "unpatch_nemo_rl",
]


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,  # (s, b, h), this rank's s positions
    output_weight_layer: Tensor,  # (v / tensor parallel ranks, h)
    runtime_gather_output: bool | None,  # not used, as in NeMo-RL
    target: Tensor,  # (b, S) ids of the whole sequence, not shifted
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,  # not used
) -> Tensor:
    """Drop-in for the function of that name in `nemo_rl.distributed.model_utils`.

    Position t predicts target[:, t + 1]. A negative target masks its token. docs/nemo_rl.md lists all differences from
    NeMo-RL's. The ranks of tp_group hold the vocabulary, and parts of the sequence in their order. The ranks of
    cp_group hold the sequence in 2 x ranks chunks: rank r holds the chunks r and 2 x ranks - 1 - r.

    Returns:
        (b, S - 1) float32 in nats, the same on every rank of both groups.
    """
    weight, cp = output_weight_layer, 1 if cp_group is None else dist.get_world_size(cp_group)
    with torch.no_grad() if inference_only else nullcontext():
        hidden = tensor_parallel_hidden_states
        if tp_group is not None and dist.get_world_size(tp_group) > 1:
            hidden = gathered_rows(hidden, tp_group)
        local = hidden.shape[0]
        # After the gather, because ranks share an error in a collective.
        place = vocab_shard(tp_group, weight, (vocab_start_index, vocab_end_index))
        with shared_errors(place, weight):
            labels = _next_ids(target, local, cp)
        if cp > 1:
            rank = dist.get_rank(cp_group)
            labels = labels.unflatten(1, (2 * cp, -1))[:, [rank, 2 * cp - 1 - rank]].flatten(1)
        logps = linear_logprobs(hidden, weight, labels.T.contiguous(), vocab_parallel=place).logps
        if cp_group is not None and cp > 1:
            chunks = [chunk for rank in range(cp) for chunk in (rank, 2 * cp - 1 - rank)]  # as the gather stacks them
            order = sorted(range(2 * cp), key=chunks.__getitem__)
            logps = gathered_rows(logps, cp_group).unflatten(0, (2 * cp, -1))[order].flatten(0, 1)
    return logps.T[:, : target.shape[1] - 1]


def _next_ids(target: Tensor, local: int, cp: int) -> Tensor:
    """(b, S) -> (b, local * cp): each position's next id, -100 where there is none."""
    missing = local * cp - target.shape[1]
    if missing < 0 or (cp > 1 and (missing >= local * (cp - 1) or local % 2)):
        raise ValueError(
            f"target must be the whole sequence of up to {local * cp} ids, from an even {local} positions of "
            f"tensor_parallel_hidden_states on each of {cp} ranks of cp_group, got {tuple(target.shape)}"
        )
    return torch.nn.functional.pad(target[:, 1:], (0, missing + 1), value=-100)


NEMO_RL = Framework(
    "nemo-rl",
    (0, 6),
    (0, 8),
    Patch(
        "nemo_rl.distributed.model_utils:from_parallel_hidden_states_to_logprobs",
        from_parallel_hidden_states_to_logprobs,
    ),  # 0.6.0 has other parameters, and is refused
    gain="float32 logits, two collectives in all",
)


def patch_nemo_rl() -> None:
    """NeMo-RL's fused log-probabilities, used with `policy.megatron_cfg.use_fused_linear_logprobs: true`.

    Call it in every worker process. See docs/nemo_rl.md.
    """
    NEMO_RL.patch()


unpatch_nemo_rl = NEMO_RL.unpatch
patched_nemo_rl = NEMO_RL.within
is_patched = NEMO_RL.is_patched
