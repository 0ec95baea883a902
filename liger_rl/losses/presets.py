"""The published names of losses. A preset is an objective's class, a reduction's class and default options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from inspect import signature
from typing import Any

from liger_rl.hints import LOSS_TYPES, hint, translate
from liger_rl.kernels.argument_checks import check_choice
from liger_rl.losses import objectives
from liger_rl.losses.loss import PolicyTerms
from liger_rl.losses.objectives import Objective, PPOClip
from liger_rl.losses.options import check_callable
from liger_rl.losses.penalties import EntropyBonus, KLPenalty
from liger_rl.losses.preference import BCO, CPO, DPO, KTO, ORPO, PAIR_LOSSES, APOZeroUnpaired
from liger_rl.losses.reductions import FixedLengthMean, GlobalTokenMean, Reduction, SequenceMean, SequenceSum, TokenMean
from liger_rl.losses.supervised import DFT, EAFT, CrossEntropy


@dataclass(frozen=True)
class Preset:
    objective: type
    reduction: type
    defaults: dict[str, Any] = field(default_factory=dict)


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
    "ipo": Preset(objectives.IPO, GlobalTokenMean),
    "icepop": Preset(objectives.IcePop, GlobalTokenMean),
}
"""The names that a loss_type may have."""
PREFERENCES: Mapping[str, Preset] = {
    "dpo": Preset(DPO, SequenceMean),
    **{name: Preset(DPO, SequenceMean, {"loss_types": (name,)}) for name in PAIR_LOSSES},
    "cpo": Preset(CPO, SequenceMean),
    "simpo": Preset(CPO, SequenceMean, {"kind": "simpo", "nll_coef": 0.0}),
    "orpo": Preset(ORPO, SequenceMean),
}
"""The names that the loss_type of a `FusedLinearPreferenceLoss` may have."""
UNPAIRED: Mapping[str, Preset] = {
    "kto": Preset(KTO, SequenceMean),
    "apo_zero_unpaired": Preset(APOZeroUnpaired, SequenceMean),
    "bco": Preset(BCO, SequenceMean),
}
"""The names that the loss_type of a `FusedLinearUnpairedLoss` may have."""
SUPERVISED: Mapping[str, Preset] = {
    "nll": Preset(CrossEntropy, GlobalTokenMean),
    "dft": Preset(DFT, GlobalTokenMean),
    "eaft": Preset(EAFT, GlobalTokenMean),
}
"""The names that the loss_type of a `FusedLinearCrossEntropyLoss` may have."""

# Class of a fused loss -> its presets.
LOSSES = {
    "FusedLinearGRPOLoss": PRESETS,
    "FusedLinearPreferenceLoss": PREFERENCES,
    "FusedLinearUnpairedLoss": UNPAIRED,
    "FusedLinearCrossEntropyLoss": SUPERVISED,
}
# The options of each class that presets are made of.
FIELDS = {
    cls: fields(cls)
    for presets in LOSSES.values()
    for p in presets.values()
    for cls in (p.objective, p.reduction, KLPenalty, EntropyBonus)
}


def list_keywords(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters of a function or class, without those of its **options."""
    return [
        name for name, parameter in signature(function).parameters.items() if parameter.kind != parameter.VAR_KEYWORD
    ]


def build_loss(
    loss_type: str | Objective,  # the name of a preset, or an objective of the caller's, which needs a reduction
    options: dict[str, Any],
    *,
    presets: Mapping[str, Preset] = PRESETS,
    reduction: Reduction | None = None,  # replaces the preset's reduction, whose options are then unknown
    per_token: bool = False,  # no reduction, and so no entropy bonus, which is a mean
    keywords: Sequence[str] = (),  # names of the caller's other options, for the message about an unknown one
    **terms: Any,  # the other fields of `PolicyTerms`
) -> PolicyTerms:
    """Builds the loss of a preset's name or of an objective. `options` are fields of its objective and other parts.

    Raises TypeError or ValueError for an unknown preset or option, naming the known ones, and for a missing option.
    """
    classes: dict[str, type] = {}
    if presets is PRESETS:
        classes = {"kl": KLPenalty} if per_token else {"kl": KLPenalty, "entropy_bonus": EntropyBonus}
    name = "an objective of your own, whose options are its attributes,"
    if isinstance(loss_type, str) or per_token:
        if isinstance(loss_type, str) and loss_type not in presets:
            explained = _explain_loss_type(loss_type, presets)
            raise ValueError(f"loss_type must be one of {sorted(presets)}, got {loss_type!r}{explained}")
        check_choice("loss_type", loss_type, presets)
        preset, name = presets[str(loss_type)], f"loss_type {loss_type!r}"
        options = preset.defaults | options
        classes = {"objective": preset.objective, **classes}
        if reduction is None and not per_token:
            classes["reduction"] = preset.reduction
    else:
        check_callable("loss_type, which is a name or an objective,", loss_type)
        if reduction is None:
            raise ValueError("reduction must be given with an objective of your own, such as TokenMean()")
    parts = dict(zip(classes, _build_parts(name, list(classes.values()), options, keywords, presets), strict=True))
    return PolicyTerms(**{"objective": loss_type, "reduction": reduction, **parts, **terms})


def _build_parts(
    name: str, classes: Sequence[Any], options: dict[str, Any], keywords: Sequence[str], presets: Mapping[str, Preset]
) -> list[Any]:
    """An instance of each class, with the options that are its fields."""
    known = [f.name for cls in classes for f in FIELDS[cls]]
    for option in options:
        if option not in known:
            choices = list(dict.fromkeys([*known, *keywords]))
            raise ValueError(
                f"{name} has no option {option}{_explain_option(option, choices, presets)}. It has {', '.join(choices)}"
            )
    for cls in classes:
        for f in FIELDS[cls]:
            if f.default is MISSING and options.get(f.name) is None:
                raise ValueError(f"{name} needs {f.name}, which has no default")
    return [cls(**{f.name: options[f.name] for f in FIELDS[cls] if f.name in options}) for cls in classes]


def _explain_option(option: str, choices: Sequence[str], presets: Mapping[str, Preset]) -> str:
    if option == "reduction":
        return ", because it is per token: reduce its result"
    explained = hint(option, choices)
    if explained.startswith(" ("):
        return explained
    name, *_ = translate(option)
    owners = [] if name in choices else _find_owners(name, presets)
    return f"{explained}; {name} is an option of {', '.join(owners)}" if owners else explained


def _find_owners(name: str, presets: Mapping[str, Preset]) -> list[str]:
    """What has the option: other presets, or reductions of them, or other losses."""
    owners = [f'"{key}"' for key, preset in presets.items() if _has_option(preset.objective, name)]
    if not owners:
        reductions = dict.fromkeys(preset.reduction for preset in presets.values())
        owners = [reduction.__name__ for reduction in reductions if _has_option(reduction, name)]
    if not owners:
        objectives = {loss: [preset.objective for preset in others.values()] for loss, others in LOSSES.items()}
        owners = [loss for loss, classes in objectives.items() if any(_has_option(cls, name) for cls in classes)]
    return owners


def _has_option(cls: type, name: str) -> bool:
    return any(option.name == name for option in FIELDS[cls])


def _explain_loss_type(name: str, presets: Mapping[str, Preset]) -> str:
    spelled = name.lower().replace("-", "_")
    owners = [loss for loss, others in LOSSES.items() if spelled in others and others is not presets]
    if spelled in presets:
        return f' (did you mean "{spelled}"?)'
    if owners:
        return f": {owners[0]} has it"
    return f": {LOSS_TYPES[spelled]}" if spelled in LOSS_TYPES else hint(spelled, presets)
