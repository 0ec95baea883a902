"""Names people know losses by. A preset is an (objective, reduction) pair with its defaults, and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple

from liger_rl.policy.objectives import (
    CISPO,
    DPPO,
    DPPOKL,
    DRO,
    GMPO,
    SAPO,
    VESPO,
    ClipCov,
    KLCov,
    Objective,
    PPOClip,
    Reinforce,
)
from liger_rl.policy.options import one_of
from liger_rl.policy.penalties import EntropyBonus, KLPenalty
from liger_rl.policy.reductions import (
    FixedLengthMean,
    GlobalTokenMean,
    Reduction,
    SequenceMean,
    SequenceSum,
    TokenMean,
)


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
    "luspo": Preset(PPOClip, SequenceSum),
    "cispo": Preset(CISPO, GlobalTokenMean),
    "sapo": Preset(SAPO, SequenceMean),
    "vespo": Preset(VESPO, GlobalTokenMean),
    "gspo": Preset(PPOClip, SequenceMean, {"importance_sampling_level": "sequence"}),
    "gspo_token": Preset(PPOClip, SequenceMean, {"importance_sampling_level": "sequence_token"}),
    "gmpo": Preset(GMPO, SequenceMean),
    "gpg": Preset(Reinforce, GlobalTokenMean),
    "dppo": Preset(DPPO, GlobalTokenMean),
    "dppo_kl": Preset(DPPOKL, GlobalTokenMean),
    "dro": Preset(DRO, GlobalTokenMean),
    "clip_cov": Preset(ClipCov, TokenMean),
    "kl_cov": Preset(KLCov, TokenMean),
}
"""The names that a loss_type may have; each has an objective's class, a reduction's class and defaults."""


class LossParts(NamedTuple):
    objective: Objective
    reduction: Reduction | None
    kl: KLPenalty
    entropy_bonus: EntropyBonus


def build_preset(loss_type: str, *, reduction: Reduction | None = None, **options: Any) -> LossParts:
    """-> the preset's objective, reduction and penalties, each with the options that are its fields.

    A `reduction` given takes the place of the preset's, whose options are then unknown.

    Raises:
        ValueError: an unknown preset or option (the known ones are listed), or a required option left out.
    """
    preset = _preset(loss_type)
    if reduction is not None:
        objective, kl, entropy_bonus = _made(loss_type, (preset.objective, KLPenalty, EntropyBonus), options)
        return LossParts(objective, reduction, kl, entropy_bonus)
    return LossParts(*_made(loss_type, (preset.objective, preset.reduction, KLPenalty, EntropyBonus), options))


def build_per_token(loss_type: str, **options: Any) -> tuple[Objective, KLPenalty]:
    """As `build_preset`, without the reduction and the entropy bonus, which has no meaning before one."""
    objective, kl = _made(loss_type, (_preset(loss_type).objective, KLPenalty), options)
    return objective, kl


def _preset(loss_type: str) -> Preset:
    one_of("loss_type", loss_type, sorted(PRESETS))
    return PRESETS[loss_type]


def _made(loss_type: str, parts: Sequence[type], options: Mapping[str, Any]) -> list[Any]:
    """An instance of each part, with the options that are its fields."""
    known = [name for part in parts for name in _options(part)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"loss_type {loss_type!r} has no option {', '.join(unknown)}; it has {', '.join(known)}{_hint(unknown)}"
        )
    chosen = {**PRESETS[loss_type].defaults, **options}
    for part in parts:
        for name, required in _options(part).items():
            if required and chosen.get(name) is None:
                raise ValueError(f"loss_type {loss_type!r} needs {name}, which has no default")
    return [part(**{name: chosen[name] for name in _options(part) if name in chosen}) for part in parts]


def _hint(unknown: list[str]) -> str:
    if "reduction" in unknown:
        return ". This loss is per token: reduce what it returns"
    if "importance_sampling_level" not in unknown:
        return ""
    clipping = [name for name, preset in PRESETS.items() if preset.objective is PPOClip]
    return f". A ratio per sequence has a meaning where the ratio carries the gradient: {', '.join(clipping)}"


def _options(part: type) -> dict[str, bool]:
    """Options of a dataclass -> whether they must be given."""
    return {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(part)}
