"""TRL's trainers on this package's head, by one call: docs/trl.md.

The patch replaces the models' fused forward (`forward`); the trainers' training step, for one forward of its
micro-batches (`optimizer_step`, `window`); their `train`, for what the user sees (`report`); two methods of GRPO and
RLOO (`scored_sequences`); the forward of PEFT's LoRA layers (`integrations.peft`); the launch of a script by TRL's
command line (`command_line`); and of DistillationTrainer the loss and the calls of the bodies (`distillation`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from liger_rl.head.checks import check_flag, check_optional_count
from liger_rl.integrations import peft
from liger_rl.integrations.patching import Framework, Patch
from liger_rl.integrations.trl import command_line, distillation, optimizer_step, report, scored_sequences
from liger_rl.integrations.trl.forward import FusedHead, wrap_forward
from liger_rl.integrations.trl.settings import Settings, get_settings, set_settings
from liger_rl.kernels.public_call import public
from liger_rl.step.attention import restore_attention
from liger_rl.step.memory import DEFAULT_SHARE, check_memory
from liger_rl.step.states import restore_states

__all__ = ["is_patched", "patch_trl", "patched_trl", "unpatch_trl"]


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """`trl.trainer.utils.add_fused_lm_head`, with a forward that runs live tokens through this package's head.

    A model keeps our forward after `unpatch_trl`. It then calls TRL's.
    """
    _head_patch.original(model, temperature=temperature, cast_lm_head_to_fp32=cast_lm_head_to_fp32, outputs=outputs)
    head = FusedHead(temperature, cast_lm_head_to_fp32, tuple(outputs))
    model.forward = MethodType(wrap_forward(model.forward.__func__, head, is_patched), model)


_head_patch = Patch("trl.trainer.utils:add_fused_lm_head", add_fused_lm_head)
# A new version is supported once its trainers pass the tests.
TRL = Framework(
    "trl",
    (1, 15),
    (1, 17),
    _head_patch,
    *distillation.PATCHES,
    *scored_sequences.PATCHES,
    optimizer_step.PATCH,
    report.PATCH,
    command_line.PATCH,
    *peft.PATCHES,
    gain="float32 logits, no padding, prompts once, no work for tokens without a gradient",
)


@public
def patch_trl(
    *,
    whole_step: bool = True,
    even_ranks: bool = True,
    joined_hooks: bool = False,
    max_tokens: int | None = None,
    memory: float = DEFAULT_SHARE,
) -> None:
    """Put this package behind TRL's trainers that are built later. See docs/trl.md.

    Patching again changes the options.

    Args:
        whole_step: whether all micro-batches of an optimizer step run in one forward, and the model runs live tokens
            only: no padding, the tokens with which sequences begin alike once, and sequences without a gradient without
            a graph. False leaves the trainer's steps as they are, and replaces the head alone.
        even_ranks: whether ranks of DDP, ZeRO-1 and 2 exchange micro-batches, so that all have about as much to run.
        joined_hooks: whether hooks of yours on layers and parameters, and callbacks with `on_substep_end`, may see what
            runs in place of TRL's micro-batches: one row with the tokens of all of them, no padding, one gradient. For
            hooks that only read. False keeps what they see as it is.
        max_tokens: about how many tokens one forward may have. It takes as many micro-batches as fit if each is as long
            as the longest so far, and runs in parts if they turn out longer. None: on a GPU as free memory allows,
            elsewhere six micro-batches.
        memory: the share of a GPU's free memory, 0 to 1, that activations may take. With gradient checkpointing as many
            layers as fit are not recomputed; ZeRO-3 recomputes all. 0 recomputes all, and keeps their inputs in pinned
            CPU memory.

    Raises:
        ImportError: TRL is not installed, or its version is not supported.
        RuntimeError: a function of TRL to be replaced is not there, or takes other parameters.
        TypeError, ValueError: a bad option. Nothing is patched then.
    """
    check_flag("whole_step", whole_step)
    check_flag("even_ranks", even_ranks)
    check_flag("joined_hooks", joined_hooks)
    check_optional_count("max_tokens", max_tokens)
    check_memory(memory)
    settings = Settings(
        whole_step=whole_step, even_ranks=even_ranks, joined_hooks=joined_hooks, max_tokens=max_tokens, memory=memory
    )
    TRL.patch()
    set_settings(settings)


def unpatch_trl() -> None:
    """Undo `patch_trl`. Trainers that were built under the patch run as TRL runs them."""
    TRL.unpatch()
    restore_attention()
    restore_states()


def is_patched() -> bool:
    """Whether `patch_trl` is in place now."""
    return TRL.is_patched()


@contextmanager
def patched_trl(**options: Any) -> Iterator[None]:
    """`patch_trl(**options)` inside the block, and afterwards the state before it."""
    before, was_patched = get_settings(), is_patched()
    with TRL.within():
        patch_trl(**options)
        try:
            yield
        finally:
            set_settings(before)
            if not was_patched:
                restore_attention()
                restore_states()
