"""torchtitan's chunked loss on this package's head: docs/torchtitan.md."""

import threading
from typing import Any

from torch import Tensor, nn

from liger_rl.integrations.patching import Framework, Patch
from liger_rl.logprobs import LogProbs, linear_logprobs

__all__ = ["is_patched", "patch_torchtitan", "patched_torchtitan", "unpatch_torchtitan"]

# The losses of logits that ask for log-probabilities by the functions that are replaced, and for nothing else.
SERVED = ("CrossEntropyLoss", "DAPOLoss", "GRPOLoss")

# The lm_head of the chunked loss that this thread is in.
_thread = threading.local()


def _head() -> Any:
    return getattr(_thread, "head", None)


def _check(loss: Any, head: nn.Module) -> None:
    """ValueError for what `loss` would not compute with the fused head as it does without."""
    layer, inner = type(head).__name__, type(loss.loss_fn).__name__
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        reason = f"lm_head must have nn.Linear's forward, found a {layer} with its own, as for tensor parallelism"
    elif inner not in SERVED:
        reason = f"loss_fn must be one of {', '.join(SERVED)}, found {inner}"
    else:
        return
    raise ValueError(f"ChunkedLossWrapper's {reason}; call unpatch_torchtitan()")


def _set_lm_head(self: Any, lm_head: nn.Module) -> None:
    _check(self, lm_head)
    TORCHTITAN.original("ChunkedLossWrapper.set_lm_head")(self, lm_head)


def _chunked(
    self: Any, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
) -> Any:
    """In one chunk, in which the head hands its hidden states on, to the two functions that know its weight."""
    original, head = TORCHTITAN.original("ChunkedLossWrapper.__call__"), self.lm_head
    if head is None:
        return original(self, pred, labels, global_valid_tokens, **loss_inputs)
    _check(self, head)
    outer, chunks = _head(), self.num_chunks
    # A copy, because FSDP warns of a module that gives back a view.
    _thread.head, head.forward, self.num_chunks = head, Tensor.clone, 1
    try:
        return original(self, pred, labels, global_valid_tokens, **loss_inputs)
    finally:
        _thread.head, self.num_chunks = outer, chunks
        del head.forward


def _log_probs(head: Any, hidden: Tensor, labels: Tensor, *, entropy: bool) -> LogProbs:
    return linear_logprobs(hidden, head.weight, labels, bias=head.bias, entropy=entropy)


def _cross_entropy(
    self: Any, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    head = _head()
    if head is None:
        return TORCHTITAN.original("CrossEntropyLoss.__call__")(self, pred, labels, global_valid_tokens, **kwargs)
    loss = -_log_probs(head, pred, labels, entropy=False).logps.sum()
    return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


def compute_logprobs(logits: Tensor, labels: Tensor, *, return_entropy: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """torchtitan's; in a chunked loss `logits` are the hidden states (B, L, H). The entropy is detached."""
    head = _head()
    if head is None:
        return TORCHTITAN.original("compute_logprobs")(logits, labels, return_entropy=return_entropy)
    result = _log_probs(head, logits, labels, entropy=return_entropy)
    return result.logps if result.entropy is None else (result.logps, result.entropy.detach())


LOSSES = "torchtitan.components.loss"
TORCHTITAN = Framework(
    "torchtitan",
    (0, 3),
    (0, 4),
    Patch(f"{LOSSES}:ChunkedLossWrapper.set_lm_head", _set_lm_head),
    Patch(f"{LOSSES}:ChunkedLossWrapper.__call__", _chunked),
    Patch(f"{LOSSES}:CrossEntropyLoss.__call__", _cross_entropy),
    Patch(f"{LOSSES}:compute_logprobs", compute_logprobs),
    gain="float32 log-probabilities without logits",
    distributions=("torchtitan",),
)


def patch_torchtitan() -> None:
    """torchtitan's `ChunkedLossWrapper` computes log-probabilities from hidden states, without logits.

    The wrapper then takes all tokens at once, whatever num_chunks is. It serves the inner losses CrossEntropyLoss,
    DAPOLoss and GRPOLoss, on one rank or under FSDP2. See docs/torchtitan.md.
    """
    TORCHTITAN.patch()


unpatch_torchtitan = TORCHTITAN.unpatch
patched_torchtitan = TORCHTITAN.within
is_patched = TORCHTITAN.is_patched
