"""The exact KL to a reference as a penalty: against full logits in float64, its products, and what it refuses."""

import math

import pytest
import torch

import loss_calls
import oracles
from devices import skip_without_interpreter
from head_calls import SCALING, Products, run_triton
from liger_rl import (
    PRESETS,
    EntropyBonus,
    FusedLinearGRPOLoss,
    KLPenalty,
    LogitTransform,
    LowRank,
    PolicyBatch,
    PPOClip,
    ReferenceHead,
    Segments,
    TokenLoss,
    TokenMean,
    ppo_loss_fn,
    reference_loss,
)
from loss_calls import HIDDEN, VOCAB, Batch, Step, batch, error
from tolerances import interpret, recorded_plans

BETA = 0.3


def heads(seed=0, **options) -> tuple[Batch, ReferenceHead]:
    """A batch and a reference of another hidden size."""
    torch.manual_seed(seed)
    data = batch(**options)
    like = data.head.hidden
    weight = torch.randn(data.head.weight.shape[0], 24) / math.sqrt(24)
    parts = {"hidden": torch.randn(*like.shape[:2], 24), "weight": weight, "bias": torch.randn(weight.shape[0])}
    data = data.changed(ref_per_token_logps=None)
    return data, ReferenceHead(**{name: part.to(like.device, like.dtype) for name, part in parts.items()})


def step(module, data: Batch, reference, **more) -> Step:
    return loss_calls.step(module, data, reference=reference, **more)


def exact(data, reference, preset="bnpo", *, vocab=None, transform=None, other=None, coef=0.0) -> Step:
    """The same of log-probabilities, KL and entropies from full logits in float64."""
    leaves = data.head.to(torch.float64).leaves()
    logits = torch.nn.functional.linear(leaves.hidden, leaves.weight, leaves.bias)
    if leaves.a is not None:
        logits = logits + SCALING * (leaves.hidden @ leaves.a.mT) @ leaves.b.mT
    others = oracles.linear_logits(reference.hidden, reference.weight, reference.bias)
    log_p = oracles.transformed(logits[..., :vocab], **(transform or {})).log_softmax(-1)
    log_q = oracles.transformed(others[..., :vocab], **(other or transform or {})).log_softmax(-1)
    columns = dict(data.columns)
    loss, metrics = ppo_loss_fn(
        log_p.gather(-1, leaves.targets.long()[..., None]).squeeze(-1),
        PolicyBatch(mask=columns.pop("mask"), **columns),
        PRESETS[preset].objective(**PRESETS[preset].defaults),
        PRESETS[preset].reduction(),
        entropy=-(log_p.exp() * log_p).sum(-1),
        kl=KLPenalty(beta=BETA, kl_estimator="exact"),
        entropy_bonus=EntropyBonus(entropy_coef=coef),
        exact_kl=oracles.divergence(log_p, log_q, "reverse_kl"),
        metrics="basic",
    )
    loss.backward()
    return Step(loss.detach(), {name: metric.value for name, metric in metrics.items()}, leaves.grads())


def assert_close(found, truth, tolerance=2e-5, factor=1.0):
    torch.testing.assert_close(found[0].double(), truth[0], rtol=tolerance, atol=tolerance)
    for name in found[1].keys() & truth[1].keys():
        assert math.isclose(found[1][name], truth[1][name], rel_tol=tolerance, abs_tol=tolerance), name
    for name, expected in truth[2].items():
        if expected is not None and found[2][name] is not None:
            torch.testing.assert_close(
                found[2][name].double(), expected * factor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
            )


def module(**options) -> FusedLinearGRPOLoss:
    return FusedLinearGRPOLoss("bnpo", beta=BETA, kl_estimator="exact", **options)


@pytest.mark.parametrize("passes", ["one", "two", "auto"])
@pytest.mark.parametrize(
    ("options", "transform", "other"),
    [
        ({}, {}, None),
        ({"entropy_coef": 0.1, "chunk_tokens": 7}, {"temperature": 0.7, "softcap": 4.0}, None),
        ({"entropy_coef": 0.1, "metrics": "with_entropy"}, {"scale": 1.3}, {"temperature": 1.4, "softcap": 3.0}),
    ],
)
def test_oracle(passes, options, transform, other, device):
    data, reference = heads(device=device)
    reference = ReferenceHead(**vars(reference) | {"transform": None if other is None else LogitTransform(**other)})
    found = step(module(passes=passes, **options, **transform), data, reference, factor=3.0)
    coef = options.get("entropy_coef", 0.0)
    assert_close(found, exact(data, reference, transform=transform, other=other, coef=coef), factor=3.0)
    assert reference.hidden.grad is None


@pytest.mark.parametrize("preset", ["grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "gspo", "gmpo", "gpg"])
def test_every_preset_is_that_of_the_same_numbers(preset):
    """With a sampler's ratio as well."""
    data, reference = heads()
    data = data.changed(importance_ratio=0.5 + torch.rand(6, 9), num_items_in_batch=torch.tensor(40))
    loss = FusedLinearGRPOLoss(preset, beta=BETA, kl_estimator="exact", metrics="basic")
    found, expected = step(loss, data, reference), exact(data, reference, preset)
    assert found[1].keys() == expected[1].keys()
    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("passes", ["one", "two"])
def test_triton_padded_vocabularies_and_garbage_under_the_mask(passes, monkeypatch):
    """In the interpreter. Padding, masked hidden states of both models, and the other columns there may be anything."""
    skip_without_interpreter()
    run_triton(monkeypatch)
    data, reference = heads(rows=3)
    wider = torch.cat([reference.weight, torch.full((11, 24), 77.0)]), torch.cat([reference.bias, torch.zeros(11)])
    reference = ReferenceHead(hidden=reference.hidden, weight=wider[0], bias=wider[1], vocab=VOCAB - 4)
    data = data._replace(head=data.head._replace(targets=data.head.targets % (VOCAB - 4)))
    truth = exact(data, reference, vocab=VOCAB - 4)
    masked = ~data.columns["mask"]
    data.head.hidden[masked], reference.hidden[masked] = math.nan, math.inf
    data.columns["old_per_token_logps"][masked] = math.nan
    found = step(module(passes=passes), data, reference)
    assert_close(found, truth)
    assert (found[2]["weight"][VOCAB - 4 :] == 0).all()
    assert (found[2]["hidden"][masked] == 0).all()


def test_adapters_a_frozen_weight_narrow_ids_and_fixed_shape():
    data, reference = heads()
    # A dtype that does not hold the vocabulary's size.
    head = data.head._replace(targets=(data.head.targets % 100).to(torch.int8))
    data = data._replace(head=head._replace(a=torch.randn(3, HIDDEN), b=torch.randn(VOCAB, 3)))
    for options in ({}, {"fixed_shape": True}):
        found = step(module(**options), data, reference, frozen=("weight", "bias"))
        assert_close(found, exact(data, reference))
        assert found.grads["weight"] is None
        assert found.grads["a"] is not None


class SeesReference:
    """An objective that says which of the reference's log-probabilities it was given."""

    token_local = True

    def __init__(self):
        self.seen = []

    def __call__(self, logps, batch):
        self.seen.append(batch.ref_per_token_logps.clone())
        return TokenLoss(-logps * (logps.detach() - batch.ref_per_token_logps))


@pytest.mark.parametrize("passes", ["one", "two"])
def test_the_references_log_probabilities_come_out_of_the_same_call(passes):
    """k1 as a reward, say; in one pass they are there in each chunk."""
    data, reference = heads()
    objective = SeesReference()
    loss = FusedLinearGRPOLoss(
        objective, reduction=TokenMean(), beta=BETA, kl_estimator="exact", passes=passes, chunk_tokens=5
    )
    _, _, grads = step(loss, data, reference)
    expected, _ = oracles.logprobs(reference.hidden, reference.weight, data.head.targets, reference.bias)
    mask = data.columns["mask"]
    torch.testing.assert_close(objective.seen[-1][mask].double(), expected[mask], rtol=1e-5, atol=1e-5)
    others = FusedLinearGRPOLoss(SeesReference(), reduction=TokenMean(), beta=BETA, kl_estimator="exact", passes="two")
    torch.testing.assert_close(grads["weight"], step(others, data, reference)[2]["weight"], rtol=1e-5, atol=1e-6)


def test_ranks_of_a_sequence_may_take_different_passes():
    """Each all-reduces the lengths of sequences as often as the others, or they would wait for one another for ever."""
    data, reference = heads(rows=2)
    reference = ReferenceHead(hidden=reference.hidden.flatten(0, 1), weight=reference.weight, bias=reference.bias)
    leaves, tokens, calls = data.head.leaves(), data.head.targets.numel(), {}
    for passes in ("one", "two", "auto"):

        def all_reduce(lengths, name=passes):
            calls[name] = calls.get(name, 0) + 1
            return 2 * lengths

        segments = Segments(index=torch.arange(tokens) * 2 // tokens, count=2, all_reduce=all_reduce)
        loss = FusedLinearGRPOLoss("grpo", beta=BETA, kl_estimator="exact", passes=passes)
        given = leaves.hidden.flatten(0, 1), leaves.weight, leaves.targets.flatten(), torch.ones(tokens)
        loss(*given, bias=leaves.bias, reference=reference, segments=segments).loss.backward()
    assert calls == {"one": 1, "two": 1, "auto": 1}


@pytest.mark.parametrize(
    ("options", "dtype", "units"),
    [
        ({}, torch.float32, (3, 1)),  # one pass: the policy's head, and its two gradients; the reference's once
        ({"passes": "two"}, torch.float32, (4, 2)),
        ({"passes": "one"}, torch.bfloat16, (3, 1)),
        ({}, torch.bfloat16, (3, 1)),  # one chunk holds every token
        ({"chunk_tokens": 8}, torch.bfloat16, (4, 2)),
        ({"loss_type": "gspo"}, torch.float32, (4, 2)),
    ],
)
def test_products(options, dtype, units, device):
    """Of the tokens that count, in units of 2 V H of each head."""
    data, reference = heads(dtype=dtype, device=device, idle=False)
    own, other = units
    loss = FusedLinearGRPOLoss(**{"loss_type": "bnpo", "beta": BETA, "kl_estimator": "exact", **options})
    with Products() as products:
        step(loss, data, reference)
    tokens = int(data.columns["mask"].sum())
    assert products.flops == tokens * 2 * VOCAB * (own * HIDDEN + other * 24)


def test_given_log_probabilities():
    """ppo_loss_fn takes the exact KL as it takes an entropy."""
    torch.manual_seed(0)
    logps, kl = -torch.rand(3, 5), torch.rand(3, 5, requires_grad=True)
    kl.data[0, 0] = math.nan
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0, 0] = False
    given = PolicyBatch(advantages=torch.zeros(3), mask=mask)
    penalty = KLPenalty(beta=2.0, kl_estimator="exact")
    loss, metrics = ppo_loss_fn(logps, given, PPOClip(), TokenMean(), kl=penalty, exact_kl=kl)
    loss.backward()
    torch.testing.assert_close(loss.detach(), 2 * kl.detach()[mask].mean())
    torch.testing.assert_close(kl.grad, mask * (2 / 14))
    torch.testing.assert_close(metrics["kl_ref"].value, kl.detach()[mask].mean())
    with pytest.raises(ValueError, match=r"exact_kl must be given with a KLPenalty\(beta, kl_estimator=\"exact\"\)"):
        ppo_loss_fn(logps, given, PPOClip(), TokenMean(), kl=penalty)
    with pytest.raises(ValueError, match="exact_kl must be None without"):
        ppo_loss_fn(logps, given, PPOClip(), TokenMean(), exact_kl=kl)
    with pytest.raises(ValueError, match=r"exact_kl must be \(3, 5\)"):
        ppo_loss_fn(logps, given, PPOClip(), TokenMean(), kl=penalty, exact_kl=kl[0])


def test_a_tolerance(monkeypatch):
    """Of a sure policy near its reference, in the interpreter: the gradients are as near as it says."""
    skip_without_interpreter()
    interpret(monkeypatch)
    plans = recorded_plans(monkeypatch)
    data, _ = heads(dtype=torch.float16)
    hidden = 12.0 * data.head.weight[data.head.targets] + 0.3 * data.head.hidden
    data = data._replace(head=data.head._replace(hidden=hidden))
    weight, bias = data.head.weight, data.head.bias
    reference = ReferenceHead(hidden=hidden + 0.1 * torch.randn_like(hidden), weight=weight, bias=bias)
    truth = exact(data, reference)
    for tolerance, passes in ((0.0, "two"), (1e-1, "two"), (1e-1, "auto")):
        found = step(module(grad_tolerance=tolerance, passes=passes), data, reference)
        assert math.isclose(found[1]["kl_ref"], truth[1]["kl_ref"], rel_tol=1e-3)
        for name in ("hidden", "weight", "bias"):
            assert error(found[2][name], truth[2][name]) <= 3 * tolerance + 2e-3
    assert [plan.pays for plan in plans] == [True, True]


@pytest.mark.parametrize(("entropy_coef", "dtype"), [(0.0, torch.float16), (0.1, torch.float16), (0.0, torch.float32)])
def test_the_default_tolerance(entropy_coef, dtype, monkeypatch):
    """In the interpreter. With a bonus, whose gradient is exact, none is planned, nor with a weight that is copied for
    its products."""
    skip_without_interpreter()
    interpret(monkeypatch)
    plans = recorded_plans(monkeypatch)
    data, reference = heads(dtype=dtype, rows=2)
    with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
        step(module(passes="two", entropy_coef=entropy_coef), data, reference)
    assert len(plans) == (entropy_coef == 0.0 and dtype == torch.float16)


def test_a_target_that_is_far_below_under_a_softcap(monkeypatch):
    """20 nats below the likeliest id, where what one pass keeps of either head underflows."""
    skip_without_interpreter()
    run_triton(monkeypatch, epilogue=True)
    monkeypatch.setattr(reference_loss, "one_pass_lacks", lambda *_: None)  # the interpreter has float16 alone
    n, vocab = 16, 300
    weight = torch.randn(vocab, 32) / 8
    weight[:, :2] = 0
    weight[7, 0], weight[9, 1] = 8.0, 1.0
    hidden = torch.randn(n, 32)
    hidden[:, 0], hidden[:, 1] = 1.5, -8.0
    hidden, weight = hidden.half(), weight.half()
    reference = ReferenceHead(hidden=hidden, weight=(weight.float() + 0.005 * torch.randn(vocab, 32)).half())
    found = {}
    for passes in ("one", "two"):
        leaf = hidden.clone().requires_grad_()
        loss = module(passes=passes, softcap=30.0)
        out = loss(leaf, weight, torch.full((n,), 9), torch.ones(n), torch.ones(n), reference=reference).loss * n
        (found[passes],) = torch.autograd.grad(out, leaf)
    assert (found["one"] - found["two"]).norm() <= 2e-3 * found["two"].norm()


def test_without_beta_nothing_is_asked_for():
    data, _ = heads()
    loss = FusedLinearGRPOLoss("bnpo", kl_estimator="exact", grad_tolerance=1e-3)
    assert "kl_ref" not in step(loss, data, None)[1]


@pytest.mark.parametrize("options", [{"importance_weighted": True}, {"batch_invariant": True}, {"kl_estimator": "k4"}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))} must be .*exact"):
        FusedLinearGRPOLoss(**{"beta": 0.1, "kl_estimator": "exact", **options})


ZEROS = torch.zeros(6, 9, 24)
BAD_CALLS = [
    ({"reference": None}, {}, 'reference must be a ReferenceHead with kl_estimator="exact".* got NoneType'),
    ({"ref_per_token_logps": ZEROS[..., 0]}, {}, 'ref_per_token_logps must be None with kl_estimator="exact"'),
    ({"weight_grad": torch.zeros(VOCAB, HIDDEN)}, {}, 'weight_grad must be None with kl_estimator="exact"'),
    ({"support": object()}, {}, 'support must be None with kl_estimator="exact"'),
    ({"reference": {"hidden": ZEROS[:5]}}, {}, r"reference\.hidden must have the tokens \(6, 9\)"),
    ({"reference": {"hidden": ZEROS.clone().requires_grad_()}}, {}, r"reference\.hidden must require no gradient"),
    ({"reference": {"weight": torch.zeros(VOCAB + 3, 24), "bias": None}}, {}, r"reference\.weight must have the 129"),
    ({"reference": {"vocab": VOCAB + 1}}, {}, "vocab must be at most the 129"),
    ({"selected_token_ids": torch.full((6, 9), VOCAB)}, {}, "selected_token_ids must be token ids"),
    ({"advantages": torch.zeros(5)}, {}, r"advantages must be \(B, T\)"),
    ({}, {"loss_type": "gspo", "passes": "one"}, 'passes="one" needs an objective'),
    ({}, {"fixed_shape": True, "passes": "one"}, 'passes="one" needs fixed_shape'),
    ({}, {"chunk_vocab": 64, "passes": "one"}, 'passes="one" needs chunk_vocab = None'),
    ({}, {"grad_tolerance": 1e-3, "passes": "one"}, 'passes="one" needs grad_tolerance = 0.0'),
    ({}, {"kl_estimator": "k3"}, 'reference must be None without kl_estimator="exact"'),
]


@pytest.mark.parametrize(("changed", "options", "message"), BAD_CALLS, ids=[str(i) for i in range(len(BAD_CALLS))])
def test_bad_calls_are_refused_before_any_product(changed, options, message):
    data, reference = heads()
    given = {"selected_token_ids": data.head.targets, "reference": reference, **data.columns, **changed}
    if isinstance(given["reference"], dict):
        given["reference"] = ReferenceHead(**{**vars(reference), **given["reference"]})
    loss = FusedLinearGRPOLoss(**{"loss_type": "bnpo", "beta": BETA, "kl_estimator": "exact", **options})
    with Products() as products, pytest.raises(ValueError, match=message):
        loss(data.head.hidden, data.head.weight, bias=data.head.bias, **given)
    assert products.flops == 0


def test_adapters_and_float16_take_two_passes():
    data, reference = heads()
    low_rank = [LowRank(a=torch.randn(3, HIDDEN), b=torch.randn(VOCAB, 3))]
    refused = pytest.raises(ValueError, match='passes="one" needs a head without low_rank terms')
    with Products() as products, refused:
        step(module(passes="one"), data, reference, low_rank=low_rank)
    assert products.flops == 0
    data, reference = heads(dtype=torch.float16)
    with pytest.raises(ValueError, match='passes="one" needs bfloat16 or float32'):
        step(module(passes="one"), data, reference)
    assert_close(step(module(), data, reference), exact(data, reference), 5e-3)
