"""Which tokens count: those with a mask of 1 and a target in [0, V). Values of these tokens and of all N tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from liger_rl.head.host_answer import HostAnswer
from liger_rl.kernels import for_device

# In what follows `live` is the index (n,) int64 of the tokens that count; None if all N do.


def scatter_rows(values: Tensor, live: Tensor | None, shape: torch.Size) -> Tensor:
    """(n, ...) -> (*shape, ...) with `shape` that of all N tokens; 0 at tokens that do not count. Differentiable."""
    trailing = values.shape[1:]
    if live is not None:
        values = values.new_zeros(shape.numel(), *trailing).index_copy(0, live, values)
    return values.view(*shape, *trailing)


def select_live(live: Tensor | None, selected: Tensor) -> Tensor:
    """The live tokens at the places `selected` (m,) of (n, ...) tensors."""
    return selected if live is None else live[selected]


def index_of(selected: Tensor) -> Tensor | None:
    """Index of the tokens where `selected` (n,) is true; None if it is true everywhere. It takes one host sync."""
    index = selected.nonzero().squeeze(1)
    return None if index.numel() == selected.numel() else index


def find_counted(targets: Tensor, mask: Tensor | None, needed: Tensor | None = None) -> Tensor:
    """bool, shaped like targets: the mask is nonzero, the target >= 0, and `needed` nonzero, if it is given.

    Ids >= V are not looked for here.
    """
    counted = targets >= 0
    for column in (mask, needed):
        counted = counted if column is None else torch.logical_and(counted, column)
    return counted


def start_selection(
    targets: Tensor,  # (B, T) or (N,)
    mask: Tensor | None,  # shaped like targets
    vocab: int,
    source: str = "weight",
    *,
    needed: Tensor | None = None,  # shaped like targets or (B, 1)
    targets_name: str = "targets",  # the caller's name for the targets, for messages
) -> Callable[[], Tensor | None]:
    """-> a function that returns `live` of the tokens that count and are `needed`.

    The device starts counting here. Calling the result is the forward's one host sync. The host's work in between is
    free. The result raises ValueError if an unmasked target is >= vocab, even at a token that is not needed, or if the
    mask has a value other than 0 and 1.
    """
    positions, numbers = for_device(targets.device).select_tokens(targets, mask, vocab, needed)
    total, answer = targets.numel(), HostAnswer(numbers)

    def wait() -> Tensor | None:
        n, outside, largest, improper = answer.wait()
        if improper > 0:
            raise ValueError(f"mask must be 0 or 1 at each token; {improper} of its values are neither")
        if outside > 0:
            raise ValueError(
                f"{targets_name} must be token ids in [0, {vocab}) from {source}, or negative, or masked; "
                f"{outside} of them are not, the largest is {largest}"
            )
        return None if n == total else positions[:n]

    return wait
