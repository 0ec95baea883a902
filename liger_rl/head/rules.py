"""Which options of a head exclude each other, and why: one table, and the errors from it."""

WHOLE = "what may be left out is a share of the whole vocabulary's gradient, which no rank has"
CHUNK = "a chunk of one pass holds the whole vocabulary"
# Feature -> option that must keep its default with the feature -> why. A grad_tolerance must be 0 or "auto".
NOT_TOGETHER: dict[str, dict[str, str]] = {
    "with lse": {"grad_tolerance": ""},
    "with topk": {"grad_tolerance": ""},
    "with vocab_parallel": {"grad_tolerance": WHOLE},
    "with a support": {
        "lse": "its engine does not keep it",
        "topk": "its engine does not keep it",
        "extras": "its engine does not keep them",
        "grad_tolerance": "",
    },
    "with several targets for each token": {"grad_tolerance": ""},
    # One head, whose gradients are made in the forward.
    "in one pass": {
        "topk": "a loss reads no list",
        "chunk_vocab": CHUNK,
        "grad_tolerance": "ids are left out of a second pass",
    },
    # Two heads, whose gradients are made in the forward.
    "with token_weights": {
        "chunk_vocab": CHUNK,
    },
    "with two heads": {
        "extras": "they are not folded with two heads; ask linear_logprobs for them",
        "lse": "it is not returned of two heads; ask linear_logprobs for it",
        "topk": "no list is kept of two heads; ask linear_logprobs for it",
    },
}


def broken(options: object, feature: str, ignored: str | None = None) -> tuple[str, object, object, str] | None:
    """The first option, except `ignored`, that excludes `feature`: name, default, value, reason. None: none does."""
    for name, why in NOT_TOGETHER[feature].items():
        default = 0.0 if name == "grad_tolerance" else getattr(type(options), name)
        value = getattr(options, name) or default  # an empty list of extras is the default, too
        if name != ignored and value not in (default, "auto"):  # "auto" becomes 0 with the feature
            return name, default, value, why
    return None


def lacks(options: object, feature: str, ignored: str | None = None) -> str | None:
    """`broken` as a sentence of what is needed: "topk = None, got 5: a loss reads no list"."""
    rule = broken(options, feature, ignored)
    return None if rule is None else "{} = {}, got {}: {}".format(*rule)


def check_left_alone(options: object, feature: str) -> None:
    """Raise ValueError if an option excludes `feature`, such as "with lse"."""
    rule = broken(options, feature)
    if rule is not None:
        name, default, value, why = rule
        raise ValueError(f"{name} must be {default} {feature}{': ' * bool(why)}{why}{';' if why else ','} got {value}")
