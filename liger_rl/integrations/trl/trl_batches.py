"""What the methods of TRL's trainers tell their model's forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

whole_step = True  # False: the replaced methods do what TRL's do

# Methods with a trainer's calls of the model.
METHODS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies", "_compute_kl_logps")

_idle_rows: ContextVar[Tensor | None] = ContextVar("liger_rl_trl_idle_rows", default=None)


def get_idle_rows() -> Tensor | None:
    """(B,) bool, the sequences of the micro-batch whose log-probabilities and entropies have no gradient.

    None outside of `_compute_loss`, and if every sequence may have a gradient. The forward must still return the values
    of idle sequences, because metrics, the entropy quantile and ratios read them.
    """
    return _idle_rows.get()


@contextmanager
def set_idle_rows(rows: Tensor | None) -> Iterator[None]:
    """`get_idle_rows` returns `rows` in this context."""
    token = _idle_rows.set(rows)
    try:
        yield
    finally:
        _idle_rows.reset(token)


def uses_zero_3(model: Any) -> bool:
    """Whether ZeRO-3 shards the parameters. It records the order in which a forward uses them."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def has_own_calls(trainer: Any) -> bool:
    """Whether the trainer is of a subclass with its own loss or calls of the model."""
    kinds = type(trainer).__mro__
    owners = [next((kind for kind in kinds if method in vars(kind)), object) for method in METHODS]
    return not all(owner.__module__.startswith(("trl.trainer.", "transformers.", "builtins")) for owner in owners)
