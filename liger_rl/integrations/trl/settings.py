"""The options of `patch_trl`."""

from dataclasses import dataclass

from liger_rl.step.memory import DEFAULT_SHARE


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the models of TRL's trainers run."""

    whole_step: bool = True  # False: batches as they come, through the fused head
    even_ranks: bool = True  # micro-batches change ranks
    max_tokens: int | None = None  # about how many tokens one forward may have; None: as free memory allows
    joined_hooks: bool = False  # whether hooks of the user's may see joined micro-batches
    memory: float = DEFAULT_SHARE  # the share of a GPU's free memory that activations may take


_settings = Settings()


def get_settings() -> Settings:
    """What `patch_trl` was given, or the defaults."""
    return _settings


def set_settings(settings: Settings) -> None:
    """Change the settings of all trainers."""
    global _settings
    _settings = settings
