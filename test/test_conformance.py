"""`benchmark.conformance_checks`: right functions pass, and checks fail for functions with their fault."""

import pytest
import torch

pytest.importorskip("benchmark.conformance", reason="the benchmark is not part of an installed package")

from benchmark.conformance import ours
from benchmark.conformance_checks import CHECKS, check, reference

NAMES = [one.name for one in CHECKS]


def results(function, *names, **options):
    checks = [one for one in CHECKS if one.name in names] if names else CHECKS
    return {result.name: result for result in check(function, device="cpu", checks=checks, **options)}


def failed(function, *names, **options):
    found = results(function, *names, **options)
    assert found.keys() == set(names or NAMES)
    return {name for name, result in found.items() if result.status == "fail"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ours(dtype):
    """With 16-bit factors dL/dlogits is rounded to 16 bits before its products, and 1e4 times that is not 0."""
    promised = failed(ours, dtype=dtype) - {"batch_invariance"}
    assert promised == (set() if dtype == torch.float32 else {"offset_gradient"})


def test_plain_pytorch_passes_all_that_it_promises():
    found = results(reference)
    assert found.pop("batch_invariance").status == "fail"
    assert {result.status for result in found.values()} == {"pass"}


def test_no_comparison_is_vacuous():
    """One percent off in values and gradients."""
    same = {"inputs_unchanged", "same_bits", "out_of_range_ids"}
    assert failed(lambda *tensors, **options: 1.01 * reference(*tensors, **options)) == set(NAMES) - same


def gradient_of_another(hidden, weight, ids, temperature=1.0, softcap=None):
    """Values with the options, gradients without them."""
    plain = reference(hidden, weight, ids)
    return plain + (reference(hidden, weight, ids, temperature=temperature, softcap=softcap) - plain).detach()


def mask_as_a_factor(hidden, weight, ids, mask=None):
    logps = reference(hidden, weight, ids)
    return logps if mask is None else logps * mask


def no_maximum(hidden, weight, ids):
    z = hidden @ weight.T
    return z.gather(-1, ids[:, None]).squeeze(-1) - z.exp().sum(-1).log()


def reads_rows(hidden, weight, ids):
    return reference(hidden.as_strided(hidden.shape, (hidden.shape[1], 1)), weight, ids)


def writes_to_hidden(hidden, weight, ids):
    logps = reference(hidden.clone(), weight, ids)
    hidden.data.add_(1.0)
    return logps


def noise(hidden, weight, ids):
    return reference(hidden, weight, ids) + 1e-6 * torch.rand(ids.shape)


def clamped_ids(hidden, weight, ids):
    return reference(hidden, weight, ids.clamp(0, weight.shape[0] - 1))


MUTANTS = [
    (gradient_of_another, "temperature"), (gradient_of_another, "softcap"), (mask_as_a_factor, "masked_rows"),
    (no_maximum, "offset"), (no_maximum, "zero_gradient_rows"), (reads_rows, "strides"), (noise, "same_bits"),
    (writes_to_hidden, "inputs_unchanged"), (clamped_ids, "out_of_range_ids"), (reference, "batch_invariance"),
]  # fmt: skip


@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_mutant_fails_the_check_of_its_fault(mutant, name):
    assert failed(mutant, name) == {name}
    assert not failed(mutant, "ordinary"), "the fault shows in the plainest call, and tells nothing of the check"


def test_options_that_are_not_served_are_no_failures():
    options = {"temperature", "softcap", "softcap_temperature", "bias", "top_p", "masked_rows"}
    found = results(lambda hidden, weight, ids: reference(hidden, weight, ids))
    assert {name for name, result in found.items() if result.status == "not served"} == options
    assert "'mask'" in found["masked_rows"].detail
