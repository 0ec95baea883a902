"""TRL's trainers on this package's head, by one call: docs/trl.md.

The patch replaces the op for log-probabilities, entropies and statistics; the models' fused forward (`forward`); the
trainers' training step, for one forward of its micro-batches (`window`) and for what the user sees (`report`); two
methods of GRPO and RLOO (`scored_sequences`); the forward of PEFT's LoRA layers (`integrations.peft`); the class by
which trainers refuse LoRA adapters on the lm_head (`adapted_head`); and the loss of DistillationTrainer
(`distillation`).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_rl.head.checks import check_flag, check_floating, check_optional_count
from liger_rl.head.head_options import HeadOptions
from liger_rl.head.logprobs import linear_logprobs
from liger_rl.integrations import peft
from liger_rl.integrations.patching import Framework, Patch, join_parameters
from liger_rl.integrations.trl import adapted_head, distillation, report, scored_sequences
from liger_rl.integrations.trl.settings import Settings, get_settings, set_settings
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.kernels.transform import LogitTransform
from liger_rl.models.tensors import localize
from liger_rl.step.memory import DEFAULT_SHARE, check_memory

__all__ = ["is_patched", "patch_trl", "patched_trl", "unpatch_trl"]

NAME = "_ChunkedLogProbFunction"
OUTPUTS = ("log_probs", "entropy", *EXTRAS)


class FusedLogProbs:
    """In place of `trl.trainer.utils._ChunkedLogProbFunction`. Trainers call its `apply`."""

    @staticmethod
    def apply(
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

        Each is (N,) float32, top-1 bool. The first two have gradients. `chunk_size`, the width of TRL's tiles, has no
        effect. ValueError for another name in `outputs`, and as `linear_logprobs`.
        """
        unknown = sorted(set(outputs) - set(OUTPUTS))
        if unknown:
            raise ValueError(f"outputs must be among {list(OUTPUTS)}, got {unknown}")
        head = adapted_head.get_adapted_head()
        if head is not None:
            (hidden, weight), bias = head.widen(hidden, weight), head.sum_biases()
        local = localize(hidden, weight, bias=bias)
        check_floating("hidden", local.hidden)
        # Outside autocast TRL computes in the dtype of the hidden states, which its float32-head mode makes float32.
        under_autocast, settings = torch.is_autocast_enabled(hidden.device.type), get_settings()
        result = linear_logprobs(
            local.hidden,
            local.weight,
            targets,
            bias=local.bias,
            vocab_parallel=local.vocab_parallel,
            transform=LogitTransform(temperature=temperature, softcap=final_logit_softcapping, scale=logit_scale),
            entropy="entropy" in outputs,
            extras=[name for name in EXTRAS if name in outputs],
            compute_dtype=None if under_autocast else hidden.dtype,
            gather=adapted_head.gather_head,
            chunk_tokens=settings.chunk_tokens,
            chunk_vocab=settings.chunk_vocab,
        )
        constant = (None if value is None else value.detach() for value in result[2 : len(OUTPUTS)])
        return *result[:2], *constant


# TRL passes the arguments by position. TRL 1.15 has the op only where Triton is.
_op_patch = Patch(
    f"trl.trainer.utils:{NAME}", FusedLogProbs, f"ctx {join_parameters(FusedLogProbs.apply)}", checked=f"{NAME}.forward"
)
# A new version is supported once its trainers pass the tests.
TRL = Framework(
    "trl",
    (1, 15),
    (1, 17),
    _op_patch,
    *adapted_head.PATCHES,
    *distillation.PATCHES,
    *scored_sequences.PATCHES,
    report.PATCH,
    *peft.PATCHES,
    gain="float32 logits, no padding, prompts once, no work for tokens without a gradient, LoRA on the lm_head",
)


def patch_trl(
    *,
    whole_step: bool = True,
    even_ranks: bool = True,
    max_tokens: int | None = None,
    memory: float = DEFAULT_SHARE,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> None:
    """Put this package behind TRL's trainers. See docs/trl.md.

    Trainers that exist already, or are built later, get its head. Trainers that are built later get the whole step, and
    take LoRA adapters on the lm_head. Patching again changes the options.

    Args:
        whole_step: whether all micro-batches of an optimizer step run in one forward, and the model runs live tokens
            only: no padding, the tokens with which sequences begin alike once, and sequences without a gradient without
            a graph. False leaves the trainer's steps and the model's forward as they are.
        even_ranks: whether ranks of DDP, ZeRO-1 and 2 exchange micro-batches, so that all have about as much to run.
        max_tokens: about how many tokens one forward may have. It takes as many micro-batches as fit if each is as long
            as the longest so far, and runs in parts if they turn out longer. None: on a GPU as free memory allows,
            elsewhere any number.
        memory: the share of a GPU's free memory, 0 to 1, that activations may take. With gradient checkpointing as many
            layers as fit are not recomputed; ZeRO-3 recomputes all. 0 recomputes all, and keeps their inputs in pinned
            CPU memory.
        chunk_tokens, chunk_vocab: as in `linear_logprobs`.

    Raises:
        ImportError: TRL is not installed, or its version is not supported.
        RuntimeError: a function of TRL to be replaced is not there, or takes other parameters.
        TypeError, ValueError: a bad option. Nothing is patched then.
    """
    chunks: dict[str, Any] = {"chunk_tokens": chunk_tokens, "chunk_vocab": chunk_vocab}
    check_flag("whole_step", whole_step)
    check_flag("even_ranks", even_ranks)
    check_optional_count("max_tokens", max_tokens)
    check_memory(memory)
    HeadOptions(**chunks)
    settings = Settings(whole_step=whole_step, even_ranks=even_ranks, max_tokens=max_tokens, memory=memory, **chunks)
    TRL.patch()
    set_settings(settings)


unpatch_trl = TRL.unpatch


def is_patched() -> bool:
    """Whether `patch_trl` is in place now."""
    return _op_patch.patched  # `TRL.is_patched` is also true after `patch_peft`, whose rows are in the table


@contextmanager
def patched_trl(**options: Any) -> Iterator[None]:
    """`patch_trl(**options)` inside the block, and afterwards the state before it."""
    before = get_settings()
    with TRL.within():
        patch_trl(**options)
        try:
            yield
        finally:
            set_settings(before)
