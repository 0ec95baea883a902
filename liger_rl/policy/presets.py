"""Names people know losses by. A preset is an (objective, reduction) pair with its defaults, and nothing else."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from liger_rl.policy.objectives import Objective, PPOClip
from liger_rl.policy.penalties import KLPenalty
from liger_rl.policy.reductions import FixedLengthMean, GlobalTokenMean, Reduction, SequenceMean, TokenMean


@dataclass(frozen=True)
class Preset:
    objective: type
    reduction: type
    defaults: Mapping[str, Any] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(PPOClip, SequenceMean),
    "bnpo": Preset(PPOClip, TokenMean),
    "dapo": Preset(PPOClip, GlobalTokenMean),
    "dr_grpo": Preset(PPOClip, FixedLengthMean),
    "gspo": Preset(PPOClip, SequenceMean, {"importance_sampling_level": "sequence"}),
}


def build_preset(loss_type: str, **options: Any) -> tuple[Objective, Reduction, KLPenalty]:
    """-> the preset's objective, reduction and KL penalty, each with the options that are its fields.

    Raises:
        ValueError: an unknown preset or option (the known ones are listed), or a required option left out.
    """
    if loss_type not in PRESETS:
        raise ValueError(f"loss_type must be one of {sorted(PRESETS)}, got {loss_type!r}")
    preset = PRESETS[loss_type]
    parts = (preset.objective, preset.reduction, KLPenalty)
    known = [name for part in parts for name in _options(part)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"loss_type {loss_type!r} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    chosen = {**preset.defaults, **options}
    for part in parts:
        for name, required in _options(part).items():
            if required and chosen.get(name) is None:
                raise ValueError(f"loss_type {loss_type!r} needs {name}, which has no default")
    objective, reduction, kl = (part(**{k: chosen[k] for k in _options(part) if k in chosen}) for part in parts)
    return objective, reduction, kl


def _options(part: type) -> dict[str, bool]:
    """Options of a dataclass -> whether they must be given."""
    return {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(part)}
