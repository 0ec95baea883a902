"""The published names of losses. A preset is an objective's class, a reduction's class and default options."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple

from liger_rl.losses import objectives
from liger_rl.losses.objectives import Objective, PPOClip
from liger_rl.losses.options import one_of
from liger_rl.losses.penalties import EntropyBonus, KLPenalty
from liger_rl.losses.reductions import FixedLengthMean, GlobalTokenMean, Reduction, SequenceMean, SequenceSum, TokenMean


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
    "cispo": Preset(objectives.CISPO, GlobalTokenMean),
    "sapo": Preset(objectives.SAPO, SequenceMean),
    "vespo": Preset(objectives.VESPO, GlobalTokenMean),
    "gspo": Preset(PPOClip, SequenceMean, {"importance_sampling_level": "sequence"}),
    "gspo_token": Preset(PPOClip, SequenceMean, {"importance_sampling_level": "sequence_token"}),
    "gmpo": Preset(objectives.GMPO, SequenceMean),
    "gpg": Preset(objectives.Reinforce, GlobalTokenMean),
    "dppo": Preset(objectives.DPPO, GlobalTokenMean),
    "dppo_kl": Preset(objectives.DPPOKL, GlobalTokenMean),
    "dro": Preset(objectives.DRO, GlobalTokenMean),
    "clip_cov": Preset(objectives.ClipCov, TokenMean),
    "kl_cov": Preset(objectives.KLCov, TokenMean),
}
"""The names that a loss_type may have."""


class LossParts(NamedTuple):
    objective: Objective
    reduction: Reduction | None
    kl: KLPenalty
    entropy_bonus: EntropyBonus


def build_preset(loss_type: str, *, reduction: Reduction | None = None, **options: Any) -> LossParts:
    """The preset's objective, reduction and penalties, each made with the options that are its fields.

    If `reduction` is given, it replaces the preset's reduction, whose options are then unknown.

    Raises:
        ValueError: an unknown preset or option (the known ones are listed), or a required option left out.
    """
    preset = _preset(loss_type)
    if reduction is not None:
        objective, kl, entropy_bonus = _built(loss_type, (preset.objective, KLPenalty, EntropyBonus), options)
        return LossParts(objective, reduction, kl, entropy_bonus)
    return LossParts(*_built(loss_type, (preset.objective, preset.reduction, KLPenalty, EntropyBonus), options))


def build_per_token(loss_type: str, **options: Any) -> tuple[Objective, KLPenalty]:
    """`build_preset` of a loss per token, without the reduction and the entropy bonus, which is a mean."""
    objective, kl = _built(loss_type, (_preset(loss_type).objective, KLPenalty), options)
    return objective, kl


def _preset(loss_type: str) -> Preset:
    one_of("loss_type", loss_type, sorted(PRESETS))
    return PRESETS[loss_type]


def _built(loss_type: str, classes: Sequence[type], options: Mapping[str, Any]) -> list[Any]:
    """An instance of each class, with the options that are its fields."""
    known = [f.name for cls in classes for f in fields(cls)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"loss_type {loss_type!r} has no option {', '.join(unknown)}; it has {', '.join(known)}{_hint(unknown)}"
        )
    chosen = {**PRESETS[loss_type].defaults, **options}
    for cls in classes:
        for f in fields(cls):
            if f.default is MISSING and chosen.get(f.name) is None:
                raise ValueError(f"loss_type {loss_type!r} needs {f.name}, which has no default")
    return [cls(**{f.name: chosen[f.name] for f in fields(cls) if f.name in chosen}) for cls in classes]


def _hint(unknown: list[str]) -> str:
    if "reduction" in unknown:
        return ". This loss is per token: reduce its result"
    if "importance_sampling_level" not in unknown:
        return ""
    clipping = [name for name, preset in PRESETS.items() if preset.objective is PPOClip]
    return f". A ratio per sequence has a meaning where the ratio carries the gradient: {', '.join(clipping)}"
