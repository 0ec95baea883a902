"""The options of a call of the head, checked where they are stored."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from liger_rl.head import checks
from liger_rl.kernels.transform import LogitTransform

IDENTITY = LogitTransform()
Gather = Callable[..., AbstractContextManager]
MOST_IDS = 1024  # of a token: a kernel program holds all of a token's ids and compares each pair


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """How a head's log-probabilities are computed, and which results come with them.

    Attributes:
        transform: temperature, softcap and scale of the logits.
        entropy: also return each token's entropy, from the same pass.
        lse: also return log sum_v exp z_v of each token, differentiable.
        extras: names of further results, fields of `LogProbs`: "mean_logits", which is differentiable, and
            "log_sum_sq_probs" and "is_top1", which are not.
        compute_dtype: dtype of the products' factors, even under autocast. None: autocast's dtype, or the inputs' own.
        gather: for DeepSpeed ZeRO-3. `gather(weight)` or `gather(weight, bias)` returns a context in which both are
            whole. It is entered once in the forward and once in the backward.
        chunk_tokens, chunk_vocab: upper bounds of a tile's sides; None chooses them.

    Raises:
        TypeError, ValueError: a bad value of an option.
    """

    transform: LogitTransform = IDENTITY
    entropy: bool = False
    lse: bool = False
    extras: Collection[str] = ()
    compute_dtype: torch.dtype | None = None
    gather: Gather | None = None
    chunk_tokens: int | None = None
    chunk_vocab: int | None = None
    names_chunk: bool = field(init=False, repr=False, compare=False)  # whether chunk_tokens or chunk_vocab is set

    def __post_init__(self) -> None:
        for name, (default, check) in CHECKS.items():
            value = getattr(self, name)
            if value is not default:
                check(name, value)
        object.__setattr__(self, "names_chunk", self.chunk_tokens is not None or self.chunk_vocab is not None)


# Option -> its default, and check(name, value), which raises for a bad value.
CHECKS: dict[str, tuple[Any, Callable[[str, Any], object]]] = {
    "transform": (IDENTITY, lambda _, value: checks.check_transform(value)),
    "entropy": (False, checks.check_flag),
    "lse": (False, checks.check_flag),
    "extras": ((), checks.check_extras),
    "compute_dtype": (None, checks.check_compute_dtype),
    "gather": (None, checks.check_gather),
    "chunk_tokens": (None, checks.check_optional_count),
    "chunk_vocab": (None, checks.check_optional_count),
}
# Options that change how a result is computed, not which result. Frameworks pass them on.
COMPUTE_OPTIONS = ("chunk_tokens", "chunk_vocab")
