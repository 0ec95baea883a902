"""Whether the methods of TRL's trainers are replaced."""

from typing import Any

whole_step = True  # False: the replaced methods do what TRL's do

# Methods with a trainer's calls of the model.
METHODS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies", "_compute_kl_logps")


def has_own_calls(trainer: Any) -> bool:
    """Whether the trainer is of a subclass with its own loss or calls of the model, or has methods of its own."""
    if any(method in vars(trainer) for method in METHODS if method != "compute_loss"):  # the window's
        return True
    kinds = type(trainer).__mro__
    owners = [next((kind for kind in kinds if method in vars(kind)), object) for method in METHODS]
    return not all(owner.__module__.startswith(("trl.trainer.", "transformers.", "builtins")) for owner in owners)
