"""linear_logprobs: as exact as promised, and the arguments that it refuses.

Options in all their combinations are the fuzzer's, properties test_properties.py's.
"""

import math

import pytest
import torch

import oracles
from head_calls import CALLS, Products, batch, eager, problem, solve, truth
from liger_rl import HeadOptions, LogitTransform, linear_logprobs

TRANSFORMS = [{}, {"temperature": 1.6, "softcap": 2.0, "scale": 1.7}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "all"])
def test_values_and_gradients_within_twice_eager_error(dtype, transform, device):
    inputs = problem((4, 24), 64, 517, dtype, device, bias=True)
    ours = solve(inputs, transform=LogitTransform(**transform))
    other, exact = eager(inputs, **transform), truth(inputs, **transform)
    # The outputs are float32, whatever the inputs: one rounding is float32's.
    for name in ("logps", "entropy"):
        found, expected = getattr(ours, name), getattr(exact, name)
        assert found.dtype == torch.float32
        assert found.shape == inputs.targets.shape
        budget = oracles.error_budget(getattr(other, name), expected, torch.float32)
        assert oracles.max_error(found, expected) <= min(budget, 2e-5), name
    for name, found in ours.grads.items():
        budget = oracles.error_budget(other.grads[name], exact.grads[name], dtype)
        assert found.dtype == dtype
        assert oracles.max_error(found, exact.grads[name]) <= budget, name


@pytest.mark.parametrize("chunk_vocab", [None, 10])
def test_large_logits_stay_finite_and_at_most_zero(chunk_vocab, device):
    inputs = problem((40,), device=device)
    scaled = inputs._replace(hidden=inputs.hidden * 1e4)
    best = (scaled.hidden @ scaled.weight.mT).argmax(-1)
    for targets in (inputs.targets, best):
        result = solve(scaled._replace(targets=targets), chunk_vocab=chunk_vocab)
        assert all(values.isfinite().all() for values in (result.logps, result.entropy, *result.grads.values()))
        assert (result.logps <= 0).all()
        assert (result.entropy >= 0).all()


# --- bad input --------------------------------------------------------------------------------------------------------

NAN = math.nan
BAD_ARGUMENTS = [
    # name in the message, type, arguments that replace good ones
    ("hidden", ValueError, {"hidden": torch.zeros(16)}),
    ("hidden", ValueError, {"hidden": torch.zeros(1, 3, 5, 16)}),
    ("hidden", TypeError, {"hidden": torch.zeros(3, 5, 16, dtype=torch.float64)}),
    ("hidden", TypeError, {"hidden": torch.zeros(3, 5, 16, dtype=torch.int64)}),
    ("hidden", TypeError, {"hidden": [[0.0]]}),
    ("hidden", ValueError, {"hidden": torch.zeros(3, 5, 0), "weight": torch.zeros(129, 0)}),
    ("hidden", TypeError, {"hidden": torch.zeros(15, 16).to_sparse(), "targets": torch.zeros(15, dtype=torch.int64)}),
    ("weight", TypeError, {"weight": torch.zeros(129, 16).to_sparse()}),
    ("targets", TypeError, {"targets": torch.zeros(3, 5, dtype=torch.int64).to_sparse()}),
    ("mask", TypeError, {"mask": torch.ones(3, 5).to_sparse()}),
    ("weight", ValueError, {"weight": torch.zeros(129)}),
    ("weight", ValueError, {"weight": torch.zeros(129, 17)}),
    ("weight", ValueError, {"weight": torch.zeros(0, 16)}),
    ("weight", TypeError, {"weight": torch.zeros(129, 16, dtype=torch.float64)}),
    ("autocast", TypeError, {"weight": torch.zeros(129, 16, dtype=torch.bfloat16)}),
    ("weight", ValueError, {"weight": torch.zeros(129, 16, device="meta")}),
    ("bias", ValueError, {"bias": torch.zeros(128)}),
    ("bias", ValueError, {"bias": torch.zeros(129, 1)}),
    ("bias", TypeError, {"bias": torch.zeros(129, dtype=torch.float16)}),
    ("bias", TypeError, {"bias": 1.0}),
    ("bias", ValueError, {"bias": torch.zeros(129, device="meta")}),
    ("targets", ValueError, {"targets": torch.zeros(3, 4, dtype=torch.int64)}),
    ("targets", ValueError, {"targets": torch.zeros(15, dtype=torch.int64)}),
    ("targets", TypeError, {"targets": torch.zeros(3, 5)}),
    ("targets", TypeError, {"targets": torch.zeros(3, 5, dtype=torch.bool)}),
    ("targets", TypeError, {"targets": [0]}),
    ("targets", ValueError, {"targets": torch.zeros(3, 5, dtype=torch.int64, device="meta")}),
    ("targets", ValueError, {"targets": torch.full((3, 5), 129)}),
    ("targets", ValueError, {"targets": torch.full((3, 5), 10**12)}),
    ("mask", ValueError, {"mask": torch.ones(3, 4)}),
    ("mask", ValueError, {"mask": torch.ones(3)}),
    ("mask", TypeError, {"mask": [1]}),
    ("mask", ValueError, {"mask": torch.full((3, 5), 0.5)}),
    ("mask", ValueError, {"mask": torch.full((3, 5), NAN)}),
    ("mask", ValueError, {"mask": torch.full((3, 5), -1)}),
    ("mask", ValueError, {"mask": torch.ones(3, 5, device="meta")}),
    ("transform", TypeError, {"transform": 0.5}),
    ("transform", TypeError, {"transform": LogitTransform}),
    ("entropy", TypeError, {"entropy": 1}),
    ("fixed_shape", TypeError, {"fixed_shape": "no"}),
    ("batch_invariant", TypeError, {"batch_invariant": 0}),
    ("extras", TypeError, {"extras": 5}),
    ("chunk_tokens", ValueError, {"chunk_tokens": 0}),
    ("chunk_tokens", TypeError, {"chunk_tokens": 4.0}),
    ("chunk_vocab", ValueError, {"chunk_vocab": -1}),
    ("chunk_vocab", TypeError, {"chunk_vocab": True}),
    ("grad_tolerance", ValueError, {"grad_tolerance": -0.1}),
    ("grad_tolerance", ValueError, {"grad_tolerance": 1.0}),
    ("grad_tolerance", ValueError, {"grad_tolerance": NAN}),
    ("grad_tolerance", TypeError, {"grad_tolerance": "1e-3"}),
    ("extras", ValueError, {"extras": ("is_top2",)}),
    ("extras", TypeError, {"extras": "is_top1"}),
    ("compute_dtype", TypeError, {"compute_dtype": torch.float64}),
    ("gather", TypeError, {"gather": True}),
    ("vocab_parallel", TypeError, {"vocab_parallel": object()}),
]


@pytest.mark.parametrize(("name", "error", "arguments"), BAD_ARGUMENTS)
def test_bad_arguments_are_named_before_any_product(name, error, arguments):
    good = problem().leaves()
    with Products() as products, pytest.raises(error, match=rf"\b{name}\b"):
        linear_logprobs(**{"hidden": good.hidden, "weight": good.weight, "targets": good.targets, **arguments})
    assert products.flops == 0


BAD_VALUES = [(ValueError, value) for value in (0.0, -1.0, math.nan, math.inf, 10**400, 1e300, 1e-60)]


@pytest.mark.parametrize(("error", "value"), [*BAD_VALUES, *((TypeError, value) for value in ("1.0", [1.0], True))])
@pytest.mark.parametrize("option", ["temperature", "softcap", "scale"])
def test_transform_values(option, error, value):
    with pytest.raises(error, match=option):
        LogitTransform(**{option: value})


CHANGED = {
    "chunk_tokens": 64, "chunk_vocab": 64, "grad_tolerance": 0.1, "batch_invariant": True, "fixed_shape": True,
    "lse": True, "topk": 3,
}  # fmt: skip
# Feature in the message, call of the table, its options, options that do not go with them.
NOT_TOGETHER = [
    ("with batch_invariant", "dense", {"batch_invariant": True}, ("chunk_tokens", "chunk_vocab", "grad_tolerance")),
    ("with fixed_shape", "dense", {"fixed_shape": True}, ("grad_tolerance",)),
    ("with lse", "dense", {"lse": True}, ("grad_tolerance",)),
    ("with topk", "dense", {"topk": 3}, ("grad_tolerance",)),
    ("with low_rank", "low rank", {}, ("batch_invariant",)),
    ("with weight_grad", "dense", {"weight_grad": torch.zeros(129, 16)}, ("grad_tolerance",)),
    ("with a support", "support", {}, ("lse", "topk", "grad_tolerance", "batch_invariant")),
    ("with several targets", "several targets", {"lse": False}, ("grad_tolerance",)),
    ("with several targets", "a teacher's lists", {}, ("grad_tolerance",)),
    ("with token_weights", "JSD in one pass", {}, ("fixed_shape", "chunk_vocab")),
]


@pytest.mark.parametrize(
    ("feature", "name", "options", "option"), [(*row[:3], option) for row in NOT_TOGETHER for option in row[3]]
)
def test_options_that_do_not_go_together(feature, name, options, option):
    x, changed = batch(), options | {option: CHANGED[option]}
    message = rf"{option} must be (None|False|0\.0) {feature}"
    with Products() as products, pytest.raises(ValueError, match=message):
        CALLS[name].function(x.leaves(CALLS[name].inputs), **changed)
    assert products.flops == 0
    if feature.removeprefix("with ") in options and "weight_grad" not in options:
        with pytest.raises(ValueError, match=message):
            HeadOptions(**changed)
