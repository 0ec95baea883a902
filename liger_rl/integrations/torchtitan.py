"""torchtitan's chunked loss on this package's head.

from liger_rl.integrations.torchtitan import patch_torchtitan

patch_torchtitan()  # before the trainer is built
"""

import importlib
import threading
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from liger_rl.integrations.patching import (
    GlobalPatch,
    MethodPatch,
    all_within,
    apply_all,
    check_parameters,
    check_version,
    class_with,
    installed_version,
    undo_all,
)
from liger_rl.logprobs import LogProbs, linear_logprobs

__all__ = ["patch_torchtitan", "patched_torchtitan", "unpatch_torchtitan"]

LOWEST, BELOW = (0, 3), (0, 4)
LOSSES = "torchtitan.components.loss"
# The losses of logits that ask for log-probabilities by the functions that are replaced, and for nothing else.
SERVED = ("CrossEntropyLoss", "DAPOLoss", "GRPOLoss")

# The lm_head of the chunked loss that this thread is in.
_thread = threading.local()


def _head() -> Any:
    return getattr(_thread, "head", None)


def _check(loss: Any, head: nn.Module) -> None:
    """ValueError for what `loss` would not compute with the fused head as it does without."""
    name = type(head).__name__
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        raise ValueError(
            f"the lm_head of ChunkedLossWrapper must have nn.Linear's forward, found a {name} with its own, "
            "as torchtitan gives it for tensor parallelism; call unpatch_torchtitan()"
        )
    inner = type(loss.loss_fn).__name__
    if inner not in SERVED:
        raise ValueError(
            f"the loss_fn of ChunkedLossWrapper must be one of {', '.join(SERVED)}, found {inner}; "
            "call unpatch_torchtitan()"
        )


def _set_lm_head(self: Any, lm_head: nn.Module) -> None:
    _check(self, lm_head)
    _SET.original(self, lm_head)


def _chunked(
    self: Any, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
) -> Any:
    """In one chunk, in which the head hands its hidden states on, to the two functions that know its weight."""
    head = self.lm_head
    if head is None:
        return _CALL.original(self, pred, labels, global_valid_tokens, **loss_inputs)
    _check(self, head)
    outer, chunks = _head(), self.num_chunks
    # A copy, because FSDP warns of a module that gives back a view.
    _thread.head, head.forward, self.num_chunks = head, Tensor.clone, 1
    try:
        return _CALL.original(self, pred, labels, global_valid_tokens, **loss_inputs)
    finally:
        _thread.head, self.num_chunks = outer, chunks
        del head.forward


def _found(head: Any, hidden: Tensor, labels: Tensor, *, entropy: bool) -> LogProbs:
    return linear_logprobs(hidden, head.weight, labels, bias=head.bias, entropy=entropy)


def _cross_entropy(
    self: Any, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    head = _head()
    if head is None:
        return _CROSS_ENTROPY.original(self, pred, labels, global_valid_tokens, **kwargs)
    loss = -_found(head, pred, labels, entropy=False).logps.sum()
    return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


def compute_logprobs(logits: Tensor, labels: Tensor, *, return_entropy: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """In place of torchtitan's: in a chunked loss `logits` are the hidden states (B, L, H). The entropy is detached."""
    head = _head()
    if head is None:
        return _LOGPROBS.original(logits, labels, return_entropy=return_entropy)
    found = _found(head, logits, labels, entropy=return_entropy)
    return found.logps if found.entropy is None else (found.logps, found.entropy.detach())


def _home() -> Any:
    check_version("torchtitan", installed_version("torchtitan"), LOWEST, BELOW)
    return importlib.import_module(LOSSES)


def _find(name: str, method: str, *parameters: str) -> Any:
    return class_with(_home(), name, method, ("self", *parameters))


def _find_logprobs() -> Any:
    found = getattr(_home(), "compute_logprobs", None)
    check_parameters(f"{LOSSES}.compute_logprobs", found, ("logits", "labels", "return_entropy"))
    return found


def _find_call() -> Any:
    return _find("ChunkedLossWrapper", "__call__", "pred", "labels", "global_valid_tokens", "loss_inputs")


def _find_cross_entropy() -> Any:
    return _find("CrossEntropyLoss", "__call__", "pred", "labels", "global_valid_tokens", "kwargs")


_SET = MethodPatch(_set_lm_head, lambda: _find("ChunkedLossWrapper", "set_lm_head", "lm_head"), "set_lm_head")
_CALL = MethodPatch(_chunked, _find_call, "__call__")
_CROSS_ENTROPY = MethodPatch(_cross_entropy, _find_cross_entropy, "__call__")
_LOGPROBS = GlobalPatch(compute_logprobs, _find_logprobs, modules=("torchtitan",))
_PATCHES = (_SET, _CALL, _CROSS_ENTROPY, _LOGPROBS)


def patch_torchtitan() -> None:
    """Let torchtitan's `ChunkedLossWrapper` compute its log-probabilities from hidden states, without logits.

    It then takes all tokens at once, whatever num_chunks is: tiles are sized from a memory budget. Served are the inner
    losses CrossEntropyLoss, DAPOLoss and GRPOLoss on one rank or under FSDP2. Patching twice is harmless.

    Raises:
        ImportError: torchtitan is not installed, or not of a supported version, which is named.
        RuntimeError: torchtitan's loss is not what its version is known to have.

    In each case nothing is changed. With the patch, `set_lm_head` and the loss raise ValueError for an inner loss that
    is not served, for a head with a forward of its own, and for a head under tensor parallelism.
    """
    apply_all(*_PATCHES)


def unpatch_torchtitan() -> None:
    """Undo `patch_torchtitan`; harmless where nothing is patched."""
    undo_all(*_PATCHES)


def patched_torchtitan() -> AbstractContextManager[None]:
    """`patch_torchtitan` for the length of a `with` block."""
    return all_within(*_PATCHES)
