"""prime-rl's fused lm_head on this package's, by its own signature: docs/prime_rl.md."""

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from liger_rl.call.support import Support
from liger_rl.integrations.patching import Framework, Patch
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import linear_logprobs

__all__ = ["fused_output", "is_patched", "patch_prime_rl", "patched_prime_rl", "unpatch_prime_rl"]

LAYERS = "prime_rl.trainer.models.layers"


def fused_output(
    head: Any,  # its weight (V, H) is used, and its softcap if it has one
    hidden_states: Tensor,  # (B, T, H)
    labels: Tensor,  # (B, T) ids; a negative one masks its token, to 0 in both outputs
    temperature: Tensor,  # (B, T), > 0
    sampling_mask: Tensor | None = None,  # (B, T, K) ids that each label was drawn from, filled up with -1
) -> dict[str, Tensor]:
    """What prime-rl's `FusedOutputLinear.forward` and `GemmaFusedOutputLinear.forward` return.

    Position t predicts labels[:, t]. The head's chunk_size has no effect. Equal temperatures are taken as one number;
    the host waits to know that they are. A row of sampling_mask without its label counts as the whole vocabulary, as in
    prime-rl.

    Returns:
        "logprobs" and "entropy", (B, T) float32 in nats, differentiable, both over the ids of sampling_mask. prime-rl's
            entropy is of the whole vocabulary, and has no gradient.
    """
    tokens = labels.numel()
    labels = labels.reshape(tokens)
    support = None
    if sampling_mask is not None:
        rows = sampling_mask.reshape(tokens, sampling_mask.shape[-1])
        support = Support.from_padded(rows.masked_fill((rows != labels[:, None]).all(-1, keepdim=True), -1))
    result = linear_logprobs(
        hidden_states.reshape(tokens, hidden_states.shape[-1]),
        head.weight,
        labels,
        transform=LogitTransform(temperature=_as_number(temperature), softcap=getattr(head, "softcap", None)),
        entropy=True,
        support=support,
    )
    assert result.entropy is not None
    shape = hidden_states.shape[:-1]
    return {"logprobs": result.logps.view(shape), "entropy": result.entropy.view(shape)}


def _as_number(temperature: Tensor) -> float | Tensor:
    """One for all tokens goes with every engine of the head, one for each with few."""
    if temperature.numel():
        lowest, highest = torch.stack(temperature.aminmax()).tolist()
        if lowest == highest:
            return lowest
    return temperature.reshape(-1)


def _forward_of(name: str) -> Callable[..., Any]:
    """In place of the forward of prime-rl's head of that name."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: Tensor | None = None,
        sampling_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if labels is None or temperature is None or getattr(self, "return_mask_logprobs", False):
            # A call for something else than log-probabilities and entropies, or one that prime-rl refuses.
            replay = {} if sampling_mask is None else {"sampling_mask": sampling_mask}
            return PRIME_RL.original(f"{name}.forward")(self, hidden_states, labels, temperature, **replay)
        return fused_output(self, hidden_states, labels, temperature, sampling_mask)

    return forward


def _has_gemma_head() -> bool:
    with suppress(ModuleNotFoundError):
        importlib.import_module(f"{LAYERS}.lm_head_gemma")
        return True
    return False


def _row(module: str, name: str, needed: Callable[[], bool] = lambda: True) -> Patch:
    # prime-rl's heads have sampling_mask since prime-rl#3431.
    parameters = "self hidden_states labels temperature sampling_mask?"
    return Patch(f"{LAYERS}.{module}:{name}.forward", _forward_of(name), parameters, needed=needed)


PRIME_RL = Framework(
    "prime-rl",
    (0, 8),
    (0, 10),
    _row("lm_head", "FusedOutputLinear"),
    _row("lm_head_gemma", "GemmaFusedOutputLinear", _has_gemma_head),
    gain="float32 logits, products over a sampling mask's ids alone, a gradient of the entropy",
    distributions=("prime-rl",),
)


def patch_prime_rl() -> None:
    """prime-rl's chunked heads compute with `fused_output`: of models that exist already and of later ones.

    prime-rl has these heads unless fused_lm_head_token_chunk_size is "disabled", for RL and for SFT. Calls without a
    temperature or with return_mask_logprobs stay prime-rl's. See docs/prime_rl.md.
    """
    PRIME_RL.patch()


unpatch_prime_rl = PRIME_RL.unpatch
patched_prime_rl = PRIME_RL.within
is_patched = PRIME_RL.is_patched
