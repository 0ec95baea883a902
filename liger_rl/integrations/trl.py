"""TRL's trainers on this package's head, by one call before they train.

    from liger_rl.integrations.trl import patch_trl

    patch_trl()  # then GRPOTrainer, RLOOTrainer, DPOTrainer, KTOTrainer, SFTTrainer as ever

What is replaced, and what the trainers then get from here, depends on TRL's version:

    1.15, 1.16  the op behind `fused_lm_head=True`, of every trainer: log-probabilities, entropies and statistics, and
                the refusal of LoRA adapters on the lm_head (`trl_adapters`)
    1.14        the same op without the statistics, of GRPO, DPO and KTO with `use_liger_kernel=True`
    1.13        FusedLinearGRPOLoss, of GRPO with `use_liger_kernel=True`
    1.10-1.12   LigerFusedLinearGRPOLoss, of the same
"""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from liger_rl.integrations import trl_adapters
from liger_rl.integrations.patching import GlobalPatch, check_version
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.kernels.transform import LogitTransform
from liger_rl.logprobs import LogProbs, linear_logprobs

LOWEST, BELOW = (1, 10), (1, 17)
UTILS, GRPO_TRAINER = "trl.trainer.utils", "trl.trainer.grpo_trainer"


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """Options of `linear_logprobs` that TRL knows nothing of."""

    grad_tolerance: float = 0.0
    chunk_tokens: int | None = None
    chunk_vocab: int | None = None


@dataclass(frozen=True)
class FiveOutputs:
    """In place of `trl.trainer.utils._ChunkedLogProbFunction` of TRL 1.15 and 1.16, of which trainers call `apply`."""

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
        outputs: Collection[str] = ("entropy", *EXTRAS),
    ) -> LogProbs:
        """-> (log-probabilities, entropy, log sum p^2, mean logit, top-1), None where not among `outputs`.

        Each (N,) float32, top-1 bool; gradients through the first two. `chunk_size` is the width of TRL's tiles, a
        constant of TRL's; it changes nothing here, where a tile fits the workspace or the patch's chunk_vocab.
        """
        transform = LogitTransform(temperature=temperature, softcap=final_logit_softcapping, scale=logit_scale)
        extras = [name for name in EXTRAS if name in outputs]
        return _log_probs(
            hidden, weight, bias, targets, transform, self.options, entropy="entropy" in outputs, extras=extras
        )


@dataclass(frozen=True)
class TwoOutputs:
    """In place of TRL 1.14's `_ChunkedLogProbFunction`."""

    options: CoreOptions

    def apply(
        self,
        last_hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """-> (log-probabilities, entropy), as in `FiveOutputs.apply`."""
        transform = LogitTransform(temperature=temperature, softcap=final_logit_softcapping, scale=logit_scale)
        found = _log_probs(last_hidden, weight, bias, targets, transform, self.options, entropy=True)
        assert found.entropy is not None
        return found.logps, found.entropy


def _log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    options: CoreOptions,
    *,
    entropy: bool,
    extras: Collection[str] = (),
) -> LogProbs:
    # Outside autocast TRL computes in the dtype of the hidden states, which its float32-head mode makes float32.
    under_autocast = torch.is_autocast_enabled(hidden.device.type)
    head = trl_adapters.adapted_head()
    return linear_logprobs(
        hidden,
        weight,
        targets,
        bias=bias if head is None else head.bias(),
        low_rank=() if head is None else head.low_rank(hidden),
        transform=transform,
        entropy=entropy,
        extras=extras,
        compute_dtype=None if under_autocast else hidden.dtype,
        gather=_gather,
        **vars(options),
    )


def _gather(*parameters: Tensor) -> AbstractContextManager:
    """The head whole under ZeRO-3. TRL gathers it around the forward already, and then this does nothing."""
    return importlib.import_module(UTILS).maybe_gather_lm_head_ctx(*parameters)


def _loss_class(options: CoreOptions) -> type:
    """Liger's loss on our head, with the constructor and the call of TRL 1.10 to 1.13."""
    from liger_rl.integrations.liger import LigerFusedLinearGRPOLoss

    chosen = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    if chosen:
        raise ValueError(f"{', '.join(chosen)}: no option of the loss that trl < 1.14 has replaced")
    return LigerFusedLinearGRPOLoss


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a range of TRL versions calls by what name, and what takes its place."""

    lowest: tuple[int, int]
    module: str
    name: str
    method: str  # of the original, whose signature is checked
    parameters: tuple[str, ...]
    positional: bool  # TRL passes exactly these, in this order; otherwise at least these, by name
    replacement: Callable[[CoreOptions], Any]
    beside: Callable[[], tuple[GlobalPatch, ...]] = tuple  # what else is patched

    def find(self, version: str) -> Any:
        """-> the original; RuntimeError where it is not what this version of TRL is known to have."""
        original = vars(importlib.import_module(self.module)).get(self.name)
        if original is None:
            raise RuntimeError(
                f"trl {version} has no {self.module}.{self.name} here (it depends on Triton or liger-kernel being "
                "installed); nothing was patched"
            )
        found = tuple(inspect.signature(getattr(original, self.method)).parameters)[1:]
        fits = found == self.parameters if self.positional else set(self.parameters) <= set(found)
        if not fits:
            raise RuntimeError(
                f"{self.module}.{self.name} of trl {version} must take ({', '.join(self.parameters)}), "
                f"found ({', '.join(found)}); nothing was patched"
            )
        return original


APPLY_PARAMETERS = ("weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale")
LOSS_PARAMETERS = (
    "beta",
    "epsilon_low",
    "epsilon_high",
    "temperature",
    "use_ref_model",
    "loss_type",
    "max_completion_length",
    "importance_sampling_level",
    "delta",
    "use_bias_correction_kl",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
# Newest first.
CONTRACTS = (
    Contract(
        lowest=(1, 15),
        module=UTILS,
        name="_ChunkedLogProbFunction",
        method="forward",
        parameters=("hidden", *APPLY_PARAMETERS, "outputs"),
        positional=True,
        replacement=FiveOutputs,
        beside=trl_adapters.patches,
    ),
    Contract(
        lowest=(1, 14),
        module=UTILS,
        name="_ChunkedLogProbFunction",
        method="forward",
        parameters=("last_hidden", *APPLY_PARAMETERS),
        positional=True,
        replacement=TwoOutputs,
    ),
    Contract(
        lowest=(1, 13),
        module=GRPO_TRAINER,
        name="FusedLinearGRPOLoss",
        method="__init__",
        parameters=LOSS_PARAMETERS,
        positional=False,
        replacement=_loss_class,
    ),
    Contract(
        lowest=(1, 10),
        module=GRPO_TRAINER,
        name="LigerFusedLinearGRPOLoss",
        method="__init__",
        parameters=LOSS_PARAMETERS,
        positional=False,
        replacement=_loss_class,
    ),
)

_patches: tuple[GlobalPatch, ...] = ()


def patch_trl(
    *,
    grad_tolerance: float = 0.0,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> None:
    """Put this package's head behind TRL's trainers, those that exist already and those that are built later.

    Modules that have imported TRL's name by then get ours too. Patching again only changes the options. With TRL 1.15
    and 1.16 the trainers then take LoRA adapters on the lm_head as well, which they refuse without the patch.

    Args:
        grad_tolerance, chunk_tokens, chunk_vocab: as in `linear_logprobs`.

    Raises:
        ImportError: TRL is not installed, or not of a supported version: 1.10 to 1.16.
        RuntimeError: TRL does not have what its version says.
        TypeError, ValueError: an option that `linear_logprobs` does not take.
        In each case nothing has been patched.
    """
    options = CoreOptions(grad_tolerance=grad_tolerance, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)
    _apply(_new_patches(options))


def unpatch_trl() -> None:
    """Put TRL's own back everywhere; harmless where nothing is patched."""
    _apply(())


@contextmanager
def patched_trl(**options: Any) -> Iterator[None]:
    """`patch_trl(**options)` inside the block, and afterwards whatever was there before."""
    before = _patches
    patch_trl(**options)
    try:
        yield
    finally:
        _apply(before)


def _apply(patches: tuple[GlobalPatch, ...]) -> None:
    global _patches
    for patch in _patches:
        patch.undo()
    _patches = patches
    try:
        for patch in patches:
            patch.apply()
    except BaseException:
        _apply(())
        raise


def _new_patches(options: CoreOptions) -> tuple[GlobalPatch, ...]:
    try:
        version = importlib.import_module("trl").__version__
    except ImportError as error:
        raise ImportError(f"patch_trl needs trl: {error}; nothing was patched") from error
    check_version("trl", version, LOWEST, BELOW)
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    contract = next(contract for contract in CONTRACTS if contract.lowest <= release)
    # On no token at all, so that what the options are refused for is known before a run has begun.
    linear_logprobs(torch.zeros(0, 1), torch.zeros(1, 1), torch.zeros(0, dtype=torch.int64), **vars(options))
    op = GlobalPatch(contract.replacement(options), functools.partial(contract.find, version))
    return op, *contract.beside()
