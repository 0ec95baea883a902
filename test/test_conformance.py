"""`liger_rl.conformance`: right functions pass, and each check fails for a function with its fault."""

import json

import pytest
import torch

from liger_rl.conformance import CHECKS, check, main, reference

subjects = pytest.importorskip("benchmark.conformance", reason="the benchmark is not part of an installed package")
ours = subjects.ours
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
    assert failed(ours, dtype=dtype) == (set() if dtype == torch.float32 else {"offset_gradient"})


def test_plain_pytorch_passes_all_that_it_promises():
    found = results(reference)
    assert found.pop("batch_invariance").status == "fail"
    assert {result.status for result in found.values()} == {"pass"}


def test_no_comparison_is_vacuous():
    """One percent off in values and gradients."""
    same = {"inputs_unchanged", "same_bits", "out_of_range_ids"}
    assert failed(lambda *tensors, **options: 1.01 * reference(*tensors, **options)) == set(NAMES) - same


class Slope(torch.autograd.Function):
    """A tensor as it is, with a gradient that is a function of its own."""

    @staticmethod
    def forward(ctx, tensor, backward):
        ctx.own = backward
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.own(grad), None


class ConstantSoftmax(torch.autograd.Function):
    """log_softmax with a softmax that was computed in the forward, and has no derivative."""

    @staticmethod
    def forward(ctx, z):
        found = z.log_softmax(-1)
        ctx.softmax = found.exp()
        return found

    @staticmethod
    def backward(ctx, grad):
        return grad - ctx.softmax * grad.sum(-1, keepdim=True)


def picked(z, ids):
    return z.gather(-1, ids[:, None]).squeeze(-1)


def gradient_of_another(hidden, weight, ids, temperature=1.0, softcap=None):
    """Values with the options, gradients without them."""
    plain = reference(hidden, weight, ids)
    return plain + (reference(hidden, weight, ids, temperature=temperature, softcap=softcap) - plain).detach()


def temperature_before_softcap(hidden, weight, ids, temperature=1.0, softcap=None):
    return reference(hidden / temperature, weight, ids, softcap=softcap)


def mask_as_a_factor(hidden, weight, ids, mask=None):
    logps = reference(hidden, weight, ids)
    return logps if mask is None else logps * mask


def no_bias_gradient(hidden, weight, ids, bias=None):
    return reference(hidden, weight, ids, bias=None if bias is None else bias.detach() + 0.0 * bias)


def no_support(hidden, weight, ids, support=None):
    return reference(hidden, weight, ids)


def no_last_tile(hidden, weight, ids):
    z = hidden @ weight.T
    return picked(z, ids) - z[:, : max(1, weight.shape[0] // 128 * 128)].logsumexp(-1)


def no_last_id(hidden, weight, ids):
    return reference(hidden, weight, ids.where(ids != weight.shape[0] - 1, ids - 1))


def no_maximum(hidden, weight, ids):
    z = hidden @ weight.T
    return picked(z, ids) - z.exp().sum(-1).log()


def rounded_logits(hidden, weight, ids):
    return picked((hidden @ weight.T).bfloat16().float().log_softmax(-1), ids)


def needs_a_trained_head(hidden, weight, ids):
    weight.register_hook(lambda grad: None)
    return reference(hidden, weight, ids)


def needs_trained_hidden(hidden, weight, ids):
    hidden.register_hook(lambda grad: None)
    return reference(hidden, weight, ids)


def reads_rows(hidden, weight, ids):
    return reference(hidden.as_strided(hidden.shape, (hidden.shape[1], 1)), weight, ids)


def one_buffer(hidden, weight, ids):
    buffer = torch.empty_like(hidden)
    return reference(Slope.apply(hidden, buffer.copy_), weight, ids)


def adds_to_grad_itself(hidden, weight, ids):
    """Its gradient is the total, to which autograd adds what was there."""
    return reference(hidden, Slope.apply(weight, lambda g: g if weight.grad is None else g + weight.grad), ids)


def doubles_from_the_second(hidden, weight, ids):
    return reference(hidden, Slope.apply(weight, lambda g: g if weight.grad is None else 2.0 * g), ids)


def constant_softmax(hidden, weight, ids):
    return picked(ConstantSoftmax.apply(hidden @ weight.T), ids)


def rounded_lse(hidden, weight, ids):
    """Its softmax is exp(z - lse), with one float32 number for lse."""
    z = hidden @ weight.T
    p = (z - z.logsumexp(-1, keepdim=True)).exp().detach()
    slope = picked(z, ids) - (p * z).sum(-1)
    return picked(z.log_softmax(-1), ids).detach() + (slope - slope.detach())


def no_second_derivative(hidden, weight, ids):
    hidden, weight = (Slope.apply(tensor, torch.Tensor.detach) for tensor in (hidden, weight))
    return reference(hidden, weight, ids)


def writes_to_hidden(hidden, weight, ids):
    logps = reference(hidden.clone(), weight, ids)
    hidden.data.add_(1.0)
    return logps


def noise(hidden, weight, ids):
    return reference(hidden, weight, ids) + 1e-6 * torch.rand(ids.shape)


def clamped_ids(hidden, weight, ids):
    return reference(hidden, weight, ids.clamp(0, weight.shape[0] - 1))


def wrong_shape(hidden, weight, ids):
    return reference(hidden, weight, ids)[:, None]


MUTANTS = [
    (gradient_of_another, "temperature"), (gradient_of_another, "softcap"), (no_bias_gradient, "bias"),
    (temperature_before_softcap, "softcap_temperature"), (mask_as_a_factor, "masked_rows"), (no_support, "top_p"),
    (no_last_tile, "tails"), (no_last_id, "border_ids"), (no_maximum, "offset"), (no_maximum, "zero_gradient_rows"),
    (rounded_logits, "ordinary"), (wrong_shape, "ordinary"), (rounded_logits, "offset"),
    (needs_a_trained_head, "frozen_head"), (needs_trained_hidden, "frozen_hidden"), (reads_rows, "strides"),
    (one_buffer, "second_backward"), (adds_to_grad_itself, "accumulation"), (doubles_from_the_second, "accumulation"),
    (constant_softmax, "second_derivative"), (no_second_derivative, "second_derivative"), (noise, "same_bits"),
    (writes_to_hidden, "inputs_unchanged"), (clamped_ids, "out_of_range_ids"), (reference, "batch_invariance"),
    (rounded_lse, "offset_gradient"),
]  # fmt: skip
EVERYWHERE = {rounded_logits, wrong_shape}


@pytest.mark.parametrize(("mutant", "name"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_mutant_fails_the_check_of_its_fault(mutant, name):
    assert failed(mutant, name) == {name}
    if mutant not in EVERYWHERE:
        assert not failed(mutant, "ordinary"), "the fault shows in the plainest call, and tells nothing of the check"


def test_every_check_has_its_mutant():
    assert {name for _, name in MUTANTS} == set(NAMES)


def test_options_that_are_not_served_are_no_failures():
    options = {"temperature", "softcap", "softcap_temperature", "bias", "top_p", "masked_rows"}
    found = results(lambda hidden, weight, ids: reference(hidden, weight, ids))
    assert {name for name, result in found.items() if result.status == "not served"} == options
    assert "'mask'" in found["masked_rows"].detail


def test_an_option_that_must_be_given_is_a_failure():
    def needs_mask(hidden, weight, ids, *, mask):
        return reference(hidden, weight, ids, mask=mask)

    assert failed(needs_mask, "ordinary", "masked_rows") == {"ordinary"}


def test_the_command(tmp_path, capsys):
    """Exits with 1, because plain PyTorch is not batch-invariant."""
    assert main(["liger_rl.conformance:reference", "--device", "cpu", "--json", str(tmp_path / "found.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = json.loads((tmp_path / "found.json").read_text())
    assert [result["name"] for result in found["results"]] == NAMES == [line.split()[0] for line in lines]
    assert found["function"] == "liger_rl.conformance:reference"


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="function must be callable, got int"):
        check(1)
    with pytest.raises(ValueError, match=r"dtype must be one of float32, .*got torch\.float64"):
        check(reference, dtype=torch.float64)
