"""What is measured: named shapes that know their work and the bytes of their logits.

Imports no torch, so that the process that starts the measurements stays small.
"""

from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import Any

ITEM_BYTES = {"float32": 4, "bfloat16": 2}

MEMORY = ("memory",)
MEMORY_AND_TIME = ("memory", "time")
EVERYTHING = ("memory", "time", "error")

MODELS, TOKENS, VOCABULARY = "models", "tokens", "vocabulary"


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
        groups: what the case is part of; TOKENS and VOCABULARY are the two axes of the memory plot.
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
    def product_flops(self) -> int:
        """2 N H V of one product, over the tokens that count."""
        return 2 * self.live_rows * self.hidden_size * self.vocab

    @property
    def floor_flops(self) -> int:
        """6 N H V: logits, gradient of hidden, gradient of weight, each once."""
        return 3 * self.product_flops

    @property
    def recompute_flops(self) -> int:
        """8 N H V: the same with the logits computed twice."""
        return 4 * self.product_flops

    @property
    def logits_bytes(self) -> int:
        """One copy of the (B, T, V) logits in the case's dtype."""
        return self.rows * self.vocab * ITEM_BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """The results of a backward, (B, T, H) and (V, H) in the case's dtype."""
        return (self.rows + self.vocab) * self.hidden_size * ITEM_BYTES[self.dtype]

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
    """Sized for 2 cores and 8 GiB."""
    main = Case(name="h1024-v32k", batch=4, tokens=512, hidden_size=1024, vocab=32000, dtype="float32")
    small = replace(main, hidden_size=512, quantities=MEMORY)
    # Where the two sweeps cross there is one case, part of both.
    crossing = replace(small, name="tokens-512", tokens=128, groups=(TOKENS, VOCABULARY))
    return [
        main,
        replace(main, name="h1024-v32k-half-masked", mask_share=0.5),
        *(replace(small, name=f"tokens-{n}", tokens=n // 4, groups=(TOKENS,)) for n in (256, 1024, 2048)),
        crossing,
        *(replace(crossing, name=f"vocab-{v}", vocab=v, groups=(VOCABULARY,)) for v in (8000, 16000, 64000)),
    ]


def cuda_preset() -> list[Case]:
    """Heads of three published models in bfloat16; a sweep's points are memory alone, because a process is 10 s."""
    llama = Case(
        name="llama-3-8b",
        batch=8,
        tokens=1024,
        hidden_size=4096,
        vocab=128256,
        dtype="bfloat16",
        groups=(MODELS, TOKENS),
    )
    point = replace(llama, groups=(TOKENS,), quantities=MEMORY)
    crossing = replace(point, name="tokens-4096", tokens=512, groups=(TOKENS, VOCABULARY))
    return [
        llama,
        replace(llama, name="qwen3-1.7b", hidden_size=2048, vocab=151936, groups=(MODELS,)),
        replace(llama, name="gemma-2-2b", hidden_size=2304, vocab=256000, softcap=30.0, groups=(MODELS,)),
        replace(llama, name="llama-3-8b-half-masked", mask_share=0.5, groups=(MODELS,)),
        replace(llama, name="llama-3-8b-32k-tokens", tokens=4096, quantities=MEMORY_AND_TIME),
        *(replace(point, name=f"tokens-{n}", tokens=n // 8) for n in (1024, 2048, 16384)),
        crossing,
        *(replace(crossing, name=f"vocab-{v}", vocab=v, groups=(VOCABULARY,)) for v in (32768, 65536, 262144)),
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
        replace(both, name="quick-tokens-512", tokens=256, groups=(TOKENS,), quantities=MEMORY),
        replace(both, name="quick-vocab-8000", vocab=8000, groups=(VOCABULARY,), quantities=MEMORY),
    ]


def preset(device: str, *, quick: bool = False, pattern: str = "*") -> list[Case]:
    """Cases of a kind of device ("cpu" or "cuda") whose names match a glob."""
    if quick:
        cases = quick_preset("bfloat16" if device == "cuda" else "float32")
    else:
        cases = cuda_preset() if device == "cuda" else cpu_preset()
    return [case for case in cases if fnmatch(case.name, pattern)]
