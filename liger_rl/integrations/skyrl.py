"""SkyRL's log-probabilities on this package's head, for both of its training backends: docs/skyrl.md."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_rl.call.support import Support
from liger_rl.distributed import vocab_shard
from liger_rl.integrations.patching import Framework, Patch
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import linear_logprobs

__all__ = [
    "fused_lm_head_logprob_apply",
    "fused_vocab_parallel_entropy_from_hidden",
    "is_patched",
    "patch_skyrl",
    "patched_skyrl",
    "unpatch_skyrl",
]

# Backend -> the module of SkyRL that is patched.
MODULES = {
    "megatron": "skyrl.backends.skyrl_train.distributed.megatron.model_utils",
    "fsdp": "skyrl.backends.skyrl_train.workers.model_wrapper",
}

# The temperature of SkyRL's running call, which would divide the weight by it: a copy of the weight and its gradient.
_temperature: ContextVar[float] = ContextVar("temperature", default=1.0)


def fused_lm_head_logprob_apply(
    backend: str,  # not used
    hidden: Tensor,  # (B, S, H), brought to the weight's dtype
    weight: Tensor,  # (V / ranks, H)
    target: Tensor,  # (B, S) ids, shifted by the caller
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None,  # not used
    tp_group: dist.ProcessGroup,
    inference_only: bool,
) -> Tensor:
    """Drop-in for SkyRL's `_fused_lm_head_logprob_apply`, of either of its backends.

    Position t predicts target[:, t]. A negative target masks its token. docs/skyrl.md lists all differences from
    SkyRL's. As in SkyRL the gradient of hidden is this rank's part.

    Returns:
        (B, S) float32 in nats, the same on every rank of the group.
    """
    with torch.no_grad() if inference_only else nullcontext():
        return linear_logprobs(
            hidden.to(weight.dtype),
            weight,
            target,
            transform=LogitTransform(temperature=_temperature.get()),
            vocab_parallel=vocab_shard(tp_group, weight, (vocab_start_index, vocab_end_index)),
        ).logps


def fused_vocab_parallel_entropy_from_hidden(
    hidden: Tensor,  # (B, S, H), brought to the weight's dtype
    lm_head_weight: Tensor,  # (V / ranks, H)
    tp_group: dist.ProcessGroup,
    chunk_size: int | None = None,  # not used
    temperature: float = 1.0,
) -> Tensor:
    """Drop-in for SkyRL's `_fused_vocab_parallel_entropy_from_hidden`. It is differentiable. SkyRL's is not.

    Returns (B, S). The gradient of hidden is this rank's part.
    """
    entropy = linear_logprobs(
        hidden.to(lm_head_weight.dtype),
        lm_head_weight,
        torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device),
        transform=LogitTransform(temperature=temperature),
        entropy=True,
        vocab_parallel=vocab_shard(tp_group, lm_head_weight),
    ).entropy
    assert entropy is not None
    return entropy


def forward(
    self: Any,
    sequences: Tensor,  # (B, S)
    num_actions: int | list[int],
    attention_mask: Tensor | None = None,  # (B, S)
    temperature: float = 1.0,
    return_output: bool = False,
    compute_entropy: bool = False,
    entropy_requires_grad: bool = True,
    pixel_values: Any = None,
    image_grid_thw: Any = None,
    mm_token_type_ids: Any = None,
    sample_support: Any = None,  # the last three: SkyRL 0.4
    loss_mask: Any = None,
    enable_sample_support_replay: bool = False,
) -> Any:
    """`HFModelWrapper.forward` without logits. Its model's head is swapped at the first call.

    If padding is not removed, entropies in `output["entropy"]` are 0 where the wrapper returns no log-probability.
    ValueError for an option that is not reproduced, and for a head that `swap_lm_head` refuses.
    """
    from liger_rl.integrations.transformers import swap_lm_head

    if self.is_vlm or any(value is not None for value in (pixel_values, image_grid_thw, mm_token_type_ids)):
        raise ValueError("is_vlm must be False: the heads of models with images are not swapped")
    if self.sequence_parallel_size > 1:
        raise ValueError(
            f"sequence_parallel_size must be 1, got {self.sequence_parallel_size}: a part's last token has its target "
            "in another part"
        )
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if isinstance(num_actions, list):
        (num_actions,) = num_actions
    actions = slice(-num_actions - 1, -1)
    framework, packed = SKYRL.original("HFModelWrapper.forward").__globals__, self.remove_microbatch_padding
    mask: Tensor | None = attention_mask
    ids, positions = sequences, attention_mask.long().cumsum(-1) - 1
    replay: Any = None
    if enable_sample_support_replay:
        for name, column in (("sample_support", sample_support), ("loss_mask", loss_mask)):
            if column is None:
                raise ValueError(f"{name} must be given with enable_sample_support_replay, got None")
        replay = framework["_SampleSupportChannels"].build(sequences, attention_mask, sample_support, loss_mask)
    if packed:
        ids, indices, *_ = framework["unpad_input"](ids.unsqueeze(-1), attention_mask=attention_mask)
        positions, *_ = framework["unpad_input"](positions.unsqueeze(-1), attention_mask=attention_mask)
        replay = replay and replay.unpad(indices)
        ids, positions, mask = ids.T, positions.T, None  # (1, tokens)
        targets = ids.roll(-1, 1)
    else:
        positions = positions.masked_fill(attention_mask == 0, 1)
        targets = torch.full_like(ids, -100)
        targets[:, actions] = ids.roll(-1, 1)[:, actions]
    support = None
    if replay is not None:
        replay = replay.roll_to_logit_positions()
        gather = framework["score_aligned_sample_support"].__globals__["_gather_support_rows"]
        drawn = gather(sample_support, replay.row_ids)  # (B, S, K), -1 is no id
        without = (drawn < 0).all(-1)
        if (replay.loss_mask & without).any():
            raise ValueError("sample_support must have a row for each token of loss_mask")
        targets, support = targets.masked_fill(without, -100), Support.from_padded(drawn)
    output = swap_lm_head(self.model)(
        ids,
        attention_mask=mask,
        position_ids=positions,
        fused=True,
        shift_labels=targets,
        entropy=compute_entropy,
        temperature=temperature,
        support=support,
    )

    def padded(values: Tensor) -> Tensor:
        """(B, S)"""
        if not packed:
            return values
        batch, length = sequences.shape
        return framework["pad_input"](values.T, indices=indices, batch=batch, seqlen=length).squeeze(-1)

    if compute_entropy:
        entropy = output.entropy if entropy_requires_grad else output.entropy.detach()
        output["entropy"] = padded(entropy if packed else entropy * attention_mask)
    logps = padded(output.per_token_logps)[:, actions]
    return (logps, output) if return_output else logps


def _at_temperature(name: str) -> Callable[..., Tensor]:
    """SkyRL's function of that name, which otherwise divides the weight by the temperature before it calls the head."""

    def function(*arguments: Any, **keywords: Any) -> Tensor:
        original = SKYRL.original(name)
        bound = inspect.signature(original).bind(*arguments, **keywords)
        token = _temperature.set(bound.arguments.pop("temperature", 1.0))
        try:
            return original(*bound.args, **bound.kwargs)
        finally:
            _temperature.reset(token)

    return function


def _row(backend: str, name: str, replacement: Any, parameters: str = "") -> Patch:
    return Patch(f"{MODULES[backend]}:{name}", replacement, parameters, group=backend)


SKYRL = Framework(
    "skyrl",
    (0, 3),
    (0, 5),
    _row("megatron", "_fused_lm_head_logprob_apply", fused_lm_head_logprob_apply),
    _row("megatron", "_fused_vocab_parallel_entropy_from_hidden", fused_vocab_parallel_entropy_from_hidden),
    _row(
        "megatron",
        "from_parallel_hidden_to_logprobs",
        _at_temperature("from_parallel_hidden_to_logprobs"),
        "hidden lm_head_weight target vocab_start_index vocab_end_index tp_group inference_only cp_group chunk_size "
        "temperature fused_backend",
    ),
    _row(
        "megatron",
        "from_parallel_hidden_to_logprobs_packed_sequences",
        _at_temperature("from_parallel_hidden_to_logprobs_packed_sequences"),
        "hidden lm_head_weight target cu_seqlens_padded unpacked_seqlen vocab_start_index vocab_end_index group "
        "inference_only cp_group chunk_size attention_mask sub_seq_lengths temperature fused_backend",
    ),
    _row(
        "fsdp",
        "HFModelWrapper.forward",
        forward,
        "self sequences num_actions attention_mask temperature return_output compute_entropy entropy_requires_grad "
        "pixel_values image_grid_thw mm_token_type_ids sample_support? loss_mask? enable_sample_support_replay?",
    ),
    gain="float32 logits; under FSDP no logits, and prompts are not projected",
)


def patch_skyrl(backend: str) -> None:
    """Put this package's head under SkyRL's training. Call it in every worker process. See docs/skyrl.md.

    Args:
        backend: as SkyRL's `trainer.strategy`. "megatron" replaces the fused head that SkyRL takes with
            `trainer.fused_lm_head_logprob=true`, whichever `fused_lm_head_logprob_backend` is. "fsdp" replaces
            `HFModelWrapper.forward` in every wrapper, made before or later, and swaps their models' heads (see
            `swap_lm_head`). It needs no option of SkyRL.
    """
    SKYRL.patch(_checked(backend))


def patched_skyrl(backend: str) -> AbstractContextManager[None]:
    """`patch_skyrl(backend)` for the length of a `with` block."""
    return SKYRL.within(_checked(backend))


unpatch_skyrl = SKYRL.unpatch
is_patched = SKYRL.is_patched


def _checked(backend: str) -> str:
    if backend not in MODULES:
        raise ValueError(f"backend must be one of {list(MODULES)}, got {backend!r}")
    return backend
