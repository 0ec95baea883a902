"""What an unknown name stands for: names that TRL, liger-kernel, verl and OpenRLHF use, and near spellings of ours."""

from collections.abc import Collection
from difflib import SequenceMatcher, get_close_matches
from itertools import zip_longest

BOTH_BOUNDS = ("epsilon_low", "epsilon_high")
# Name in another library -> what has the same meaning here. A hint names it only where all of it is known.
NAMES: dict[str, tuple[str, ...]] = {
    # the clipped ratio
    **dict.fromkeys(("epsilon", "eps", "clip_ratio", "cliprange", "eps_clip", "eps_clip_low_high"), BOTH_BOUNDS),
    "clip_ratio_low": ("epsilon_low",),
    "clip_ratio_high": ("epsilon_high",),
    "clip_ratio_c": ("dual_clip",),
    # the KL term and the entropy bonus
    "kl_loss_type": ("kl_estimator",),
    "use_bias_correction_kl": ("importance_weighted",),
    "entropy_loss_coef": ("entropy_coef",),
    # the sampler's log-probabilities
    **dict.fromkeys(
        [f"vllm_importance_sampling_{end}" for end in ("mode", "cap", "clip_min", "clip_max", "correction")],
        ("sampler_correction",),
    ),
    **dict.fromkeys(
        ("vllm_is_ratio", "importance_sampling_ratio", "importance_weights", "rollout_is_weights"),
        ("importance_ratio",),
    ),
    **dict.fromkeys(("rollout_log_probs", "sampling_logps"), ("sampling_per_token_logps",)),
    # other columns
    **dict.fromkeys(("completion_mask", "response_mask", "loss_mask", "action_mask"), ("mask",)),
    **dict.fromkeys(("old_logps", "old_log_prob", "old_log_probs"), ("old_per_token_logps",)),
    **dict.fromkeys(("ref_log_prob", "ref_log_probs"), ("ref_per_token_logps",)),
    # other terms and options
    "loss_agg_mode": ("reduction",),
    **dict.fromkeys(("top_entropy_quantile", "off_policy_mask_threshold"), ("corrections",)),
    **dict.fromkeys(("cpo_alpha", "rpo_alpha"), ("nll_coef",)),
    "lse_square_scale": ("z_loss",),
    "mem": ("memory",),
}
# What has no name here, and what to do.
EXPLANATIONS = {
    **dict.fromkeys(
        ("chunk_tokens", "chunk_vocab"), "tiles fit a budget; linear_logprobs and FusedLinearGRPOLoss alone take bounds"
    ),
    "class_weights": "give class_weights[targets.clamp(min=0)] as token_weights, and their sum as num_items_in_batch",
    "eaft_k": "the entropy is that of all ids",
    "ignore_index": "a token with a negative id does not count; make other ids negative, or pass a mask",
    "importance_sampling_level": "a ratio per sequence has a meaning where the ratio carries the gradient",
    "alpha": "alphapo_alpha is AlphaPO's exponent, TRL's alpha; nll_coef weighs the NLL, liger-kernel's alpha",
    **dict.fromkeys(
        ("kl_coef", "init_kl_coef", "kl_penalty"),
        "beta and kl_estimator of a policy loss are of a KL in the loss; a KL in the rewards goes into the advantages",
    ),
    "kl_loss_coef": "it is beta of a policy loss",
    "label_smoothing_factor": "it is label_smoothing of FusedLinearCrossEntropyLoss",
    "support": "call support_logprobs, and ppo_loss_fn with its log-probabilities",
    "scale_rewards": "advantages are given, so scale them before the call",
    "use_token_scaling": 'it is loss_type "dft" of FusedLinearCrossEntropyLoss',
}
EXPLANATIONS["ce_weight"] = EXPLANATIONS["class_weights"]
# Value of `reduction` -> the reduction.
REDUCTIONS = {
    "mean": "TokenMean(), or SequenceMean() for a mean over sequences or pairs",
    "sum": "TokenSum()",
    "token-mean": "TokenMean()",
    "seq-mean-token-mean": "SequenceMean()",
    "seq-mean-token-sum": "SequenceSum()",
    "seq-mean-token-sum-norm": "FixedLengthMean(max_completion_length=...)",
}
# Value of `loss_type` -> what to type.
LOSS_TYPES = {
    **dict.fromkeys(
        ("ppo", "vanilla"),
        '"grpo", "bnpo", "dapo", "dr_grpo" of FusedLinearGRPOLoss clip as PPO does, and differ in their mean',
    ),
    "geo_mean": '"gmpo" of FusedLinearGRPOLoss has it',
    **dict.fromkeys(("clip_cov", "dro", "kl_cov"), "pass an objective of your own, as docs/losses.md has one"),
    **dict.fromkeys(("sft", "cross_entropy"), "FusedLinearCrossEntropyLoss has it"),
}


def translate(name: str) -> tuple[str, ...]:
    """The names here of what another library calls `name`; `name` itself if no other library has it."""
    return NAMES.get(name, (name,))


def hint(name: str, known: Collection[str]) -> str:
    """ " (did you mean mask?)" for "completion_mask"; "" if no known name has its meaning or nearly its spelling."""
    meant: tuple[str, ...] | list[str] = translate(name)
    if name in EXPLANATIONS and (name != "alpha" or "nll_coef" in known):
        return f": {EXPLANATIONS[name]}"
    clips = set(meant) <= set(BOTH_BOUNDS)
    if clips and {"ratio_min", "epsilon_high"} <= set(known):  # CISPO's, which bound the ratio itself
        bounds = {"epsilon_low": f"ratio_min is 1 - {name}", "epsilon_high": f"epsilon_high is 1 + {name}"}
        return f": {' and '.join(bounds[bound] for bound in meant)}"
    if clips and "objective" in known:
        return f"; write objective=PPOClip({', '.join(f'{bound}=...' for bound in meant)})"
    if name not in NAMES:
        # Short names that differ in a letter differ in meaning (gpo, gspo).
        near = get_close_matches(name, known, cutoff=0.83) if len(name) > 5 else []
        meant = [match for match in near if _has_same_words(name, match)][:1]
    return f" (did you mean {' and '.join(meant)}?)" if meant and set(meant) <= set(known) else ""


def _has_same_words(name: str, other: str) -> bool:
    """Whether each word is spelled nearly as the other's: names that differ in a word differ in meaning."""
    pairs = zip_longest(name.split("_"), other.split("_"), fillvalue="")
    return all(SequenceMatcher(None, a, b).ratio() >= 0.75 for a, b in pairs)
