"""What the options of a head do not go together with, and why: one table, and the error that is made of it."""

# What an option is that is left alone.
ALONE = {
    "lse": False, "topk": None, "grad_tolerance": 0.0, "gather": None, "chunk_tokens": None, "chunk_vocab": None,
    "max_extra_bytes": None, "fixed_shape": False, "batch_invariant": False, "precision": None,
}  # fmt: skip
FIXED = "it fixes the tiles itself"
WHOLE = "what may be left out is a share of the whole vocabulary's gradient, which no rank has"
IN_FORWARD = "one pass makes the gradient before it is known which parts of it are negligible"
CHUNK = "a chunk of one pass holds the whole vocabulary"
SPLIT = "no other weight than that of one plain head is split"
TWO_HEADS = {
    "batch_invariant": "no product of two heads is made up to a fixed shape",
    "max_extra_bytes": "no plan knows the memory of two heads; bound the tiles with chunk_tokens and chunk_vocab",
}
# Beside what -> the options that must be left alone there -> why.
NOT_TOGETHER: dict[str, dict[str, str]] = {
    "with batch_invariant": {"chunk_tokens": FIXED, "chunk_vocab": FIXED, "grad_tolerance": ""},
    "with lse": {"grad_tolerance": ""},
    "with topk": {
        "grad_tolerance": "",
        "max_extra_bytes": "its memory is not planned; bound the tiles with chunk_tokens and chunk_vocab",
    },
    "with fixed_shape": {"grad_tolerance": "the host has to know how long the lists of ids are"},
    "with precision": {"grad_tolerance": "no list of ids is found for a split weight"},
    "with low_rank": {"batch_invariant": "the term's products have no fixed shape", "precision": SPLIT},
    "with weight_grad": {"grad_tolerance": "sums over lists of ids make a (V, H) gradient of their own"},
    "with vocab_parallel": {
        "grad_tolerance": WHOLE,
        "batch_invariant": "the order of a sum over ranks is the communication library's, and may change with the "
        "number of tokens",
        "max_extra_bytes": "the memory of its collectives is not planned",
    },
    "with a support": {
        "lse": "its engine does not keep it",
        "topk": "its engine does not keep it",
        "grad_tolerance": "",
        "batch_invariant": "its sums depend on how many ids there are",
        "max_extra_bytes": "its memory follows the number of listed ids",
        "precision": SPLIT,
    },
    "with several targets for each token": {"grad_tolerance": "", "max_extra_bytes": ""},
    # Of one head, made in the forward.
    "in one pass": {
        "grad_tolerance": "ids are left out of a second pass",
        "fixed_shape": "the host has to know which rows make a chunk",
        "batch_invariant": "the tiles of a chunk depend on how many tokens it holds",
        "precision": "exponentials of a split weight are not kept",
    },
    # Of two heads, made in the forward.
    "with token_weights": {
        "fixed_shape": "the host has to know which rows make a chunk",
        "grad_tolerance": IN_FORWARD,
        "chunk_vocab": CHUNK,
    },
    "with two heads": TWO_HEADS
    | {
        "extras": "they are not folded with two heads; ask linear_logprobs for them",
        "lse": "it is not returned of two heads; ask linear_logprobs for it",
        "topk": "no list is kept of two heads; ask linear_logprobs for it",
        "precision": SPLIT,
    },
    'with kl_estimator="exact"': TWO_HEADS,
}


def first_broken(options: object, beside: str) -> tuple[str, object, object, str] | None:
    """The first option that is not left alone: its name, what it must be, what it is, and why; None for none."""
    for name, why in NOT_TOGETHER[beside].items():
        given = getattr(options, name)
        if given not in (ALONE[name], "auto"):  # which gives way
            return name, ALONE[name], given, why
    return None


def lacks(options: object, beside: str) -> str | None:
    """The same as what would be needed."""
    found = first_broken(options, beside)
    return None if found is None else f"{found[0]} = {found[1]}, got {found[2]}: {found[3]}"


def check_left_alone(options: object, beside: str) -> None:
    """Raise ValueError for an option that does not go together with what stands beside it."""
    found = first_broken(options, beside)
    if found is not None:
        name, alone, given, why = found
        raise ValueError(f"{name} must be {alone} {beside}{': ' * bool(why)}{why}{';' if why else ','} got {given}")
