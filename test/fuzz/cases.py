"""Strategies: each draws one call of a public function, as plain tensors and options.

A case is a function of its seed, which it shows: `head_cases.build(random.Random(seed), "cpu")`. Without FUZZ_CASES in
the environment the cases are the same in every run.
"""

import math
import os
import random
from dataclasses import dataclass, field, fields, replace

import torch
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from liger_rl.kernels.statistics import EXTRAS

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# On a GPU a case may compile a kernel of its own, which takes seconds.
CASES = int(os.environ.get("FUZZ_CASES", "100" if torch.cuda.is_available() else "500"))
# Without shrinking for who only wants to know whether a case fails.
PHASES = [Phase.generate, *([Phase.shrink] if os.environ.get("FUZZ_SHRINK", "1") == "1" else [])]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fuzz(share: float) -> settings:
    """How a test takes its share of all cases."""
    return settings(
        max_examples=max(1, round(share * CASES)), derandomize="FUZZ_CASES" not in os.environ, database=None,
        deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, phases=PHASES,
    )  # fmt: skip


def strategy(build):
    """A function of (random.Random, device) as a strategy, which keeps it as `build`.

    Hypothesis draws the seed alone: its own choices come in clumps, and of 500 cases each option must be met by some.
    """

    def cases(device: str = DEVICE) -> st.SearchStrategy:
        def of(seed: int):
            case = build(random.Random(seed), device)
            case.seed = seed
            return case

        return st.integers(0, 2**62).map(of)

    cases.build = build
    return cases


class Shown:
    def __repr__(self) -> str:
        """Options in full, tensors as dtype, shape and strides."""
        shown = {"seed": getattr(self, "seed", None)} | {f.name: getattr(self, f.name) for f in fields(self)}
        return f"{type(self).__name__}({_brief(shown)})"

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        printer.text(repr(self))


def _brief(value):
    """With its tensors replaced by their descriptions."""
    if isinstance(value, Tensor):
        return f"<{str(value.dtype)[6:]} {tuple(value.shape)} strides {value.stride()}>"
    if isinstance(value, dict):
        return {k: _brief(v) for k, v in value.items()}
    return [_brief(v) for v in value] if isinstance(value, (list, tuple)) else value


class Numbers:
    """Random tensors of one seed."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype = F32) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * std).to(self.device, dtype)

    def share(self, shape, probability: float) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < probability).to(self.device)

    def below(self, bound: int, shape) -> Tensor:
        return torch.randint(0, bound, tuple(shape), generator=self.generator).to(self.device)


def rarely(draw) -> bool:
    return draw.randint(0, 4) == 4


def one(draw, *values):
    return draw.choice(values)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another place in memory, NaN between them."""
    if layout == "contiguous" or x.dim() < 2 or x.numel() == 0:
        return x
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    wide = x.new_full((*x.shape[:-2], 2 * x.shape[-2] + 1, x.shape[-1] + 3), torch.nan)
    return wide[..., 1::2, 2:-1].copy_(x)


LAYOUTS = ("contiguous", "transposed", "sliced")


def shapes(draw, device: str) -> tuple[tuple[int, ...], int, int]:
    """-> (B, T) or (N,), H, V; on a GPU such as its kernels with epilogues take, or small ones."""
    if device == "cuda" and not rarely(draw):
        tokens = draw.randint(512, 900)
        lead = (2, tokens // 2) if draw.choice((False, True)) else (tokens,)
        return lead, 8 * draw.randint(1, 32), draw.randint(1, 4000)
    lead = one(draw, (draw.randint(1, 4), draw.randint(1, 17)), (one(draw, draw.randint(0, 70), draw.randint(0, 3)),))
    width = one(draw, draw.randint(1, 40), draw.randint(1, 3), 8, 16)
    return lead, width, one(draw, draw.randint(1, 600), draw.randint(1, 600), draw.randint(1, 5), 255, 256, 257, 513)


def transforms(draw) -> dict:
    return {
        "temperature": one(draw, 1.0, 0.7, 1.9, 0.3),
        "softcap": one(draw, None, None, 5.0, 30.0, 1.5),
        "scale": one(draw, 1.0, 1.0, 0.25, 2.0),
    }


def masks(draw, numbers: Numbers, shape) -> Tensor | None:
    kept = one(draw, None, 0.7, 0.7, 0.2, 0.0)
    mask = None if kept is None else numbers.share(shape, kept)
    return mask if mask is None else mask.to(one(draw, torch.bool, torch.int64, F32, torch.uint8))


def upstreams(draw, numbers: Numbers, shape) -> Tensor:
    zeros = one(draw, 0.3, 0.0, 1.0, 0.9)
    return numbers.normal(*shape).masked_fill(numbers.share(shape, zeros), 0.0)


def targets_of(draw, numbers: Numbers, logits: Tensor, negative: bool) -> Tensor:
    """(N,) ids for (N, V) logits: any, likely, unlikely; some negative."""
    n, vocab = logits.shape
    ids = numbers.below(vocab, (n,))
    kind = one(draw, "any", "likely", "unlikely", "last")
    if kind != "any" and n:
        order = logits.float().argsort(-1)
        chosen = {"likely": order[:, -1], "unlikely": order[:, 0], "last": torch.full_like(ids, vocab - 1)}[kind]
        ids = torch.where(numbers.share((n,), 0.7), chosen, ids)
    return torch.where(numbers.share((n,), 0.2), -100, ids) if negative else ids


@dataclass(repr=False, kw_only=True)
class HeadCase(Shown):
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    mask: Tensor | None
    bias: Tensor | None
    transform: dict
    autocast: torch.dtype | None
    compute_dtype: torch.dtype | None
    wants: dict[str, bool]  # gradient wanted, by name of the input
    options: dict = field(default_factory=dict)  # chunks, budget, entropy, extras
    support: dict | None = None  # fields of a Support
    upstream: tuple[Tensor, ...] | None = None
    ids: Tensor | None = None  # (..., K), in place of the targets, which are the largest of each token's

    @property
    def live(self) -> Tensor:
        live = self.targets.long() >= 0
        return live if self.mask is None else live & (self.mask != 0)

    @property
    def compute(self) -> torch.dtype:
        if self.support is not None and bool((self.support["offsets"].diff() > 0).all()):
            return F32  # listed ids are multiplied as they are
        return self.compute_dtype or self.autocast or self.hidden.dtype


# hidden, weight, autocast, compute_dtype
DTYPES = (
    *[(F32, F32, None, None)] * 6, (BF16, BF16, None, None), (BF16, BF16, None, None), (F16, F16, None, None),
    (F32, F32, BF16, None), (BF16, F32, BF16, None), (F32, F32, F16, None), (BF16, BF16, None, F32),
    (BF16, F32, None, F32), (F32, F32, None, BF16), (F16, BF16, None, F32), (F32, BF16, BF16, F32),
)  # fmt: skip


def head_inputs(draw, device: str, *, banned: bool = True) -> HeadCase:
    numbers = Numbers(draw.getrandbits(62), device)
    shape, width, vocab = shapes(draw, device)
    tokens = math.prod(shape)
    dtype, weight_dtype, autocast, compute_dtype = draw.choice(DTYPES)
    std = one(draw, 1.0, 0.1, 4.0, 12.0)
    if rarely(draw) and 0 < tokens <= 70:  # dL/dweight is dL/dlogits itself then
        width, hidden = tokens, torch.eye(tokens, device=device).to(dtype)
        weight = numbers.normal(vocab, width, std=std, dtype=weight_dtype)
    else:
        hidden = numbers.normal(tokens, width, dtype=dtype)
        weight = numbers.normal(vocab, width, std=std * width**-0.5, dtype=weight_dtype)
    targets = targets_of(draw, numbers, hidden.float() @ weight.float().T, draw.choice((False, True)))
    mask = masks(draw, numbers, shape)
    bias = None
    if draw.choice((False, True)):
        bias = numbers.normal(vocab, dtype=one(draw, dtype, F32))
        if banned and draw.choice((False, True)):
            bias[numbers.share((vocab,), one(draw, 0.2, 0.9)) & (torch.arange(vocab, device=device) > 0)] = -torch.inf
    hidden = laid_out(hidden.reshape(*shape, width), draw.choice(LAYOUTS))
    if rarely(draw) and len(shape) == 2 and hidden.numel():
        hidden = hidden[:, :1].expand(-1, shape[1], -1)
    case = HeadCase(
        hidden=hidden, weight=laid_out(weight, draw.choice(LAYOUTS)),
        targets=laid_out(targets.reshape(shape).to(one(draw, torch.int64, torch.int64, torch.int32)), "transposed"),
        mask=None if mask is None else laid_out(mask, "transposed"), bias=bias,
        transform=transforms(draw), autocast=autocast, compute_dtype=compute_dtype, wants={},
    )  # fmt: skip
    names = ["hidden", "weight", *(["bias"] if bias is not None else [])]
    case.wants = {name: not rarely(draw) for name in names}
    poison = one(draw, 0.0, torch.nan, torch.inf)
    if poison != 0.0 and not case.live.all() and hidden.stride(0) != 0 and 0 not in hidden.stride():
        hidden[~case.live] = poison
    return case


def tiles(draw, options: dict) -> dict:
    """Options of tiles and shape, at most one kind of them."""
    kind = one(draw, "none", "chunks", "chunks")
    if kind == "chunks":
        options["chunk_tokens"] = one(draw, None, 1, 7, 16, 33, 1000)
        options["chunk_vocab"] = one(draw, None, 1, 5, 64, 255, 256, 257, 4000)
    return options


def supports(draw, numbers: Numbers, case: HeadCase) -> dict:
    """Rows of ids, some of them repeated, most with the token's target; some empty, if that may be."""
    vocab, targets = case.weight.shape[0], case.targets.reshape(-1).long()
    # The products of an empty row are rounded to the compute dtype; for the oracle all rows' are.
    one_dtype = case.hidden.dtype == case.weight.dtype == case.compute
    n, empty = targets.numel(), one(draw, False, True) and one_dtype
    sizes = numbers.below(one(draw, 2, 4, 12, 60), (n,))
    sizes = torch.where(numbers.share((n,), one(draw, 0.0, 0.5, 1.0)), 1, sizes)
    sizes = sizes if empty else sizes.clamp(min=1)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    ids = numbers.below(vocab, (int(offsets[-1]),))
    holds_target = (sizes > 0) & (targets >= 0) & numbers.share((n,), 0.8)
    place = offsets[:-1] + numbers.below(60, (n,)) % sizes.clamp(min=1)
    ids[place[holds_target]] = targets[holds_target]
    dtype = one(draw, torch.int64, torch.int32)
    keys = torch.repeat_interleave(torch.arange(n, device=ids.device), sizes) * vocab + ids
    distinct = one(draw, False, True) and keys.unique().numel() == keys.numel()
    return {"token_ids": ids.to(dtype), "offsets": offsets.to(dtype), "distinct": distinct}


@strategy
def head_cases(draw, device: str) -> HeadCase:
    options = {"entropy": draw.choice((False, True))}
    if one(draw, False, False, True):
        options["extras"] = one(draw, EXTRAS[:1], EXTRAS, ("mean_logits",))
    tiles(draw, options)
    case = head_inputs(draw, device)
    case.options = options
    numbers = Numbers(draw.getrandbits(62), device)
    options["lse"] = draw.choice((False, True))
    case.upstream = tuple(upstreams(draw, numbers, case.targets.shape) for _ in range(4))
    return case


@strategy
def support_cases(draw, device: str) -> HeadCase:
    case = head_inputs(draw, device, banned=False)
    case.options = {"entropy": draw.choice((False, True))}
    numbers = Numbers(draw.getrandbits(62), device)
    case.support = supports(draw, numbers, case)
    case.upstream = tuple(upstreams(draw, numbers, case.targets.shape) for _ in range(4))
    return case


@strategy
def several_cases(draw, device: str) -> HeadCase:
    """K targets for each token, some of them repeated, some negative; lse."""
    case = head_cases.build(draw, device)
    options = case.options
    options["extras"] = one(draw, (), ("mean_logits",))
    vocab, count = case.weight.shape[0], one(draw, 1, 2, 7, 70)
    options["lse"] = draw.choice((False, True))
    numbers = Numbers(draw.getrandbits(62), device)
    shape = (*case.targets.shape, count)
    ids = numbers.below(vocab, shape)
    ids[..., :1] = case.targets[..., None]
    ids = torch.where(numbers.share(shape, one(draw, 0.0, 0.5)), ids[..., :1], ids)
    # A token that does not count may hold anything, and stays one.
    case.ids = torch.where(numbers.share(shape, one(draw, 0.0, 0.3)) | (ids[..., :1] < 0), -100, ids)
    case.targets = case.ids.amax(-1)
    case.upstream = tuple(upstreams(draw, numbers, s) for s in (shape, *[shape[:-1]] * 3))
    return case


@dataclass(repr=False, kw_only=True)
class LogitsCase(Shown):
    logits: Tensor
    targets: Tensor
    mask: Tensor | None
    transform: dict
    options: dict
    upstream: tuple[Tensor, Tensor]
    spare_position: bool = False  # one more position than targets, which predicts nothing

    live = HeadCase.live


@strategy
def logits_cases(draw, device: str, banned: bool = True, of_loss: bool = False) -> LogitsCase:
    numbers = Numbers(draw.getrandbits(62), device)
    shape, _, vocab = shapes(draw, device)
    vocab = one(draw, *[vocab] * 5, 2100)  # several blocks of a kernel
    dtype = one(draw, F32, F32, BF16, F16)
    spare = of_loss and len(shape) == 2 and draw.choice((False, True))
    full = (shape[0], shape[1] + 1) if spare else shape
    logits = numbers.normal(*full, vocab, std=one(draw, 1.0, 4.0, 12.0))
    if banned and rarely(draw):
        logits[numbers.share(logits.shape, 0.3) & (torch.arange(vocab, device=device) > 0)] = -torch.inf
    logits = logits.to(dtype)
    flat = (logits[:, :-1] if spare else logits).reshape(-1, vocab)
    targets = targets_of(draw, numbers, flat, draw.choice((False, True))).reshape(shape)
    mask = masks(draw, numbers, shape)
    layout = draw.choice(LAYOUTS)
    if layout == "sliced" and len(full) == 2:  # [:, :-1] of something wider
        logits = torch.cat([logits, logits[:, :1]], 1)[:, :-1]
    elif layout == "transposed" and len(full) == 2:
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    case = LogitsCase(
        logits=logits, targets=targets, mask=mask, transform=transforms(draw), options={},
        upstream=tuple(upstreams(draw, numbers, shape) for _ in range(2)), spare_position=spare,
    )  # fmt: skip
    if one(draw, False, True):
        rows = logits[:, :-1] if spare else logits
        rows[~case.live] = torch.nan
    return case


OBJECTIVES = {
    "grpo": ("PPOClip", "SequenceMean"), "bnpo": ("PPOClip", "TokenMean"), "dapo": ("PPOClip", "GlobalTokenMean"),
    "dr_grpo": ("PPOClip", "FixedLengthMean"), "luspo": ("PPOClip", "SequenceSum"),
    "cispo": ("CISPO", "GlobalTokenMean"), "sapo": ("SAPO", "SequenceMean"), "vespo": ("VESPO", "GlobalTokenMean"),
    "gspo": ("PPOClip", "SequenceMean"), "gspo_token": ("PPOClip", "SequenceMean"), "gmpo": ("GMPO", "SequenceMean"),
    "gpg": ("Reinforce", "GlobalTokenMean"), "dppo": ("DPPO", "GlobalTokenMean"),
    "ipo": ("IPO", "GlobalTokenMean"), "icepop": ("IcePop", "GlobalTokenMean"),
    "dppo_kl": ("DPPOKL", "GlobalTokenMean"),
}  # fmt: skip
LEVELS = {"gspo": "sequence", "gspo_token": "sequence_token"}
REDUCTIONS = ("SequenceMean", "SequenceSum", "TokenMean", "GlobalTokenMean", "FixedLengthMean", "TokenSum")


@dataclass(repr=False, kw_only=True)
class PolicyCase(Shown):
    """Columns as given to the package, (B, T) or (N,), with whatever is at masked tokens; logps and entropy too."""

    loss_type: str
    objective: str
    objective_options: dict
    reduction: str | None
    reduction_options: dict
    beta: float
    estimator: str
    weighted: bool
    entropy_coef: float
    corrections: list[tuple[str, float]]
    sampler: dict | None
    metrics: str
    mask: Tensor | None
    advantages: Tensor
    row: Tensor
    rows: int
    old: Tensor | None = None
    ref: Tensor | None = None
    sampling: Tensor | None = None
    importance: Tensor | None = None
    num_sequences: float | None = None
    items: float | None = None
    head: HeadCase | None = None
    logits: LogitsCase | None = None
    live: Tensor = None
    logps: Tensor | None = None
    entropy: Tensor | None = None
    default_dtype: torch.dtype = F32  # torch's, which changes nothing

    def columns(self) -> oracle.Columns:
        live = self.live.reshape(-1)

        def clean(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            wide = x if x.shape == self.live.shape else x.reshape(-1, 1).expand(self.live.shape)
            return wide.reshape(-1).double().masked_fill(~live, 0.0)

        return oracle.Columns(
            live, clean(self.advantages), clean(self.old), clean(self.ref), clean(self.sampling),
            clean(self.importance), self.row.reshape(-1), self.rows,
            self.rows if self.num_sequences is None else self.num_sequences, self.items,
        )  # fmt: skip


def objective_options(draw, loss_type: str, objective: str) -> dict:
    o = {"importance_sampling_level": LEVELS[loss_type]} if loss_type in LEVELS else {}
    if objective == "PPOClip":
        o |= {"epsilon_low": one(draw, 0.2, 0.0, 0.05), "epsilon_high": one(draw, 0.2, 0.0, 0.4)}
    if objective == "PPOClip":
        if one(draw, False, True):
            o["delta"] = one(draw, 1.5, 1.0, 3.0)
        if one(draw, False, True):
            o["dual_clip"] = one(draw, 1.2, 3.0)
        o["mean_advantages"] = rarely(draw)
    choices = {
        "CISPO": {"epsilon_high": (0.2, 1.1, 5.0), "ratio_min": (0.0, 0.1, 0.8)},
        "SAPO": {"sapo_temperature_pos": (1.0, 0.5, 3.0), "sapo_temperature_neg": (1.05, 2.0)},
        "VESPO": {
            "vespo_k_pos": (2.0, 0.5), "vespo_lambda_pos": (3.0, 1.0), "vespo_k_neg": (3.0, 1.0),
            "vespo_lambda_neg": (2.0, 0.5),
        },
        "GMPO": {
            "epsilon_low": (0.4, 0.0, 0.1), "epsilon_high": (0.4, 0.2), "mean_importance_ratio": (False, True),
        },
        "DPPO": {"divergence_low": (0.2, 0.01), "divergence_high": (0.2, 0.03), "ratio_cap": (20.0, 1.1)},
        "IPO": {"ipo_threshold": (0.3, 0.01, 0.05)},
        "IcePop": {"ratio_min": (0.2, 0.0, 0.9), "ratio_max": (5.0, 1.1)},
        "DPPOKL": {"divergence_low": (0.2, 0.01), "divergence_high": (0.2, 0.005), "ratio_cap": (20.0, 1.1)},
    }  # fmt: skip
    o |= {name: one(draw, *values) for name, values in choices.get(objective, {}).items()}
    if objective == "CISPO":
        o["ratio_min"] = min(o["ratio_min"], o["epsilon_high"])
    return o


def policy_inputs(draw, numbers: Numbers, live: Tensor, logps: Tensor, mask: Tensor | None, per_token: bool):
    """live, logps (clean, float64): (B, T) or (N,)."""
    shape, device = live.shape, live.device
    loss_type = one(draw, *sorted(OBJECTIVES))
    name, reduction = OBJECTIVES[loss_type]
    if per_token:
        reduction = None
    elif one(draw, False, True):
        reduction = one(draw, *REDUCTIONS)
    o = {}
    if reduction == "FixedLengthMean":
        o["max_completion_length"] = one(draw, 13, 100.0)
    if reduction == "GlobalTokenMean":
        o["world_size"] = one(draw, 1, 1, 4)
    if len(shape) == 2:
        rows, row = shape[0], torch.arange(shape[0], device=device)[:, None].expand(shape)
    else:
        rows = one(draw, 1, 2, 3, 4, 5)
        row = numbers.below(rows, shape)
        row = row.sort().values if one(draw, False, True) else row
    per_row = len(shape) == 2 and one(draw, False, True)
    spread = one(draw, 0.3, 0.05, 1.5)

    def near() -> Tensor:
        return (logps + spread * numbers.normal(*shape)).float()

    case = PolicyCase(
        loss_type=loss_type, objective=name, objective_options=objective_options(draw, loss_type, name),
        reduction=reduction, reduction_options=o, beta=one(draw, 0.0, 0.04, 1.0), mask=mask,
        estimator=one(draw, "k3", "k1", "k2"), weighted=one(draw, False, True), corrections=[], sampler=None,
        entropy_coef=0.0 if per_token else one(draw, 0.0, 0.0, 0.01, -1.0), row=row, rows=rows, live=live,
        metrics="none" if per_token else one(draw, "loss", "none", "basic", "with_entropy"),
        old=None if rarely(draw) else near(),
        advantages=numbers.normal(*(shape[:1] if per_row else shape)),
        num_sequences=one(draw, None, None, 8, 3.0), items=one(draw, None, 2673, 7.0),
    )  # fmt: skip
    case.advantages = case.advantages.masked_fill(numbers.share(case.advantages.shape, one(draw, 0.0, 0.4)), 0.0)
    if name == "GMPO":  # one advantage per sequence, for which alone it is defined
        of_rows = numbers.normal(rows)
        case.advantages = of_rows if per_row else of_rows[row]
    if case.beta:
        case.ref = near()
    if per_token:
        case.importance = numbers.normal(*shape).abs() + 0.1 if rarely(draw) else None
    else:
        extra = one(draw, "none", "ratio", "sampler", "sampler", "off_policy", "top_entropy")
        if extra == "ratio":
            case.importance = numbers.normal(*shape).abs() + 0.1
            if len(shape) == 2 and name != "VESPO" and one(draw, False, True):
                case.importance = case.importance[:, 0] if one(draw, False, True) else case.importance[:, :1]
        if extra == "sampler" and case.old is not None:
            levels = ("token",) if name == "VESPO" else ("sequence", "token")
            mode = one(draw, "mask", "truncate") if name != "VESPO" else "truncate"
            low = 0.3 if name == "VESPO" else one(draw, None, 0.5, 0.95)
            case.sampler = {"level": one(draw, *levels), "mode": mode, "ratio_min": low}
            case.sampler["ratio_max"] = one(draw, 3.0, 1.5)
        if extra in ("sampler", "off_policy"):
            case.sampling = near().masked_fill(numbers.share(shape, one(draw, 0.0, 0.2)), torch.nan)
        if extra == "off_policy":
            case.corrections.append(("OffPolicySequenceMask", one(draw, 0.02, 0.3)))
            if one(draw, False, True):
                case.sampling = None
        if extra == "top_entropy":
            case.corrections.append(("TopEntropyMask", one(draw, 0.5, 1.0, 0.2317, 0.777)))
    if one(draw, False, True):  # whatever stands at masked tokens
        for column in (case.old, case.ref, case.sampling, case.importance, case.advantages):
            if column is not None and column.shape == shape:
                column[~live] = one(draw, torch.nan, torch.inf)
    return case


@strategy
def policy_cases(draw, device: str) -> PolicyCase:
    """Log-probabilities are given."""
    shape = one(draw, (draw.randint(1, 6), draw.randint(1, 17)), (draw.randint(0, 70),))
    numbers = Numbers(draw.getrandbits(62), device)
    mask = masks(draw, numbers, shape)
    live = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask != 0
    logps = -numbers.normal(*shape, std=one(draw, 1.0, 5.0)).abs()
    case = policy_inputs(draw, numbers, live, logps.double(), mask, per_token=False)
    if rarely(draw):
        case.reduction, case.entropy_coef = None, 0.0
    case.default_dtype = one(draw, F32, F32, BF16, F16, torch.float64)
    poison = one(draw, torch.nan, 0.0)
    case.logps = logps.masked_fill(~live, poison)
    case.entropy = (numbers.normal(*shape).abs() * 2).masked_fill(~live, poison)
    return case


@strategy
def fused_cases(draw, device: str) -> PolicyCase:
    """The whole way from hidden states."""
    head = head_inputs(draw, device, banned=rarely(draw))
    head = replace(head, compute_dtype=None)
    if head.autocast is None and head.weight.dtype != head.hidden.dtype:
        head.autocast = BF16
    head.options = tiles(draw, {"entropy": True})
    found = oracle.Head(head).logits.values["logps"].detach().reshape(head.targets.shape)
    assume(found.isfinite().all())  # a banned target is no sample
    numbers = Numbers(draw.getrandbits(62), device)
    case = policy_inputs(draw, numbers, head.live, found, head.mask, per_token=False)
    case.head = head
    return case


@strategy
def given_logits_cases(draw, device: str) -> PolicyCase:
    """grpo_loss_from_logits."""
    logits = logits_cases.build(draw, device, banned=False, of_loss=True)
    logits.transform = {"temperature": logits.transform["temperature"], "softcap": None, "scale": 1.0}
    numbers = Numbers(draw.getrandbits(62), device)
    shape = logits.targets.shape
    raw = logits.logits[:, :-1] if logits.spare_position else logits.logits
    z = raw.double().masked_fill(~logits.live[..., None], 0.0) / logits.transform["temperature"]
    found = z.log_softmax(-1).gather(-1, logits.targets.clamp(min=0)[..., None]).squeeze(-1)
    case = policy_inputs(draw, numbers, logits.live, found, logits.mask, per_token=True)
    case.logits = logits
    assume(len(shape) == 2 or shape[0] > 0)
    return case
