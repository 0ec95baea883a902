"""What is measured: named shapes.

Imports no torch, so that the process that starts the measurements stays small.
"""

from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import Any

from benchmark.variants import EVERYWHERE

ITEM_BYTES = {"float32": 4, "bfloat16": 2}

MEMORY = ("memory",)
MEMORY_AND_TIME = ("memory", "time")  # of steps: a forward by itself is timed where errors are measured, too
EVERYTHING = ("memory", "time", "error")

MODELS, TOKENS, VOCABULARY = "models", "tokens", "vocabulary"
RL, FROZEN, FORWARD = "rl", "frozen", "forward"
GROUPS = (MODELS, RL, FROZEN, FORWARD, TOKENS, VOCABULARY)
DENSE = "dense"

# How sure the policy is of the tokens of a batch, from a token's logit above those of its rivals.
MIXED = "mixed"  # evenly from not at all to twice the log of the number of rivals
TAILED = "tailed"  # as a published model's: the likeliest ids and the spread of the others, in `inputs.CURVES`
FLAT = "flat"  # logits of random hidden states, where every vocabulary entry has a share

STEP = "step"  # forward and backward of the loss
LOGPS = "logps"  # log-probabilities without a gradient, as of the old and the reference policy
LOGPS_AND_ENTROPY = "logps and entropy"

BETA = 0.04

# Of what a CPU has.
ON_CPU = ("eager", "liger_chunked", "trl_chunked", "torch_linear_ce", "ours")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One lm_head and one batch.

    Attributes:
        name: unique within a preset.
        batch, tokens: B sequences of T tokens each, padding included.
        hidden_size, vocab: H and V of the (V, H) weight.
        dtype: "float32" or "bfloat16", of hidden states and weight.
        mask_share: share of the B T tokens that is padding, at the ends of sequences of unequal length.
        softcap: of the logits, None for uncapped.
        idle_share: share of the sequences whose advantage is 0.
        beta: of the k3 penalty, 0.0 for none.
        peaks: MIXED, TAILED or FLAT.
        frozen: the head has no gradient.
        task: STEP, LOGPS or LOGPS_AND_ENTROPY.
        variants: what is measured on it; () is everything that every case has.
        groups: what the case is part of; TOKENS and VOCABULARY are axes of the plots.
        quantities: what is worth measuring on it.
    """

    name: str
    batch: int
    tokens: int
    hidden_size: int
    vocab: int
    dtype: str
    mask_share: float = 0.0
    softcap: float | None = None
    idle_share: float = 0.0
    beta: float = BETA
    peaks: str = MIXED
    frozen: bool = False
    task: str = STEP
    variants: tuple[str, ...] = ()
    groups: tuple[str, ...] = (MODELS,)
    quantities: tuple[str, ...] = EVERYTHING

    @property
    def rows(self) -> int:
        """N = B T."""
        return self.batch * self.tokens

    @property
    def lengths(self) -> list[int]:
        """Completion length of each sequence, evenly spread around (1 - mask_share) T."""
        kept = 1.0 - self.mask_share
        spread = min(kept, self.mask_share)
        steps = max(self.batch - 1, 1)
        offsets = [spread * (2 * b / steps - 1) * 0.5 if self.batch > 1 else 0.0 for b in range(self.batch)]
        return [max(1, round((kept + offset) * self.tokens)) for offset in offsets]

    @property
    def live_rows(self) -> int:
        """Tokens that count."""
        return sum(self.lengths)

    @property
    def idle_sequences(self) -> list[int]:
        """Sequences without an advantage, evenly spread, so among short and long ones alike."""
        count = round(self.idle_share * self.batch)
        return [(2 * k + 1) * self.batch // (2 * count) for k in range(count)]

    @property
    def gradient_bytes(self) -> int:
        """The results of a backward, (B, T, H) and, unless it is frozen, (V, H) in the case's dtype."""
        if self.task != STEP:
            return 0
        return (self.rows + (0 if self.frozen else self.vocab)) * self.hidden_size * ITEM_BYTES[self.dtype]

    def with_rows(self, rows: int) -> "Case":
        """The same head on at most `rows` tokens in all."""
        batch = min(self.batch, rows)
        return replace(self, batch=batch, tokens=min(self.tokens, max(1, rows // batch)))

    def tiny(self) -> "Case":
        """A step too small to matter, for what happens once per process."""
        return replace(self.with_rows(4 * self.batch), vocab=min(self.vocab, 512))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Case":
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def cpu_preset() -> list[Case]:
    """Sized for 2 cores and 8 GiB; the first two take two minutes, all of them an hour."""
    main = Case(name="h1024-v32k", batch=4, tokens=512, hidden_size=1024, vocab=32000, dtype="float32", variants=ON_CPU)
    dense = replace(main, name=DENSE, batch=8, tokens=32, hidden_size=256, vocab=16000)
    small = replace(main, hidden_size=512, quantities=MEMORY)
    # Where the two sweeps cross there is one case, part of both.
    crossing = replace(small, name="tokens-512", tokens=128, groups=(TOKENS, VOCABULARY))
    return [
        dense,
        replace(dense, name=RL, **RL_BATCH),
        main,
        replace(main, name="h1024-v32k-half-masked", mask_share=0.5),
        *(replace(small, name=f"tokens-{n}", tokens=n // 4, groups=(TOKENS,)) for n in (256, 1024, 2048)),
        crossing,
        *(replace(crossing, name=f"vocab-{v}", vocab=v, groups=(VOCABULARY,)) for v in (8000, 16000, 64000)),
    ]


# What is worth its time where a case is one of many: neither minutes of compiling nor the slowest.
SWEEP = tuple(name for name in EVERYWHERE if name not in ("compiled", "liger_chunked"))
# Along an axis, where many cases tell what one does not; and without what compiles anew for every vocabulary.
POINTS = tuple(name for name in SWEEP if name != "verl_triton")
VOCABULARIES = tuple(name for name in POINTS if name != "liger_sm90")
# What holds no copy of the logits, 31 GiB each at 131072 tokens; and where a step takes seconds.
LONG = ("ours", "trl_chunked")
LONG_BATCH = (*LONG, "liger_triton", "cce")
FROZEN_HEADS = ("ours", "trl_chunked", "liger_triton", "cce")
LLAMA, QWEN, SMALL_QWEN, GEMMA = "llama-3-8b", "qwen3-1.7b", "qwen3-0.6b", "gemma-2-2b"
HEADS: dict[str, dict[str, Any]] = {
    LLAMA: {"hidden_size": 4096, "vocab": 128256},
    QWEN: {"hidden_size": 2048, "vocab": 151936},
    SMALL_QWEN: {"hidden_size": 1024, "vocab": 151936},
    GEMMA: {"hidden_size": 2304, "vocab": 256000, "softcap": 30.0},
}


# 42% padding, a quarter of the sequences without a signal, no penalty, the probabilities of a published model.
RL_BATCH: dict[str, Any] = {"groups": (RL,), "mask_share": 0.42, "idle_share": 0.25, "beta": 0.0, "peaks": TAILED}
# What is measured unless other cases are named: every token counts, and a batch as RL makes it.
DEFAULT_CASES = {"cpu": (DENSE, RL), "cuda": (LLAMA, f"rl-{LLAMA}")}


def default_cases(
    device: str,
    *,
    tokens: int | None = None,  # of the batch, rounded up to whole sequences
    vocab: int | None = None,
    hidden: int | None = None,
) -> list[Case]:
    """The two default cases of a device, in another shape if any size is given."""
    cases = [case for name in DEFAULT_CASES[device] for case in preset(device) if case.name == name]
    if tokens is vocab is hidden is None:
        return cases
    return [
        replace(
            case,
            name=name,
            tokens=case.tokens if tokens is None else -(-tokens // case.batch),
            vocab=vocab or case.vocab,
            hidden_size=hidden or case.hidden_size,
        )
        for case, name in zip(cases, (DENSE, RL), strict=True)
    ]


def cuda_preset() -> list[Case]:
    """Heads of four published models in bfloat16; what matters most comes first, since a run may end early."""
    llama = Case(name=LLAMA, batch=8, tokens=1024, dtype="bfloat16", groups=(MODELS, TOKENS), **HEADS[LLAMA])

    def of_each(prefix: str, **fields: Any) -> list[Case]:
        return [replace(llama, name=f"{prefix}{name}", **head, **fields) for name, head in HEADS.items()]

    rl = of_each("rl-", **RL_BATCH)
    logps = of_each("logps-", groups=(FORWARD,), task=LOGPS)
    entropies = of_each("logps-entropy-", groups=(FORWARD,), task=LOGPS_AND_ENTROPY)
    flat = replace(llama, name="llama-3-8b-flat", peaks=FLAT, groups=(MODELS,), variants=("trl_chunked", "cce", "ours"))
    point = replace(llama, groups=(TOKENS,), quantities=MEMORY_AND_TIME, variants=POINTS)
    crossing = replace(point, name="tokens-4096", tokens=512, groups=(TOKENS, VOCABULARY))
    vocabularies = [
        replace(crossing, name=f"vocab-{v}", vocab=v, groups=(VOCABULARY,), variants=VOCABULARIES)
        for v in (32768, 262144)
    ]
    frozen = [
        replace(case, name=f"{case.name}-frozen", frozen=True, groups=(FROZEN,), variants=FROZEN_HEADS)
        for case in of_each("")
    ]
    return [
        llama,
        rl[0],
        logps[0],
        replace(entropies[0], variants=SWEEP),
        flat,
        *(replace(llama, name=name, groups=(MODELS,), variants=SWEEP, **HEADS[name]) for name in list(HEADS)[1:]),
        *(replace(case, variants=SWEEP) for case in rl[1:]),
        *frozen,
        *(replace(case, variants=SWEEP) for case in (*logps[1:], *entropies[1:])),
        replace(llama, name="llama-3-8b-32k-tokens", tokens=4096, quantities=MEMORY_AND_TIME, variants=LONG_BATCH),
        replace(point, name="tokens-131072", tokens=16384, variants=LONG),
        crossing,
        *vocabularies,
        *(replace(point, name=f"tokens-{n}", tokens=n // 8) for n in (2048, 1024, 16384)),
        replace(point, name="tokens-262144", tokens=32768, variants=LONG),
    ]


def quick_preset(dtype: str) -> list[Case]:
    """Every code path once, in shapes that say nothing about speed."""
    both = Case(
        name="quick",
        batch=2,
        tokens=64,
        hidden_size=64,
        vocab=2000,
        dtype=dtype,
        groups=(MODELS, TOKENS, VOCABULARY),
    )
    return [
        both,
        replace(both, name="quick-half-masked-softcap", mask_share=0.5, softcap=30.0, groups=(MODELS,)),
        replace(both, name="quick-rl", batch=8, **RL_BATCH),
        replace(both, name="quick-frozen", frozen=True, groups=(FROZEN,)),
        replace(both, name="quick-logps", task=LOGPS, groups=(FORWARD,)),
        replace(both, name="quick-logps-entropy", task=LOGPS_AND_ENTROPY, groups=(FORWARD,)),
        replace(both, name="quick-tokens-512", tokens=256, groups=(TOKENS,), quantities=MEMORY_AND_TIME),
        replace(both, name="quick-vocab-8000", vocab=8000, groups=(VOCABULARY,), quantities=MEMORY_AND_TIME),
    ]


def preset(device: str, *, quick: bool = False, patterns: tuple[str, ...] = ("*",)) -> list[Case]:
    """Cases of a kind of device ("cpu" or "cuda") whose names or groups match one of the globs."""
    if quick:
        cases = quick_preset("bfloat16" if device == "cuda" else "float32")
    else:
        cases = cuda_preset() if device == "cuda" else cpu_preset()
    return [c for c in cases if any(fnmatch(name, p) for name in (c.name, *c.groups) for p in patterns)]
