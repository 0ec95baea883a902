"""TRL's trainers on our head: the op against TRL's own, what is patched and what is refused, and whole runs."""

import importlib
import math
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

import trl.trainer.utils as trl_utils
from trl.kernels import ChunkedLogProbFunction as THEIRS

import oracles
import trl_runs
from head_calls import Products
from liger_rl import patch_trl
from liger_rl.integrations.trl import adapted_head, patched_trl, unpatch_trl
from liger_rl.integrations.trl.patches import FusedLogProbs as OURS
from liger_rl.integrations.trl.settings import get_settings

NAME = "_ChunkedLogProbFunction"
ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
HIDDEN, VOCAB = 32, 301


# --- the op against TRL's own -----------------------------------------------------------------------------------------

PLAIN, MIXED = (1.0, None, 1.0), (1.6, 2.0, 1.7)  # temperature, softcap, scale


def inputs(n=23, *, bias=True, dtype=torch.float32, device="cpu"):
    """(hidden, weight, bias, targets); every other target is the model's own choice."""
    hidden = torch.randn(n, HIDDEN)
    weight = torch.randn(VOCAB, HIDDEN) * 2 / math.sqrt(HIDDEN)
    biases = torch.randn(VOCAB) if bias else None
    best = oracles.linear_logits(hidden, weight, biases).argmax(-1)
    targets = torch.where(torch.arange(n) % 2 == 0, best, torch.randint(VOCAB, (n,)))
    floats = (None if t is None else t.to(device, dtype) for t in (hidden, weight, biases))
    return *floats, targets.to(device)


def solve(op, tensors, *options, chunk_size=64):
    """-> the five outputs of an op with TRL's `apply`, and its gradients."""
    *floats, targets = tensors
    leaves = [None if t is None else t.detach().requires_grad_() for t in floats]
    temperature, softcap, scale, outputs = options
    values = op.apply(*leaves, targets, temperature, chunk_size, softcap, scale, outputs)
    return values, torch.autograd.grad(weighted(values), [leaf for leaf in leaves if leaf is not None])


def weighted(values):
    weights = torch.randn(2, len(values[0]), generator=torch.Generator().manual_seed(1)).to(values[0].device)
    loss = (values[0] * weights[0]).sum()
    return loss if values[1] is None else loss + (values[1] * weights[1]).sum()


PARITY = {
    "plain": (PLAIN, ALL, {}),
    "without a bias": (PLAIN, ALL, {"bias": False}),
    "all": (MIXED, ALL, {}),
    "whole numbers": ((2, 3, 2), ALL, {}),
    "log-probabilities": (PLAIN, ("log_probs",), {}),
    "one statistic": (PLAIN, ("log_sum_sq_probs",), {}),
    "no token": ((0.9, 4.0, 1.0), ALL, {"n": 0}),
}


@pytest.mark.parametrize(("transform", "outputs", "options"), PARITY.values(), ids=PARITY)
def test_float32_agrees_with_trls_op(transform, outputs, options, device):
    tensors = inputs(**options, device=device)
    values, grads = solve(OURS, tensors, *transform, outputs, chunk_size=300)  # which ours does not use
    expected, their_grads = solve(THEIRS, tensors, *transform, outputs)
    assert [x is None for x in values] == [x is None for x in expected]
    values, expected = ([x for x in five if x is not None] for five in (values, expected))
    assert [x.requires_grad for x in values] == [x.requires_grad for x in expected]
    torch.testing.assert_close((*values, *grads), (*expected, *their_grads), rtol=1e-5, atol=5e-6)
    if outputs == ALL and len(tensors[0]):
        assert 0 < values[-1].sum() < len(values[-1])


def test_outputs_default_to_all():
    for op in (OURS, THEIRS):
        assert all(x is not None for x in op.apply(*inputs(), 1.0, 64))


@pytest.mark.parametrize(
    ("transform", "dtype", "autocast"),
    [(PLAIN, torch.bfloat16, False), ((1.0, None, 0.25), torch.bfloat16, True), (MIXED, torch.float16, False)],
)
def test_low_precision_is_no_further_from_float64(transform, dtype, autocast, device):
    """With low-precision inputs, and with float32 ones under autocast.

    Both round the gradient of the logits once, and TRL rounds the logits too. A scale of 1/4 makes them so small that
    this is little, and chance decides whose error is the larger one: hence twice TRL's error and a rounding.
    """
    rounded = inputs(64, dtype=dtype, device=device)
    leaves, targets = [t.double().requires_grad_() for t in rounded[:3]], rounded[3]
    z = oracles.linear_logits(*leaves, *transform)
    found = oracles.values(z, targets)
    exact = found.logps, found.entropy, found.log_sum_sq_probs, found.mean_logits
    truth = (*exact, *torch.autograd.grad(weighted(exact), leaves))
    tensors = (*(t.float() for t in rounded[:3]), targets) if autocast else rounded
    errors = []
    for op in (OURS, THEIRS):
        with torch.autocast(device.type, dtype, enabled=autocast):
            values, grads = solve(op, tensors, *transform, ALL[:3])
        pairs = zip((*values[:4], *grads), truth, strict=True)
        errors.append([oracles.norm_error(mine, gold) / gold.norm().item() for mine, gold in pairs])
    pairs = list(zip(*errors, strict=True))
    assert all(a < 0.1 * b for a, b in pairs[:4])  # outputs: ours are of float32 logits
    assert all(a <= 2 * b + torch.finfo(dtype).eps for a, b in pairs[4:])


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_the_dtype_of_the_hidden_states_is_that_of_the_products(dtypes):
    """TRL's float32-head mode hands over float32 hidden states, whatever the weight is."""
    hidden, weight, bias, targets = inputs(dtype=torch.bfloat16)
    tensors = (hidden.to(dtypes[0]), weight.to(dtypes[1]), bias.to(dtypes[1]), targets)
    values, grads = solve(OURS, tensors, *PLAIN, ALL)
    if dtypes[0] == torch.float32:
        expected, their_grads = solve(THEIRS, tensors, *PLAIN, ALL)
        torch.testing.assert_close(values, expected, rtol=2e-6, atol=5e-6)
        for mine, theirs in zip(grads, their_grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=torch.finfo(mine.dtype).eps, atol=1e-4)
    assert [g.dtype for g in grads] == [dtypes[0], dtypes[1], dtypes[1]]


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(23, HIDDEN, dtype=torch.float64), "hidden"),
        (1, torch.zeros(VOCAB, 31), "weight"),
        (3, torch.full((23,), VOCAB), "targets"),
        (4, 0.0, "temperature"),
        (6, 0.0, "softcap"),
        (7, 0.0, "scale"),
        *((8, outputs, "outputs must be among") for outputs in (("log_probs", "entropies"), "entropy", ("logits",))),
    ],
)
def test_what_would_be_computed_differently_is_refused_by_name(position, value, message):
    """TRL computes 0 as a logit scale, 1 for a softcap of 0, -lse for a target beyond the vocabulary, and None for an
    output that it does not know."""
    arguments = [*inputs(), 1.0, 64, None, 1.0, ALL]
    arguments[position] = value
    with pytest.raises((TypeError, ValueError), match=rf"\b{message}\b"):
        OURS.apply(*arguments)


def test_the_head_is_gathered_for_each_direction(monkeypatch):
    """By TRL's own context, which does nothing where the head is whole already, as TRL has it in the forward."""
    entered = []

    @contextmanager
    def gather(*parameters):
        entered.append(parameters)
        yield

    monkeypatch.setattr(trl_utils, "maybe_gather_lm_head_ctx", gather)
    hidden, weight, bias, targets = inputs()
    logps = OURS.apply(hidden.requires_grad_(), weight, bias, targets, 1.0, 64)[0]
    assert len(entered) == 1
    logps.sum().backward()
    assert len(entered) == 2
    for parameters in entered:
        assert parameters[0] is weight
        assert parameters[1] is bias


# --- what is patched --------------------------------------------------------------------------------------------------


def test_options_come_and_go_with_the_patch():
    patch_trl(chunk_vocab=64)
    assert vars(trl_utils)[NAME] is OURS
    assert get_settings().chunk_vocab == 64
    with patched_trl(chunk_vocab=32):
        assert get_settings().chunk_vocab == 32
    assert get_settings().chunk_vocab == 64
    with patched_trl():
        assert get_settings().chunk_vocab is None
        unpatch_trl()
    assert get_settings().chunk_vocab == 64


def test_options_reach_the_head():
    tensors = inputs()
    patch_trl(chunk_tokens=5, chunk_vocab=64)
    with Products() as products:
        vars(trl_utils)[NAME].apply(*tensors, 1.0, 32768)
    assert max(products.logits(HIDDEN)) == (5, 64)


@pytest.mark.parametrize("options", [{"chunk_tokens": -1}, {"chunk_tokens": math.nan}, {"chunk_vocab": 0}])
def test_options_are_refused_before_anything_is_patched(options):
    original = vars(trl_utils)[NAME]
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        patch_trl(**options)
    assert vars(trl_utils)[NAME] is original
    patch_trl(chunk_vocab=64)
    with pytest.raises((TypeError, ValueError)):
        patch_trl(**options)
    assert get_settings().chunk_vocab == 64


def test_without_peft_there_is_nothing_to_lift(monkeypatch):
    monkeypatch.setattr("transformers.utils.is_peft_available", lambda: False)
    modules = [importlib.import_module(name) for name in adapted_head.TRAINERS]
    before = [vars(module)["BaseTunerLayer"] for module in modules]
    patch_trl()
    assert [vars(module)["BaseTunerLayer"] for module in modules] == before
    assert vars(trl_utils)[NAME] is OURS


# --- trainers ---------------------------------------------------------------------------------------------------------

FAMILIES = [model for model in trl_runs.MODELS if model != "qwen3"]
GRPO_RUNS = [*((name, "qwen3") for name in trl_runs.GRPO_RUNS), *(("dapo", model) for model in FAMILIES)]


@pytest.mark.parametrize(("name", "model"), GRPO_RUNS)
def test_grpo(name, model, path_of, tmp_path):
    trl_runs.assert_same_grpo_run(name, path_of[model], tmp_path)


@pytest.mark.parametrize(
    ("changed", "parted"),
    [
        ({}, False),
        ({"clip_ratio/region_mean": 0.25}, True),
        ({"clip_ratio/region_mean": 0.25, "grad_norm": 1.5}, True),
        ({"clip_ratio/region_mean": 0.25, "loss": 0.31}, False),
        ({"clip_ratio/region_mean": 0.25, "kl": float("nan")}, False),
        ({"grad_norm": 1.5}, False),
    ],
)
def test_only_clipped_tokens_part_runs_at_a_bound(changed, parted):
    log = {"loss": 0.3, "kl": 0.1, "grad_norm": 1.0, "clip_ratio/region_mean": 0.2}
    other = {**log, **changed}
    later = 0.5 if changed else 0.0  # what follows the parting does not count
    plain = trl_runs.Run({name: [value, value, value] for name, value in log.items()}, {}, 0, [])
    patched = trl_runs.Run({name: [log[name], other[name], other[name] + later] for name in log}, {}, 3, [])
    assert trl_runs.parted_at_a_bound(patched, plain) == parted


def test_a_trainer_that_outlives_the_patch(path_of, tmp_path):
    """It goes on with TRL's own op."""
    plain, patched = trl_runs.pair(
        "GRPO", path_of["qwen3"], tmp_path, prepare=lambda trainer: unpatch_trl(), max_steps=2
    )
    assert patched.calls == 0
    assert patched.log["loss"] == plain.log["loss"]


@pytest.mark.parametrize("model", ["qwen3", "gemma2"])
@pytest.mark.parametrize("kind", trl_runs.TRAINERS)
def test_every_trainer(kind, model, path_of, tmp_path):
    """On Qwen 3 the patch comes after the trainer was built: the head alone."""
    options = {"GRPO": {"max_steps": 2}, "DPO": {"use_weighting": model == "gemma2"}}  # the only use of log sum p^2
    plain, patched = trl_runs.pair(
        kind, path_of[model], tmp_path, built_before=model == "qwen3", **options.get(kind, {"max_steps": 10})
    )
    trl_runs.assert_same_run(patched, plain, shares=model == "gemma2")
    assert plain.log["loss"][0] != plain.log["loss"][-1]


def test_a_float32_head_on_a_bfloat16_body(path_of, tmp_path):
    """TRL's cast_lm_head_to_fp32: both compute the head in float32, so the first step agrees as in float32. The body,
    which rounds by its layout, runs TRL's."""
    options = {"dtype": "bfloat16", "cast_lm_head_to_fp32": True, "entropy_coef": 0.02, "max_steps": 1}
    options["patch_options"] = {"whole_step": False}
    plain, patched = trl_runs.pair("GRPO", path_of["qwen3"], tmp_path, **options)
    for name in ("loss", "kl", "entropy", "grad_norm"):
        assert patched.log[name] == pytest.approx(plain.log[name], rel=1e-3, abs=1e-6), name
    assert patched.calls > 0
    trl_runs.assert_layout(patched, plain, shares=False)
