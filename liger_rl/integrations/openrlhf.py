"""OpenRLHF's Actor on this package's head: docs/openrlhf.md."""

from typing import Any

from torch import Tensor

from liger_rl.integrations.patching import Framework, Patch

__all__ = ["is_patched", "patch_openrlhf", "patched_openrlhf", "unpatch_openrlhf"]


def _forward(
    self: Any,
    sequences: Tensor,
    action_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    return_output: bool = False,
    allgather_logits: bool = False,
    return_logprobs: bool = False,
    ring_attn_group: Any = None,
    packed_seq_lens: list[int] | None = None,
    return_entropy: bool = False,
    **mm_inputs: Any,
) -> Any:
    """`Actor.forward` by a fused call of the model. A call for logits stays OpenRLHF's.

    sequences (B, T), action_mask (B, A) of the last A tokens -> (B, A) log-probabilities, 0 where the mask is 0;
    without an action_mask (B, T - 1). return_output adds the model's output, whose `entropy` is (B, T - 1).
    """
    original = OPENRLHF.original("Actor.forward")
    if (action_mask is None and not return_logprobs) or getattr(self, "is_vlm", False):
        return original(
            self, sequences, action_mask, attention_mask, return_output, allgather_logits, return_logprobs,
            ring_attn_group, packed_seq_lens, return_entropy, **mm_inputs,
        )  # fmt: skip
    _swap(self)
    framework = original.__globals__
    if self.packing_samples:
        ids, positions, labels, padding, indices = framework["unpad_and_slice_tensor"](
            sequences, attention_mask, ring_attn_group
        )
        mask = None
    else:
        if attention_mask is None:
            raise ValueError("attention_mask must be given where samples are not packed")
        ids, mask = sequences, attention_mask
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask.logical_not(), 1)
        labels = sequences.roll(-1, 1)
        if action_mask is not None:  # the only tokens whose values are used
            counted = action_mask.new_zeros(sequences.shape)
            counted[:, -action_mask.shape[1] - 1 : -1] = action_mask
            labels = labels.masked_fill(counted == 0, -100)
    output = self.model(
        ids,
        attention_mask=mask,
        position_ids=positions,
        fused=True,
        shift_labels=labels,
        temperature=self.temperature,
        entropy=return_entropy,
        **mm_inputs,
    )

    def of_sequences(values: Tensor) -> Tensor:
        if self.packing_samples:
            values = framework["gather_and_pad_tensor"](values, ring_attn_group, padding, indices, *sequences.shape)
        return values[:, :-1]

    logps = of_sequences(output.per_token_logps)
    if action_mask is not None:
        logps = logps[:, -action_mask.shape[1] :] * action_mask.float()
    if return_entropy:
        output.entropy = of_sequences(output.entropy)
    return (logps, output) if return_output else logps


def _swap(actor: Any) -> None:
    from liger_rl.integrations.transformers import swap_lm_head, swapped_inside

    if swapped_inside(actor.model) is not None:
        return
    model = getattr(actor.model, "module", actor.model)  # in DeepSpeed's engine
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):  # DeepSpeed's mark of ZeRO-3
        raise ValueError("the actor must not be partitioned by ZeRO-3, which is not served; call unpatch_openrlhf()")
    swap_lm_head(model)


OPENRLHF = Framework(
    "openrlhf",
    (0, 11),
    (0, 12),
    Patch("openrlhf.models.actor:Actor.forward", _forward),
    gain="no logits, and no work for prompts and padding in PPO",
    distributions=("openrlhf",),
)


def patch_openrlhf() -> None:
    """OpenRLHF's `Actor` makes log-probabilities and entropies without logits: for PPO and the like, SFT and DPO.

    A model gets its fused head (`swap_lm_head`) at its first call under the patch, and keeps it. That call raises
    ValueError for a head that `swap_lm_head` does not reproduce, and under ZeRO-3. See docs/openrlhf.md.
    """
    OPENRLHF.patch()


unpatch_openrlhf = OPENRLHF.unpatch
patched_openrlhf = OPENRLHF.within
is_patched = OPENRLHF.is_patched
