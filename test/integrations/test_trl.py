"""TRL's trainers on our head: the op against TRL's own, what is patched and what is refused, and whole runs."""

import importlib
import math
import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

import trl.trainer.utils as trl_utils
from trl.kernels import ChunkedLogProbFunction as THEIRS

import oracles
import trl_runs
from liger_rl import LogProbs
from liger_rl.integrations import trl as integration
from liger_rl.integrations.trl import patch_trl, patched_trl, unpatch_trl

NAME = "_ChunkedLogProbFunction"
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


# --- the op against TRL's own -----------------------------------------------------------------------------------------

TRANSFORMS = {
    "plain": (1.0, None, 1.0),
    "temperature": (0.7, None, 1.0),
    "softcap": (1.0, 3.0, 1.0),
    "scale": (1.0, None, 0.25),
    "all": (1.6, 2.0, 1.7),
    "whole numbers": (2, 3, 2),
}


def inputs(n=23, hidden_size=32, vocab=301, *, bias=True, dtype=torch.float32, device="cpu"):
    """(hidden, weight, bias, targets); every other target is the model's own choice."""
    hidden = torch.randn(n, hidden_size)
    weight = torch.randn(vocab, hidden_size) * 2 / math.sqrt(hidden_size)
    biases = torch.randn(vocab) if bias else None
    best = oracles.linear_logits(hidden, weight, biases).argmax(-1)
    targets = torch.where(torch.arange(n) % 2 == 0, best, torch.randint(vocab, (n,)))
    floats = (None if t is None else t.to(device, dtype) for t in (hidden, weight, biases))
    return *floats, targets.to(device)


def solve(op, tensors, *options, chunk_size=64, entropy_grad=True):
    """-> the five outputs of an op with TRL's `apply`, and its gradients."""
    *floats, targets = tensors
    leaves = [None if t is None else t.detach().requires_grad_() for t in floats]
    temperature, softcap, scale, outputs = options
    found = op.apply(*leaves, targets, temperature, chunk_size, softcap, scale, outputs)
    weights = torch.randn(2, targets.shape[0], generator=torch.Generator().manual_seed(1)).to(targets.device)
    loss = (found[0] * weights[0]).sum()
    if entropy_grad and found[1] is not None:
        loss = loss + (found[1] * weights[1]).sum()
    grads = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])
    return found, grads


def ours(**options):
    return integration.FusedLogProbs(options)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_float32_agrees_with_trls_op(transform, bias, device):
    tensors = inputs(bias=bias, device=device)
    found, grads = solve(ours(), tensors, *transform, ALL)
    expected, their_grads = solve(THEIRS, tensors, *transform, ALL)
    assert 0 < found[4].sum() < len(found[4])
    for name, mine, other in zip(OUTPUTS, found, expected, strict=True):
        assert mine.dtype == other.dtype, name
        assert mine.requires_grad == other.requires_grad == (name in ("log_probs", "entropy"))
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=5e-6, msg=lambda m, name=name: f"{name}: {m}")
    for mine, other in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy"), ("log_sum_sq_probs",), ALL[1:], OUTPUTS])
def test_only_the_outputs_asked_for(outputs):
    tensors = inputs()
    found, grads = solve(ours(), tensors, 1.0, None, 1.0, outputs)
    expected, their_grads = solve(THEIRS, tensors, 1.0, None, 1.0, outputs)
    assert [x is None for x in found] == [x is None for x in expected]
    for mine, other in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("outputs", [("log_probs", "entropies"), "entropy", ("logits",)])
def test_an_output_that_it_does_not_have_is_refused(outputs):
    """TRL computes the ones that it knows, and the other is None."""
    with pytest.raises(ValueError, match="outputs must be among"):
        ours().apply(*inputs(), 1.0, 64, None, 1.0, outputs)


def test_outputs_default_to_all():
    hidden, weight, bias, targets = inputs()
    arguments = (hidden, weight, bias, targets, 1.0, 64)
    assert all(x is not None for x in ours().apply(*arguments))
    assert all(x is not None for x in THEIRS.apply(*arguments))


@pytest.mark.parametrize("chunk_size", [1, 50, 300, 301, 32768])
def test_chunk_size_is_taken(chunk_size):
    tensors = inputs()
    found, grads = solve(ours(), tensors, 0.9, 4.0, 1.0, ALL, chunk_size=chunk_size)
    expected, their_grads = solve(ours(), tensors, 0.9, 4.0, 1.0, ALL, chunk_size=32768)
    for mine, other in zip((*found, *grads), (*expected, *their_grads), strict=True):
        assert torch.equal(mine, other)


def test_no_token(device):
    tensors = inputs(0, device=device)
    found, grads = solve(ours(), tensors, 0.9, 4.0, 1.0, ALL)
    expected, their_grads = solve(THEIRS, tensors, 0.9, 4.0, 1.0, ALL)
    for mine, other in zip((*found, *grads), (*expected, *their_grads), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


def errors(op, tensors, transform, truth):
    """Relative Frobenius error of each output and gradient."""
    found, grads = solve(op, tensors, *transform, ALL[:3])
    return [
        ((mine.double() - exact).norm() / exact.norm()).item()
        for mine, exact in zip((*found[:4], *grads), truth, strict=True)
    ]


def truth_of(tensors, transform):
    """In float64: log-probabilities, entropies, the two statistics, and the gradients of what `solve` adds up."""
    *floats, targets = tensors
    leaves = [None if t is None else t.double().requires_grad_() for t in floats]
    temperature, softcap, scale = transform
    z = oracles.linear_logits(*leaves, temperature=temperature, softcap=softcap, scale=scale)
    logps, entropy = oracles.logits_logprobs(z, targets)
    weights = torch.randn(2, targets.shape[0], generator=torch.Generator().manual_seed(1)).to(targets.device)
    grads = torch.autograd.grad((logps * weights[0] + entropy * weights[1]).sum(), [x for x in leaves if x is not None])
    return [logps, entropy, *oracles.logits_extras(z, targets)[:2], *grads]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transform", [TRANSFORMS[name] for name in ("plain", "scale", "all")])
def test_low_precision_is_no_further_from_float64(transform, dtype, autocast, device):
    """With low-precision inputs, and with float32 ones under autocast.

    Both round the gradient of the logits once, and TRL rounds the logits too. A scale of 1/4 makes them so small that
    this is little, and chance decides whose error is the larger one: hence twice TRL's error and a rounding.
    """
    rounded = inputs(64, dtype=dtype, device=device)
    truth = truth_of(rounded, transform)
    tensors = (*(t.float() for t in rounded[:3]), rounded[3]) if autocast else rounded
    with torch.autocast(device.type, dtype, enabled=autocast):
        mine, other = (errors(op, tensors, transform, truth) for op in (ours(), THEIRS))
    pairs = list(zip(mine, other, strict=True))
    assert all(a < 0.1 * b for a, b in pairs[:4])  # outputs: ours are of float32 logits
    assert all(a <= 2 * b + torch.finfo(dtype).eps for a, b in pairs[4:])


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_the_dtype_of_the_hidden_states_is_that_of_the_products(hidden_dtype, weight_dtype):
    """TRL's float32-head mode hands over float32 hidden states, whatever the weight is."""
    hidden, weight, bias, targets = inputs(dtype=torch.bfloat16)
    tensors = (hidden.to(hidden_dtype), weight.to(weight_dtype), bias.to(weight_dtype), targets)
    found, grads = solve(ours(), tensors, 1.0, None, 1.0, ALL)
    if hidden_dtype == torch.float32:
        expected, their_grads = solve(THEIRS, tensors, 1.0, None, 1.0, ALL)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-6, atol=5e-6)
        for mine, other in zip(grads, their_grads, strict=True):
            torch.testing.assert_close(mine, other, rtol=torch.finfo(mine.dtype).eps, atol=1e-4)
    assert [g.dtype for g in grads] == [hidden_dtype, weight_dtype, weight_dtype]


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_frozen_inputs_get_none(frozen):
    *leaves, targets = inputs()
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i not in frozen)
    ours().apply(*leaves, targets, 1.0, 64)[0].sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [i in frozen for i in range(3)]


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(23, 32, dtype=torch.float64), "hidden"),
        (1, torch.zeros(301, 31), "weight"),
        (3, torch.full((23,), 301), "targets"),
        (4, 0.0, "temperature"),
        (6, 0.0, "softcap"),
        (7, 0.0, "scale"),
    ],
)
def test_what_would_be_computed_differently_is_refused_by_name(position, value, message):
    """TRL computes 0 as a logit scale, 1 for a softcap of 0, and -lse for a target beyond the vocabulary."""
    arguments = [*inputs(), 1.0, 64, None, 1.0]
    arguments[position] = value
    with pytest.raises((TypeError, ValueError), match=rf"\b{message}\b"):
        ours().apply(*arguments)


def test_the_head_is_gathered_for_each_direction(monkeypatch):
    """By TRL's own context, which does nothing where the head is whole already, as TRL has it in the forward."""
    entered = []

    @contextmanager
    def gather(*parameters):
        entered.append(parameters)
        yield

    monkeypatch.setattr(trl_utils, "maybe_gather_lm_head_ctx", gather)
    hidden, weight, bias, targets = inputs()
    hidden.requires_grad_()
    logps = ours().apply(hidden, weight, bias, targets, 1.0, 64)[0]
    assert len(entered) == 1
    logps.sum().backward()
    assert len(entered) == 2
    for parameters in entered:
        assert parameters[0] is weight
        assert parameters[1] is bias


# --- what is patched --------------------------------------------------------------------------------------------------


def is_ours(op):
    return isinstance(op, integration.FusedLogProbs)


def test_options_come_and_go_with_the_patch():
    def options():
        return vars(trl_utils)[NAME].options["chunk_vocab"]

    patch_trl()
    first = vars(trl_utils)[NAME]
    assert is_ours(first)
    patch_trl(chunk_vocab=64)
    assert vars(trl_utils)[NAME] is first
    assert options() == 64
    with patched_trl(chunk_vocab=32):
        assert options() == 32
    assert options() == 64
    with patched_trl():
        assert options() is None
        unpatch_trl()
    assert options() == 64


def test_options_reach_the_core(monkeypatch):
    """Twice: to be tried when the patch is applied, and with every call."""
    calls = []

    def core(hidden, weight, targets, **options):
        calls.append((len(targets), options))
        return LogProbs(torch.zeros(len(targets)), None)

    monkeypatch.setattr(integration, "linear_logprobs", core)
    options = {"grad_tolerance": 0.01, "chunk_tokens": 5, "chunk_vocab": 64}
    patch_trl(**options)
    hidden, weight, bias, targets = inputs()
    vars(trl_utils)[NAME].apply(hidden, weight, bias, targets, 1.0, 32768)
    assert [n for n, _ in calls] == [0, len(targets)]
    for _, seen in calls:
        assert options.items() <= seen.items()


@pytest.mark.parametrize("options", [{"grad_tolerance": -0.1}, {"grad_tolerance": math.nan}, {"chunk_vocab": 0}])
def test_options_are_refused_before_anything_is_patched(options):
    original = vars(trl_utils)[NAME]
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        patch_trl(**options)
    assert vars(trl_utils)[NAME] is original
    patch_trl(chunk_vocab=64)
    with pytest.raises((TypeError, ValueError)):
        patch_trl(**options)
    assert vars(trl_utils)[NAME].options["chunk_vocab"] == 64


# --- other versions of TRL --------------------------------------------------------------------------------------------


class AnotherOp:
    """The signature of TRL 1.14's op, which has no `outputs`."""

    @staticmethod
    def forward(ctx, last_hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None,
                logit_scale=1.0):  # fmt: skip
        raise NotImplementedError


def fake_trl(monkeypatch, version, op=AnotherOp):
    """A TRL of nothing but a version and an op. The real one's modules that import each other are there already."""
    importlib.import_module("trl.kernels.chunked_divergence")
    trl, trainer, utils = (ModuleType(name) for name in ("trl", "trl.trainer", "trl.trainer.utils"))
    trl.__version__, utils._ChunkedLogProbFunction = version, op
    for module in (trl, trainer, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return utils


@pytest.mark.parametrize(("version", "older"), [("1.14.1", True), ("1.10.0", True), ("1.17.0", False)])
def test_what_to_do_with_an_older_version_is_said(version, older, monkeypatch):
    fake_trl(monkeypatch, version)
    with pytest.raises(ImportError) as caught:
        patch_trl()
    for advice in ("upgrade TRL", "TRL 1.10 to 1.12", "patch_liger()"):
        assert (advice in str(caught.value)) == older


@pytest.mark.parametrize(("version", "op"), [("1.16.0", AnotherOp), ("1.15.2", None)])
def test_a_trl_that_is_not_what_its_version_says_is_refused(version, op, monkeypatch):
    utils = fake_trl(monkeypatch, version, op)
    with pytest.raises(RuntimeError, match=NAME):
        patch_trl()
    assert vars(utils)[NAME] is op


# --- trainers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {name: trl_runs.save_model(name, directory) for name in trl_runs.MODELS}


# test/convergence has the others on gemma2.
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
    plain = trl_runs.Run({name: [value, value, value] for name, value in log.items()}, {}, 0)
    patched = trl_runs.Run({name: [log[name], other[name], other[name] + later] for name in log}, {}, 3)
    assert trl_runs.parted_at_a_bound(patched, plain) == parted


@pytest.mark.parametrize("model", ["gemma2", "cohere"])
def test_grpo_with_adams_default_epsilon(model, path_of, tmp_path):
    """1e-8 makes a full step of a gradient that is all rounding: up to 2e-6 seen."""
    plain, patched = trl_runs.grpo_pair("dapo", path_of[model], tmp_path, adam_epsilon=1e-8, max_steps=20)
    assert trl_runs.weight_distance(patched, plain) <= 1e-5


def as_if_sampled_by_vllm(trainer):
    """What vLLM's log-probabilities would come to in the loss: a ratio for every token."""
    compute, ratios = trainer._compute_loss, torch.Generator().manual_seed(0)

    def with_ratio(model, inputs):
        drawn = 0.3 + 1.4 * torch.rand(inputs["completion_ids"].shape, generator=ratios)
        trainer.use_vllm = True
        try:
            return compute(model, {**inputs, "importance_sampling_ratio": drawn})
        finally:
            trainer.use_vllm = False

    trainer._compute_loss = with_ratio


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_importance_ratios_of_vllm(loss_type, path_of, tmp_path):
    """TRL's loss takes them, whatever the op is."""
    options = {"loss_type": loss_type, "max_steps": 3}
    plain, patched = (
        trl_runs.train("grpo", path_of["qwen3"], tmp_path, patch=patch, prepare=as_if_sampled_by_vllm, **options)
        for patch in (False, True)
    )
    trl_runs.assert_same_run(patched, plain)
    without = trl_runs.train("grpo", path_of["qwen3"], tmp_path, patch=True, **options)
    assert trl_runs.weight_distance(without, patched) > 1e-3


@pytest.mark.parametrize("kind", trl_runs.TRAINERS)
def test_a_trainer_that_was_built_before_the_patch(kind, path_of, tmp_path):
    plain, patched = (
        trl_runs.train(kind, path_of["qwen3"], tmp_path, patch=patch, built_before=True, max_steps=2)
        for patch in (False, True)
    )
    trl_runs.assert_same_run(patched, plain)


def test_a_trainer_that_outlives_the_patch(path_of, tmp_path):
    """It goes on with TRL's own op."""

    def undo(trainer):
        unpatch_trl()

    plain, patched = (
        trl_runs.train("grpo", path_of["qwen3"], tmp_path, patch=patch, prepare=undo, max_steps=2)
        for patch in (False, True)
    )
    assert patched.calls == 0
    assert patched.log["loss"] == plain.log["loss"]


@pytest.mark.parametrize(
    ("kind", "model", "options"),
    [
        ("sft", "qwen3", {}),
        ("sft", "gemma2", {}),
        ("dpo", "qwen3", {}),
        ("dpo", "gemma2", {"use_weighting": True}),  # the only use of log sum p^2
        ("kto", "qwen3", {}),
        ("rloo", "qwen3", {}),
    ],
)
def test_other_trainers(kind, model, options, path_of, tmp_path):
    runs = (trl_runs.train(kind, path_of[model], tmp_path, patch=patch, **options) for patch in (False, True))
    plain, patched = runs
    trl_runs.assert_same_run(patched, plain)
    assert plain.log["loss"][0] != plain.log["loss"][-1]


def test_a_float32_head_on_a_bfloat16_body(path_of, tmp_path):
    """TRL's cast_lm_head_to_fp32: both compute the head in float32, so the first step agrees as in float32."""
    options = {"dtype": "bfloat16", "cast_lm_head_to_fp32": True, "entropy_coef": 0.02, "max_steps": 1}
    runs = (trl_runs.train("grpo", path_of["qwen3"], tmp_path, patch=patch, **options) for patch in (False, True))
    plain, patched = runs
    for name in ("loss", "kl", "entropy", "grad_norm"):
        assert patched.log[name] == pytest.approx(plain.log[name], rel=1e-3, abs=1e-6), name
    assert patched.calls > 0
