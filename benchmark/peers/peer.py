"""What a variant is: an lm_head and a loss, in terms that every one of them can be asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from benchmark.cases import LOGPS_AND_ENTROPY, STEP, Case
from benchmark.environment import first_line
from benchmark.inputs import Inputs
from benchmark.loss import grpo_loss
from benchmark.variants import VARIANTS


class Values(NamedTuple):
    """(B, T) per token, in nats; at masked tokens anything finite."""

    logps: Tensor
    entropy: Tensor | None = None


class Head:
    """Base of the variants. What a library has not is done with ordinary PyTorch around its operator.

    Its module imports the library where `reason` or a call needs it, never at the top, so that a missing one is a
    reason and not an error.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    softcap = True  # the operator or plain PyTorch around it can cap logits
    entropy = False  # `values` gives entropies
    per_token = True  # `values` gives anything

    def reason(self, case: Case, device: str) -> str | None:
        """Why the case cannot be run, None if it can."""
        if device not in self.devices:
            return f"needs {' or '.join(self.devices)}"
        if case.softcap is not None and not self.softcap:
            return "has no softcap"
        if case.task != STEP and not self.per_token:
            return "returns no per-token values"
        if case.task == LOGPS_AND_ENTROPY and not self.entropy:
            return "returns no entropy"
        return self.missing()

    def missing(self) -> str | None:
        """Why the library cannot be used on this machine, None if it can."""
        return None

    def values(self, case: Case, inputs: Inputs, *, entropy: bool = False) -> Values:
        """Differentiable log-probabilities; entropies, where asked for, need not be."""
        raise NotImplementedError

    def make(self, case: Case, inputs: Inputs) -> Callable[[], Tensor]:
        """Forward and loss, ready for .backward()."""
        return lambda: grpo_loss(self.values(case, inputs).logps, inputs)


def load(variant: str) -> Head:
    """A variant, whose library may still be missing: its `reason` says so."""
    found = VARIANTS[variant]
    return import_module(f"benchmark.peers.{found.module}").Head(**found.options)


def over_live_rows(inputs: Inputs, operator: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    """operator(hidden (n, H), ids (n,)) -> tensors (n,) on the tokens that count -> the same as (B, T), 0 elsewhere.

    For operators that would compute padding: their own systems remove it before them.
    """
    shape = inputs.mask.shape
    if inputs.dense:
        return [values.view(shape) for values in operator(inputs.hidden.flatten(0, 1), inputs.ids.flatten())]
    found = operator(inputs.hidden[inputs.mask], inputs.ids[inputs.mask])
    return [values.new_zeros(shape).masked_scatter(inputs.mask, values) for values in found]


def import_reason(name: str, load: Callable[[], object]) -> str | None:
    """Why `load` cannot import; an installed library may fail in more ways than one."""
    try:
        load()
    except Exception as error:
        return f"{name} cannot be imported: {type(error).__name__}: {first_line(error)}"
    return None


def softcapped(logits: Tensor, case: Case) -> Tensor:
    return logits if case.softcap is None else torch.tanh(logits / case.softcap) * case.softcap
