"""Losses of pairs, of judged sequences and of given tokens, and divergences of lists, on random cases in float64."""

import random

import row_oracle as oracle
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracles
from cases import Numbers, fuzz, one, rarely
from liger_rl import FusedLinearCrossEntropyLoss, FusedLinearPreferenceLoss, FusedLinearUnpairedLoss, topk_divergence
from liger_rl.fused_linear import ReferenceHead
from liger_rl.head import LogitTransform
from liger_rl.losses import Segments, SequenceMean, TokenSum

SEEDS = st.integers(0, 2**62)
SMOOTHS = ("sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired")
SCORED = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "exo_pair", "robust", "discopop")
PAIR_LOSSES = (*SMOOTHS, "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")


class Rows:
    """Sequences of tokens, some without one, their head, and the calls' common arguments; packed in any order."""

    def __init__(
        self, seed: int, *, even: bool = False, may_be_packed: bool = True, may_be_unlikely: bool = False
    ) -> None:
        self.draw = draw = random.Random(seed)
        self.numbers = numbers = Numbers(draw.getrandbits(62), "cpu")
        self.rows = 2 * draw.randint(1, 3) if even else draw.randint(1, 5)
        self.shape = shape = (self.rows, draw.randint(1, 7))
        self.width, self.vocab = draw.randint(1, 12), draw.randint(2, 60)
        self.hidden = numbers.normal(*shape, self.width)
        self.weight = numbers.normal(self.vocab, self.width, std=one(draw, 0.3, 1.0) * self.width**-0.5)
        self.bias = numbers.normal(self.vocab) if draw.random() < 0.5 else None
        self.transform = {"temperature": one(draw, 1.0, 0.7, 1.9), "softcap": one(draw, None, 5.0)}
        self.is_unlikely = may_be_unlikely and draw.random() < 0.3  # most ids are
        if self.is_unlikely:
            self.bias = numbers.normal(self.vocab) - 300.0 * numbers.share((self.vocab,), 0.8)
            self.transform["softcap"] = None
        self.ids = numbers.below(self.vocab, shape)
        lengths = torch.tensor([draw.randint(0 if rarely(draw) else 1, shape[1]) for _ in range(self.rows)])
        self.live = (torch.arange(shape[1]) < lengths[:, None]) & numbers.share(shape, one(draw, 1.0, 0.8))
        self.order = (
            torch.randperm(self.ids.numel(), generator=numbers.generator) if may_be_packed and rarely(draw) else None
        )
        self.by_mask = draw.random() < 0.5  # else the targets are negative
        self.leaves = [x.clone().requires_grad_() for x in (self.hidden, self.weight, self.bias) if x is not None]
        self.doubles = [x.double().requires_grad_() for x in (self.hidden, self.weight, self.bias) if x is not None]
        self.logits = oracles.linear_logits(*self.doubles, **self.transform)
        self.logps = self.logps_of(self.logits, self.ids, self.live)

    @staticmethod
    def logps_of(logits: Tensor, ids: Tensor, live: Tensor) -> Tensor:
        return torch.where(live, logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0], 0.0)

    def laid_out(self, x: Tensor | None) -> Tensor | None:
        """A column (S, T, ...) as the call takes it."""
        return x if x is None or self.order is None else x.flatten(0, 1)[self.order]

    @property
    def segments(self) -> dict:
        if self.order is None:
            return {}
        index = torch.arange(self.rows)[:, None].expand(self.shape)
        return {"segments": Segments(index=self.laid_out(index), count=self.rows)}

    def call(self, loss, *more, **columns):
        ids, mask = self.ids, self.live.to(one(self.draw, torch.bool, torch.int32, torch.float32))
        if not self.by_mask:
            ids, mask = ids.masked_fill(~self.live, -100), None
        bias = self.leaves[2] if self.bias is not None else None
        if "nll_targets" not in columns:
            self.leaves[0].data[~self.live] = torch.nan
        arguments = self.laid_out(self.leaves[0]), self.leaves[1], self.laid_out(ids)
        return loss(*arguments, *more, mask=self.laid_out(mask), bias=bias, **columns, **self.segments)

    def check(self, found: Tensor, expected: Tensor, shown, atol: float = 2e-5) -> None:
        __tracebackhide__ = True
        shown = f"{shown}, {vars(self)}"
        torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=atol, msg=lambda m: f"{m}\n{shown}")
        if not expected.requires_grad:
            return
        wanted = torch.autograd.grad(expected, self.doubles, allow_unused=True)
        for mine, truth, leaf in zip(torch.autograd.grad(found, self.leaves), wanted, self.leaves, strict=True):
            truth = torch.zeros_like(leaf) if truth is None else truth
            torch.testing.assert_close(
                mine.double(), truth.double(), rtol=2e-3, atol=1e-4, msg=lambda m: f"{m}\n{shown}"
            )

    def draw_reference(self, columns: dict) -> Tensor:
        """(S, T) float64, given in one of three ways; of sums (S,), which count as they are, as TRL has it."""
        ref = torch.where(self.live, (self.logps.detach() + 0.4 * self.numbers.normal(*self.shape)).float(), 0.0)
        kind = one(self.draw, "tokens", "sums", "head") if self.order is None else "tokens"
        if kind == "head":
            hidden, weight = self.numbers.normal(*self.shape, 3), self.numbers.normal(self.vocab, 3, std=0.5)
            plain = self.draw.random() < 0.5  # else its transform is the policy's
            transform = LogitTransform() if plain else None
            columns["reference"] = ReferenceHead(hidden=hidden, weight=weight, bias=self.bias, transform=transform)
            logits = oracles.linear_logits(hidden, weight, self.bias, **({} if plain else self.transform))
            return self.logps_of(logits, self.ids, self.live)
        columns["ref_logps"] = self.laid_out(ref.masked_fill(~self.live, torch.nan)) if kind == "tokens" else ref.sum(1)
        return (ref.sum(1) if kind == "sums" else ref).double()


def options_of_dpo(draw, name: str) -> dict:
    o = {}
    if name in SMOOTHS and (name == "exo_pair" or draw.random() < 0.5):
        o["label_smoothing"] = one(draw, 0.1, 0.3)
    if name == "discopop":
        o["discopop_tau"] = one(draw, 0.05, 1.0)
    if name in SCORED and draw.random() < 0.5:
        o["f_divergence_type"] = one(draw, *oracle.SCORES)
        if o["f_divergence_type"] == "alpha_divergence":
            o["f_alpha_divergence_coef"] = one(draw, 0.3, 0.7)
    if draw.random() < 0.4:
        o |= {"ld_alpha": one(draw, 0.0, 0.4, 1.0)}
    elif name not in ("ipo", "sigmoid_norm") and draw.random() < 0.4:
        o["average_log_prob"] = True
    return o


@fuzz(0.12)
@given(seed=SEEDS)
def test_pairs(seed: int) -> None:
    name = one(random.Random(seed), *PAIR_LOSSES, *["cpo", "simpo", "orpo", "aot"] * 3)
    rows = Rows(seed, even=True, may_be_packed=not name.startswith("aot"))
    draw, columns, pairs = rows.draw, {}, rows.rows // 2
    o = {"beta": one(draw, 0.1, 0.5)}
    if name in PAIR_LOSSES:
        o |= options_of_dpo(draw, name)
        if rows.order is not None:
            o.pop("ld_alpha", None)
        ref = rows.draw_reference(columns)
        if o.get("ld_alpha") == 0.0 and ref.dim() == 1:  # of a sequence beside an empty one the sum is 0
            ref = torch.where(rows.live.view(2, pairs, -1).any(2).all(0).repeat(2), ref, 0.0)
            columns["ref_logps"] = ref.float()
        losses = oracle.pair_losses(name, o, rows.logps, ref, rows.live)
        coef = one(draw, 0.0, 0.0, 0.7)
    else:
        if name == "cpo":
            o |= {"kind": one(draw, "sigmoid", "hinge", "ipo"), "average_log_prob": draw.random() < 0.3}
            o |= {"label_smoothing": 0.2} if o["kind"] == "sigmoid" else {}
        if name == "simpo":
            o |= {"simpo_gamma": one(draw, 0.5, 1.4), "alphapo_alpha": one(draw, 0.0, 0.3, -0.3)}
        losses, coef = oracle.reference_free_losses(name, o, rows.logps, rows.live), one(draw, 0.0, 1.0, 0.3)
    nll_live = rows.live & (torch.arange(rows.rows) < pairs)[:, None]
    if draw.random() < 0.4:  # the NLL counts other tokens of the chosen sequences, too
        nll_live = (torch.arange(rows.rows) < pairs)[:, None] & (nll_live | rows.numbers.share(rows.shape, 0.5))
        given_ids = rows.ids.masked_fill(~nll_live, -1)
        columns["nll_targets"] = rows.laid_out(given_ids) if rows.order is not None else given_ids[:pairs]
    number = one(draw, None, None, 7)
    nll = -rows.logps_of(rows.logits, rows.ids, nll_live).sum() / nll_live.sum().clamp(min=1)
    # A pair without a token has no loss; a mean of sorted margins is every other pair's.
    alive = rows.live.view(2, pairs, -1).any(2).any(0) | (nll_live.view(2, pairs, -1).any(2).any(0))
    per_pair = losses.mean().expand(pairs) if name.startswith("aot") else losses
    expected = torch.where(alive, per_pair, 0.0).sum() / (number or pairs) + coef * nll
    loss = FusedLinearPreferenceLoss(name, nll_coef=coef, **o, **rows.transform)
    found = rows.call(loss, num_sequences=number, **columns)
    rows.check(found.loss, expected, (name, o, coef, columns.keys()))
    if nll_live.any():
        torch.testing.assert_close(found.metrics["nll"].value.double(), nll.detach(), rtol=1e-4, atol=1e-5)


@fuzz(0.06)
@given(seed=SEEDS)
def test_judged_sequences(seed: int) -> None:
    rows = Rows(seed)
    draw, columns, name = rows.draw, {}, one(rows.draw, "kto", "apo_zero_unpaired", "bco")
    o = {
        "beta": one(draw, 0.1, 0.5),
        "desirable_weight": one(draw, 1.0, 0.3),
        "undesirable_weight": one(draw, 1.0, 2.0),
    }
    o["average_log_prob"] = draw.random() < 0.3
    labels, shift = rows.numbers.share((rows.rows,), 0.5), torch.zeros(())
    if name != "apo_zero_unpaired":
        shift = one(draw, torch.tensor(0.3), rows.numbers.normal(rows.rows).abs())
        columns["kl" if name == "kto" else "delta"] = one(draw, shift, float(shift)) if shift.dim() == 0 else shift
    ref, number = rows.draw_reference(columns), one(draw, None, 7)
    losses = oracle.unpaired_losses(name, o, rows.logps, ref, rows.live, labels, shift.double())
    expected = torch.where(rows.live.any(1), losses, 0.0).sum() / (number or rows.rows)
    loss = FusedLinearUnpairedLoss(name, **o, **rows.transform)
    rows.check(rows.call(loss, labels, num_sequences=number, **columns).loss, expected, (name, o, columns.keys()))


@fuzz(0.1)
@given(seed=SEEDS)
def test_given_tokens(seed: int) -> None:
    rows = Rows(seed)
    draw, name = rows.draw, one(rows.draw, "nll", "nll", "dft", "eaft")
    o = {"label_smoothing": one(draw, 0.0, 0.2), "z_loss": one(draw, 0.0, 0.01)}
    if name == "eaft":
        o |= one(draw, {}, {"eaft_alpha": 1.5, "eaft_scale": 2.0})
    targets = rows.ids.masked_fill(~rows.live, -100)
    weights = one(
        draw, None, rows.numbers.normal(*rows.shape).abs().masked_fill(rows.numbers.share(rows.shape, 0.3), 0)
    )
    factors = torch.ones(rows.shape) if weights is None else weights
    if weights is not None and rows.order is None and draw.random() < 0.3:  # one for each sequence
        weights = weights[:, 0]
        factors = weights[:, None]
    columns = {"token_weights": rows.laid_out(weights)}
    losses = torch.where(rows.live, factors * oracle.supervised_losses(name, o, rows.logits, targets), 0.0)
    expected, kind = losses.sum(), one(draw, "tokens", "items", "sequences", "sum")
    reductions = {"sequences": SequenceMean(), "sum": TokenSum()}
    if kind == "items":
        columns["num_items_in_batch"] = 9
        expected = expected / 9
    elif kind == "tokens":
        expected = expected / rows.live.sum().clamp(min=1)
    elif kind == "sequences":
        expected = (losses.sum(1) / rows.live.sum(1).clamp(min=1)).sum() / rows.rows
    loss = FusedLinearCrossEntropyLoss(name, reduction=reductions.get(kind), **o, **rows.transform)
    rows.check(rows.call(loss, **columns).loss, expected, (name, o, kind, columns.keys()))


KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), *(("jsd", beta) for beta in (0.0, 0.3, 0.9, 1.0))]


@fuzz(0.1)
@given(seed=SEEDS)
def test_lists(seed: int) -> None:
    """Lists of different lengths, also of ids that both find unlikely."""
    rows = Rows(seed, may_be_unlikely=True)
    draw, numbers, (kind, beta) = rows.draw, rows.numbers, one(rows.draw, *KINDS)
    tail, count = one(draw, "bucket", "none", "renormalized"), draw.randint(1, min(rows.vocab - 1, 6) or 1)
    tail = "renormalized" if rows.is_unlikely else tail
    teacher = (rows.logits.detach() + numbers.normal(*rows.logits.shape)).log_softmax(-1)
    ids = torch.rand(teacher.shape, generator=numbers.generator).argsort(-1)[..., :count]
    lists = ids.masked_fill(numbers.share(ids.shape, one(draw, 0.0, 0.3, 0.5)), -1)
    listed = (lists >= 0) & rows.live[..., None]
    p, q = rows.logits.log_softmax(-1).gather(-1, ids), teacher.gather(-1, ids).float().double()
    some = listed.any(-1)
    chosen = listed | ~some[..., None]
    slope = numbers.normal(*rows.shape).double().abs()  # the sum has the digits of its parts
    expected = torch.where(some, oracles.list_divergence(p.exp(), q.exp(), chosen, kind, beta, tail), 0.0)
    mask, options = rows.live.float(), {"kind": kind, "tail": tail} | ({"beta": beta} if kind == "jsd" else {})
    rows.leaves[0].data[~rows.live] = torch.nan
    packed = [rows.laid_out(x) for x in (rows.leaves[0], lists, q.float().masked_fill(~listed, torch.nan), mask, slope)]
    found = topk_divergence(
        packed[0], rows.leaves[1], *packed[1:3], mask=packed[3], bias=rows.leaves[2] if rows.bias is not None else None,
        transform=LogitTransform(**rows.transform), **options,
    ).divergence  # fmt: skip
    # A log-probability of -300 has the rounding of 300.
    slack = 300 * 2.0**-23 * slope.sum().item() if rows.is_unlikely else 0.0
    rows.check((found * packed[4].float()).sum(), (expected * slope).sum(), (options, lists), 2e-5 + slack)
