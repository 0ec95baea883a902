"""Everything of a call of the head that is no tensor: its options, and the forms that engines and operators take."""

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import torch

from liger_rl.head.checks import (
    FLOAT_DTYPES,
    auto_tolerance,
    check_budget,
    check_chunk,
    check_count,
    check_extras,
    check_flag,
    check_tolerance,
    check_transform,
)
from liger_rl.head.rules import check_left_alone
from liger_rl.kernels.statistics import EXTRAS
from liger_rl.kernels.transform import LogitTransform

IDENTITY = LogitTransform()
AGREED = ("entropy", "lse", "topk", "fixed_shape")  # between ranks that share a vocabulary
Gather = Callable[..., AbstractContextManager]
Tolerance = float | Literal["auto"]
AUTO_TOLERANCE = auto_tolerance(os.environ.get("LIGER_RL_GRAD_TOLERANCE"))


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """How a head's log-probabilities are computed, and what comes with them.

    Attributes:
        transform: temperature, softcap and scale of the logits.
        entropy: also return each token's entropy, from the same pass.
        lse: also return log sum_v exp z_v of each token, differentiable; not with a grad_tolerance or a support.
        topk: K of at most 1024, also return each token's K largest log-probabilities and their ids, without a
            gradient, in descending order, of equal ones the smaller id first. It takes tiles of logits in memory, and
            goes with no grad_tolerance, max_extra_bytes, support or torch.compile.
        extras: names of further statistics wanted from it, among "log_sum_sq_probs", "mean_logits" and "is_top1".
        grad_tolerance: largest error of each token's dL/dlogits, relative to the token's own, in the Euclidean norm, in
            [0, 1); 0 is exact. "auto" is 3e-4 where products are 16-bit and no option asks for exactness, and 0 beside
            every option that does not go with a tolerance.
            The backward then sums over a list of ids for each token, whatever the loss. What a token leaves out of 256
            neighbouring ids is shared among them, so that dL/dlogits still adds up to zero. 3e-4 is an eighth of what
            rounding the gradient to bfloat16 does to it. Where lists would be long, above about 2 nats of entropy in
            the mean, the exact backward runs. It also runs on CPU, on GPUs without products of our own (see
            docs/design.md), in float32, with rows of the weight that do not start at multiples of 16
            bytes, with under 512 live tokens, where a chunk is named, or beside a low-rank term. The `reason` of
            `plan_linear_logprobs` says which.
        compute_dtype: dtype of the products' factors, whatever autocast says: float32 runs a bfloat16 head in float32
            without a float32 copy of it. None takes autocast's, or the inputs' own.
        gather: for a weight that is whole only now and then (DeepSpeed ZeRO-3): `gather(weight)`, or
            `gather(weight, bias)`, returns a context in which they are. Entered once in the forward, and once in the
            backward.
        chunk_tokens, chunk_vocab: upper bounds of a tile's sides; None chooses them.
        max_extra_bytes: what both directions may take beside inputs, results and gradients, from which the chunks and
            kernels follow as `plan_linear_logprobs` says and shows; None takes a default workspace.
        fixed_shape: never wait for the device, so that a CUDA graph can capture forward and backward: every token goes
            through every product, masked ones and those without a gradient as zeros. Values and gradients are the same
            up to rounding, except that a live target outside [0, V) cannot raise: its token is masked.
        batch_invariant: a token's log-probability, entropy and extras are a function of its own row, its target and the
            head alone, bit for bit, however tokens are packed, masked and split over calls, on one device with one
            version of torch. Products are made up to fixed shapes with zeros, to multiples of 512 tokens where the
            product of our own applies and of 128 elsewhere, where it rests on the library treating all rows of a
            product alike (see `liger_rl.head.engines.two_pass.invariant`). For gradients nothing is promised.

    Raises:
        TypeError, ValueError: an option by itself, or two that do not go together.
    """

    transform: LogitTransform = IDENTITY
    entropy: bool = False
    lse: bool = False
    topk: int | None = None
    extras: Collection[str] = ()
    grad_tolerance: Tolerance = "auto"
    compute_dtype: torch.dtype | None = None
    gather: Gather | None = None
    chunk_tokens: int | None = None
    chunk_vocab: int | None = None
    max_extra_bytes: int | None = None
    fixed_shape: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_transform(self.transform)
        check_flag("entropy", self.entropy)
        check_flag("lse", self.lse)
        if self.topk is not None:
            check_count("topk", self.topk, least=1)
        check_extras(self.extras)
        check_flag("fixed_shape", self.fixed_shape)
        check_chunk("chunk_tokens", self.chunk_tokens)
        check_chunk("chunk_vocab", self.chunk_vocab)
        check_tolerance(self.grad_tolerance)
        check_flag("batch_invariant", self.batch_invariant)
        check_budget(self.max_extra_bytes)
        if self.compute_dtype is not None and self.compute_dtype not in FLOAT_DTYPES:
            raise TypeError(f"compute_dtype must be float32, bfloat16, float16 or None, got {self.compute_dtype}")
        if self.gather is not None and not callable(self.gather):
            raise TypeError(f"gather must be callable or None, got {type(self.gather).__name__}")
        if self.max_extra_bytes is not None and self.names_chunk:
            raise ValueError("max_extra_bytes chooses the chunks; give it or chunk_tokens and chunk_vocab, not both")
        for name in ("batch_invariant", "lse", "topk", "fixed_shape"):
            if getattr(self, name):
                check_left_alone(self, f"with {name}")

    def facts(self) -> dict[str, object]:
        """What ranks that share a vocabulary must agree on, by name."""
        agreed: dict[str, object] = {name: getattr(self, name) for name in AGREED}
        transform = "a temperature for each token" if self.transform.per_token else self.transform
        return {"transform": transform, "extras": sorted(self.extras), **agreed}

    @property
    def named_tolerance(self) -> float:
        """What must not stand beside some options: 0.0 for "auto", which gives way to them."""
        return 0.0 if self.grad_tolerance == "auto" else self.grad_tolerance

    @property
    def names_chunk(self) -> bool:
        return self.chunk_tokens is not None or self.chunk_vocab is not None


class HeadKeywords(TypedDict, total=False):
    """The fields of `HeadOptions` as keywords of a function."""

    transform: LogitTransform
    entropy: bool
    lse: bool
    topk: int | None
    extras: Collection[str]
    grad_tolerance: Tolerance
    compute_dtype: torch.dtype | None
    gather: Gather | None
    chunk_tokens: int | None
    chunk_vocab: int | None
    max_extra_bytes: int | None
    fixed_shape: bool
    batch_invariant: bool


KNOWN = tuple(HeadKeywords.__annotations__)
# Options that change how it is computed, and not what. Frameworks pass them on.
HOW = ("grad_tolerance", "chunk_tokens", "chunk_vocab", "max_extra_bytes", "fixed_shape", "batch_invariant")


def options_of(function: str, keywords: HeadKeywords) -> HeadOptions:
    """HeadOptions(**keywords); a TypeError that names `function` and lists what it knows for an unknown one."""
    for name in keywords:
        if name not in KNOWN:
            raise TypeError(f"{function} got an unexpected argument {name!r}; its options are {', '.join(KNOWN)}")
    # torch.compile cannot trace a default that is an object of a class.
    return HeadOptions(**{"transform": IDENTITY, **keywords})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class EngineOptions(HeadOptions):
    """The same, resolved: what every engine is given. A budget has become chunks."""

    grad_tolerance: float
    compute_dtype: torch.dtype
    kernels_fit: bool = False  # the chunks come from a memory budget that kernels without them fit, too

    def __post_init__(self) -> None:
        """What was asked for has been checked; what became of it need not be."""

    @property
    def chunks_are_free(self) -> bool:
        """No chunk is named, so kernels that make no tile of logits may be used."""
        return self.kernels_fit or not self.names_chunk


def resolved(
    options: HeadOptions,
    compute_dtype: torch.dtype,
    *,
    grad_tolerance: float | None = None,
    chunks: tuple[int, int] | None = None,
    kernels_fit: bool = False,
) -> EngineOptions:
    """`options` for an engine: in this dtype, with another tolerance or a budget's chunks where these are given.

    Without one, a tolerance of "auto" is what the options allow; whether it has an effect is seen later.
    """
    if grad_tolerance is None:
        grad_tolerance = options.named_tolerance
        exact = options.lse or options.topk is not None or options.batch_invariant or options.fixed_shape
        if options.grad_tolerance == "auto" and compute_dtype.itemsize == 2 and not (exact or options.names_chunk):
            grad_tolerance = AUTO_TOLERANCE
    chunk_tokens, chunk_vocab = chunks or (options.chunk_tokens, options.chunk_vocab)
    return EngineOptions(
        transform=options.transform,
        entropy=options.entropy,
        lse=options.lse,
        topk=options.topk,
        extras=options.extras,
        grad_tolerance=grad_tolerance,
        compute_dtype=compute_dtype,
        gather=options.gather,
        chunk_tokens=chunk_tokens,
        chunk_vocab=chunk_vocab,
        fixed_shape=options.fixed_shape,
        batch_invariant=options.batch_invariant,
        kernels_fit=kernels_fit,
    )


class OpOptions(NamedTuple):
    """The same in types that an operator's schema has."""

    temperature: float
    softcap: float | None
    scale: float
    entropy: bool
    lse: bool
    extras: str  # names with commas between
    compute_dtype: torch.dtype
    chunk_tokens: int | None
    chunk_vocab: int | None
    grad_tolerance: float
    fixed_shape: bool
    batch_invariant: bool
    kernels_fit: bool
    targets_name: str  # the caller's

    def resolved(self) -> EngineOptions:
        return EngineOptions(
            transform=LogitTransform(temperature=self.temperature, softcap=self.softcap, scale=self.scale),
            extras=frozenset(filter(None, self.extras.split(","))),
            **{name: getattr(self, name) for name in SAME},
        )


# Fields that are the same in both.
SAME = ("entropy", "lse", *OpOptions._fields[OpOptions._fields.index("compute_dtype") : -1])
# As a schema, in the order of OpOptions.
OP_OPTIONS = (
    "float temperature, float? softcap, float scale, bool entropy, bool lse, str extras, "
    "ScalarType compute_dtype, SymInt? chunk_tokens, SymInt? chunk_vocab, float grad_tolerance, "
    "bool fixed_shape, bool batch_invariant, bool kernels_fit, str targets_name"
)


def flat_options(options: EngineOptions, targets_name: str) -> tuple[Any, ...]:
    """In the order of OpOptions, which torch 2.8 cannot trace the making of."""
    transform = options.transform
    assert not transform.per_token  # refused where the call is checked
    return (
        transform.temperature,
        transform.softcap,
        transform.scale,
        options.entropy,
        options.lse,
        ",".join([name for name in EXTRAS if name in options.extras]),
        options.compute_dtype,
        options.chunk_tokens,
        options.chunk_vocab,
        options.grad_tolerance,
        options.fixed_shape,
        options.batch_invariant,
        options.kernels_fit,
        targets_name,
    )
