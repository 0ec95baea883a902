"""TRL's trainers on this package's head, by one call.

    from liger_rl.integrations.trl import patch_trl

    patch_trl()  # then GRPOTrainer, RLOOTrainer, DPOTrainer, KTOTrainer, SFTTrainer, DistillationTrainer as ever

TRL computes metrics itself, and every loss but DistillationTrainer's. Three things are replaced: the op for
log-probabilities, entropies and statistics; the trainers' refusal of LoRA adapters on the lm_head (`trl_adapters`); and
DistillationTrainer's loss with its op (`trl_divergence`).
"""

import importlib
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_rl.head.checks import check_floating
from liger_rl.head.options import Tolerance
from liger_rl.integrations import trl_adapters, trl_divergence
from liger_rl.integrations.patching import LOCK, GlobalPatch, apply_all, check_parameters, check_version
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import linear_logprobs

__all__ = ["patch_trl", "patched_trl", "unpatch_trl"]

OLDER = (
    ": upgrade TRL; or, with TRL 1.10 to 1.12 and use_liger_kernel=True, call "
    "liger_rl.integrations.liger.patch_liger() before the trainer is built"
)
UTILS, NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
OUTPUTS = ("log_probs", "entropy", *EXTRAS)
# TRL passes them by position, in this order.
PARAMETERS = (
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
)


@dataclass(frozen=True, kw_only=True)
class Version:
    """What a minor version of TRL has beside what all of them have."""

    op: tuple[str, ...]  # the parameters of its op
    divergence: bool  # whether it has the op of `trl_divergence`


# Every minor version that is supported, without a gap. A new one is a new row, once its trainers pass the tests.
VERSIONS = {
    (1, 15): Version(op=PARAMETERS, divergence=False),
    (1, 16): Version(op=PARAMETERS, divergence=True),
}


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """Options of `linear_logprobs` that TRL knows nothing of."""

    grad_tolerance: Tolerance = "auto"
    chunk_tokens: int | None = None
    chunk_vocab: int | None = None


@dataclass
class FusedLogProbs:
    """In place of `trl.trainer.utils._ChunkedLogProbFunction`. Trainers call its `apply`."""

    options: CoreOptions

    def apply(
        self,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: Collection[str] = OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """-> (log-probabilities, entropy, log sum p^2, mean logit, top-1), None where not among `outputs`.

        Each (N,) float32, top-1 bool; gradients through the first two. `chunk_size` is the width of TRL's tiles, a
        constant of TRL's; it changes nothing here, where a tile fits the workspace or the patch's chunk_vocab.

        Raises:
            ValueError: a name in `outputs` that is not in `OUTPUTS`; and as `linear_logprobs`.
        """
        unknown = sorted(set(outputs) - set(OUTPUTS))
        if unknown:
            raise ValueError(f"outputs must be among {list(OUTPUTS)}, got {unknown}")
        check_floating("hidden", hidden)
        # Outside autocast TRL computes in the dtype of the hidden states, which its float32-head mode makes float32.
        under_autocast = torch.is_autocast_enabled(hidden.device.type)
        head = trl_adapters.adapted_head()
        found = linear_logprobs(
            hidden,
            weight,
            targets,
            bias=bias if head is None else head.bias(),
            low_rank=() if head is None else head.low_rank(hidden),
            transform=LogitTransform(temperature=temperature, softcap=final_logit_softcapping, scale=logit_scale),
            entropy="entropy" in outputs,
            extras=[name for name in EXTRAS if name in outputs],
            compute_dtype=None if under_autocast else hidden.dtype,
            gather=_gather,
            **vars(self.options),
        )
        return found[: len(OUTPUTS)]


def _gather(*parameters: Tensor) -> AbstractContextManager:
    """The head whole under ZeRO-3. TRL gathers it around the forward already, and then this does nothing."""
    return importlib.import_module(UTILS).maybe_gather_lm_head_ctx(*parameters)


def _installed() -> Version:
    try:
        version = importlib.import_module("trl").__version__
    except ImportError as error:
        raise ImportError(f"patch_trl needs trl: {error}; nothing was patched") from error
    lowest, (major, minor) = min(VERSIONS), max(VERSIONS)
    return VERSIONS[check_version("trl", version, lowest, (major, minor + 1), older=OLDER)]


def _find_op() -> Any:
    """-> TRL's op; RuntimeError where it is not what this version of TRL is known to have."""
    original = vars(importlib.import_module(UTILS)).get(NAME)
    if original is None:
        raise RuntimeError(f"{UTILS} has no {NAME} here (TRL 1.15 needs Triton for it); nothing was patched")
    check_parameters(f"{UTILS}.{NAME}", original.forward, ("ctx", *_installed().op))
    return original


_op = FusedLogProbs(CoreOptions())
_OP_PATCH = GlobalPatch(_op, _find_op, modules=("trl",))
_ALL = (_OP_PATCH, *trl_adapters.PATCHES, *trl_divergence.PATCHES)


def patch_trl(
    *, grad_tolerance: Tolerance = "auto", chunk_tokens: int | None = None, chunk_vocab: int | None = None
) -> None:
    """Put this package's head behind TRL's trainers, whether they exist already or are built later.

    The trainers then take LoRA adapters on the lm_head too. Patching again only changes the options. Code outside of
    TRL that has imported one of the names keeps what it has imported.

    Args:
        grad_tolerance, chunk_tokens, chunk_vocab: as in `linear_logprobs`. The gradient of a divergence is exact.

    Raises:
        ImportError: TRL is not installed, or not of a supported version: 1.15, 1.16.
        RuntimeError: TRL does not have what its version says.
        TypeError, ValueError: an option that `linear_logprobs` does not take.

    In each case nothing has been changed.
    """
    options = CoreOptions(grad_tolerance=grad_tolerance, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)
    _installed()
    # On no token at all, so that what the options are refused for is known before a run has begun.
    linear_logprobs(torch.zeros(0, 1), torch.zeros(1, 1), torch.zeros(0, dtype=torch.int64), **vars(options))
    _apply(options)


def unpatch_trl() -> None:
    """Put TRL's own back; harmless where nothing is patched."""
    with LOCK:
        for patch in _ALL:
            patch.undo()


@contextmanager
def patched_trl(**options: Any) -> Iterator[None]:
    """`patch_trl(**options)` inside the block, and afterwards whatever was there before."""
    with LOCK:
        before = _op.options if _OP_PATCH.applied else None
        patch_trl(**options)
    try:
        yield
    finally:
        if before is None:
            unpatch_trl()
        else:
            _apply(before)


def _apply(options: CoreOptions) -> None:
    with LOCK:
        before, _op.options = _op.options, options
        try:
            divergence = trl_divergence.patches() if _installed().divergence else ()
            apply_all(_OP_PATCH, *trl_adapters.patches(), *divergence)
        except BaseException:
            _op.options = before
            raise
        trl_divergence.op.chunk_tokens, trl_divergence.op.chunk_vocab = options.chunk_tokens, options.chunk_vocab
