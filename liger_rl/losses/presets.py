"""The published names of losses. A preset is an objective's class, a reduction's class and default options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, signature
from itertools import chain
from typing import Any, TypedDict, TypeVar

from liger_rl.kernels.argument_checks import check_choice
from liger_rl.kernels.public_call import hint
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

# The options of each class that presets are made of.
FIELDS = {
    cls: fields(cls)
    for presets in (PRESETS, PREFERENCES, UNPAIRED, SUPERVISED)
    for p in presets.values()
    for cls in (p.objective, p.reduction, KLPenalty, EntropyBonus)
}


class ObjectiveKeywords(TypedDict, total=False):
    """The options of the presets' objectives. Each preset has those of its own objective."""

    epsilon_low: float
    epsilon_high: float
    delta: float | None
    dual_clip: float | None
    importance_sampling_level: str
    mean_advantages: bool
    ratio_min: float
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    mean_importance_ratio: bool
    divergence_low: float
    divergence_high: float
    ratio_cap: float
    ipo_threshold: float
    ratio_max: float


class PreferenceKeywords(TypedDict, total=False):
    """The options of the objectives of pairs. Each preset has those of its own objective."""

    beta: float
    nll_coef: float
    loss_types: Sequence[str]
    loss_weights: Sequence[float] | None
    label_smoothing: float
    reference_free: bool
    f_divergence_type: str
    f_alpha_divergence_coef: float
    ld_alpha: float | None
    use_weighting: bool
    average_log_prob: bool
    discopop_tau: float
    kind: str
    simpo_gamma: float
    alpha: float


class UnpairedKeywords(TypedDict, total=False):
    """The options of the objectives of single judged sequences."""

    beta: float
    desirable_weight: float
    undesirable_weight: float
    reference_free: bool
    average_log_prob: bool


class SupervisedKeywords(TypedDict, total=False):
    """The options of the supervised objectives and of their reduction."""

    label_smoothing: float
    z_loss: float
    eaft_alpha: float
    eaft_k: int | None
    eaft_scale: float
    world_size: int


class PresetKeywords(ObjectiveKeywords, total=False):
    """The options of the presets' objectives and reductions."""

    world_size: int
    max_completion_length: float


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def show_options(keywords: type, *classes: type) -> Callable[[FunctionT], FunctionT]:
    """Decorator: `inspect.signature` and `help` show the keys of a TypedDict in place of **options.

    An option's default is that of the first dataclass which has it, in `classes` and then in the presets.
    """
    defaults: dict[str, Any] = {}
    for option in chain(*map(fields, classes), *FIELDS.values()):
        defaults.setdefault(option.name, Parameter.empty if option.default is MISSING else option.default)

    def decorate(function: FunctionT) -> FunctionT:
        *parameters, _ = (shape := signature(function)).parameters.values()
        for name, kind in keywords.__annotations__.items():
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind))
        function.__signature__ = shape.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


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
        check_choice("loss_type", loss_type, sorted(presets))
        preset, name = presets[str(loss_type)], f"loss_type {loss_type!r}"
        options = preset.defaults | options
        classes = {"objective": preset.objective, **classes}
        if reduction is None and not per_token:
            classes["reduction"] = preset.reduction
    else:
        check_callable("loss_type, which is a name or an objective,", loss_type)
        if reduction is None:
            raise ValueError("reduction must be given with an objective of your own, such as TokenMean()")
    parts = dict(zip(classes, _build_parts(name, list(classes.values()), options, keywords), strict=True))
    return PolicyTerms(**{"objective": loss_type, "reduction": reduction, **parts, **terms})


def _build_parts(name: str, classes: Sequence[Any], options: dict[str, Any], keywords: Sequence[str]) -> list[Any]:
    """An instance of each class, with the options that are its fields."""
    known = [f.name for cls in classes for f in FIELDS[cls]]
    for option in options:
        if option not in known:
            choices = list(dict.fromkeys([*known, *keywords]))
            raise ValueError(
                f"{name} has no option {option}{_explain_option(option, choices)}. It has {', '.join(choices)}"
            )
    for cls in classes:
        for f in FIELDS[cls]:
            if f.default is MISSING and options.get(f.name) is None:
                raise ValueError(f"{name} needs {f.name}, which has no default")
    return [cls(**{f.name: options[f.name] for f in FIELDS[cls] if f.name in options}) for cls in classes]


def _explain_option(option: str, choices: Sequence[str]) -> str:
    if option == "reduction":
        return ", because it is per token: reduce its result"
    if option == "importance_sampling_level":
        clipping = [name for name, preset in PRESETS.items() if preset.objective is PPOClip]
        return f": a ratio per sequence has a meaning where the ratio carries the gradient, in {', '.join(clipping)}"
    if option == "class_weights":
        return ": give class_weights[targets.clamp(min=0)] as token_weights, and their sum as num_items_in_batch"
    return hint(option, choices)
