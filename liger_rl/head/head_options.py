"""The options of a call of the head: as users give them, and as engines take them."""

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from liger_rl.head import checks
from liger_rl.head.rules import NOT_TOGETHER, check_left_alone
from liger_rl.kernels.transform import LogitTransform

IDENTITY = LogitTransform()
Gather = Callable[..., AbstractContextManager]
Tolerance = float | Literal["auto"]
AUTO_TOLERANCE = checks.auto_tolerance(os.environ.get("LIGER_RL_GRAD_TOLERANCE"))


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """How a head's log-probabilities are computed, and which results come with them.

    Attributes:
        transform: temperature, softcap and scale of the logits.
        entropy: also return each token's entropy, from the same pass.
        lse: also return log sum_v exp z_v of each token, differentiable.
        topk: K, at most 1024: also return each token's K largest log-probabilities and their ids, in descending order,
            differentiable. docs/targets.md says when tiles of logits are in memory.
        extras: names of further results, fields of `LogProbs`: "mean_logits", which is differentiable, and
            "log_sum_sq_probs" and "is_top1", which are not.
        grad_tolerance: in [0, 1), largest error of each token's dL/dlogits divided by the Euclidean norm of the token's
            own dL/dlogits. The backward sums over a list of ids for each token. It runs exactly where lists would be
            long, and with a gradient of mean_logits. 0 is exact. "auto" is 3e-4 for 16-bit products, and 0 with every
            option that excludes a tolerance. LIGER_RL_GRAD_TOLERANCE, read at import, replaces the 3e-4.
            docs/choosing.md says where a tolerance has an effect.
        compute_dtype: dtype of the products' factors, even under autocast. None: autocast's dtype, or the inputs' own.
        gather: for DeepSpeed ZeRO-3. `gather(weight)` or `gather(weight, bias)` returns a context in which both are
            whole. It is entered once in the forward and once in the backward.
        chunk_tokens, chunk_vocab: upper bounds of a tile's sides; None chooses them.

    Raises:
        TypeError, ValueError: a bad value of an option, or two options that exclude each other.
    """

    transform: LogitTransform = field(
        default=IDENTITY, metadata={"check": lambda _, value: checks.check_transform(value)}
    )
    entropy: bool = field(default=False, metadata={"check": checks.check_flag})
    lse: bool = field(default=False, metadata={"check": checks.check_flag})
    topk: int | None = field(default=None, metadata={"check": checks.check_chunk})
    extras: Collection[str] = field(default=(), metadata={"check": checks.check_extras})
    grad_tolerance: Tolerance = field(default="auto", metadata={"check": checks.check_tolerance})
    compute_dtype: torch.dtype | None = field(default=None, metadata={"check": checks.check_compute_dtype})
    gather: Gather | None = field(default=None, metadata={"check": checks.check_gather})
    chunk_tokens: int | None = field(default=None, metadata={"check": checks.check_chunk})
    chunk_vocab: int | None = field(default=None, metadata={"check": checks.check_chunk})

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            check(name, getattr(self, name))
        for name in EXCLUDING:
            if getattr(self, name):
                check_left_alone(self, f"with {name}")

    @property
    def names_chunk(self) -> bool:
        return self.chunk_tokens is not None or self.chunk_vocab is not None


# check(name, value) raises for a bad value.
CHECKS: dict[str, Callable[[str, Any], object]] = {f.name: f.metadata["check"] for f in fields(HeadOptions)}
KNOWN = tuple(CHECKS)
EXCLUDING = tuple(name for name in KNOWN if f"with {name}" in NOT_TOGETHER)
# Options that change how a result is computed, not which result. Frameworks pass them on.
HOW = ("grad_tolerance", "chunk_tokens", "chunk_vocab")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(HeadOptions):
    """`HeadOptions` as engines take them: the tolerance is a number, the compute dtype is known."""

    grad_tolerance: float
    compute_dtype: torch.dtype

    def __post_init__(self) -> None:
        """Checks nothing: the `HeadOptions` that this is made from have been checked."""


def resolved(options: HeadOptions, compute_dtype: torch.dtype, *, grad_tolerance: float | None = None) -> EngineOptions:
    """`options` for an engine: with this compute dtype, and this tolerance.

    Without `grad_tolerance`, "auto" becomes AUTO_TOLERANCE if the options allow a tolerance, and 0 otherwise.
    """
    tolerance = options.grad_tolerance if grad_tolerance is None else grad_tolerance
    if tolerance == "auto":
        exact = options.lse or options.topk is not None
        tolerance = 0.0 if exact or options.names_chunk or compute_dtype.itemsize != 2 else AUTO_TOLERANCE
    resolutions = {"grad_tolerance": tolerance, "compute_dtype": compute_dtype}
    return EngineOptions(**{**{name: getattr(options, name) for name in KNOWN}, **resolutions})
