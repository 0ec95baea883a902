"""A LoRA layer of PEFT as one Function: PEFT's values to rounding, from fewer casts and saved tensors."""

import copy
import logging
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("peft", reason="PEFT is not installed")

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.awq import AwqLoraLinear
from peft.tuners.lora.gptq import GPTQLoraLinear

import oracles
from devices import on_gpu
from liger_rl import FusedLinearGRPOLoss, patch_peft
from liger_rl.integrations.peft import patched_peft, unpatch_peft
from liger_rl.models import lora_linear
from threads import in_threads

IN, OUT, RANK = 48, 40, 4


class Quantized(nn.Linear):
    """The layer of a package that quantizes."""

    __module__ = "bitsandbytes.nn.modules"

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


class Recorded(Quantized):
    """Its autograd needs its output, and it keeps it."""

    __module__ = "bitsandbytes.nn.modules"

    def forward(self, x):
        self.last = super().forward(x).tanh()
        return self.last


class View(torch.autograd.Function):
    """x W^T as bitsandbytes computes it: the output is a view that a Function has made."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return (x.reshape(-1, x.shape[-1]) @ weight.T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0], None


class Viewed(Quantized):
    __module__ = "bitsandbytes.nn.modules"

    def forward(self, x):
        return View.apply(x, self.weight.to(x.dtype))


class Widened(Quantized):
    """It returns float32 for any input."""

    __module__ = "bitsandbytes.nn.modules"

    def forward(self, x):
        return super().forward(x).float()


class Bounded(nn.Linear):
    """A layer of the user's."""

    def forward(self, x):
        return super().forward(x).tanh()


class QuantizedWeight(torch.Tensor):
    """A weight as torchao makes it: a linear layer takes it, and no other function."""

    __module__ = "torchao.quantization"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, *bias = args
            return function(x, weight.as_subclass(torch.Tensor), *bias)
        allowed = (torch.Tensor.as_subclass, torch.Tensor.detach, torch.Tensor.requires_grad_)
        if function in allowed or "__get__" in str(function):
            return super().__torch_function__(function, types, args, kwargs or {})
        raise NotImplementedError(str(function))


def layer(*, base=nn.Linear, base_dtype=torch.bfloat16, dtype=torch.float32, bias=False, device="cpu", **options):
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["0"], r=RANK, init_lora_weights=False, **{"use_rslora": True, **options})
    adapted = inject_adapter_in_model(config, nn.Sequential(base(IN, OUT, bias=bias)))[0]
    adapted.base_layer.to(base_dtype)
    for factors in (adapted.lora_A, adapted.lora_B):
        factors.to(dtype)
    return adapted.to(device)


def solve(adapted, patch, *, autocast=True, shape=(3, 5), requires_grad=True, dtype=torch.float32):
    """-> y, dx, dA, dB of one random loss, x in `dtype`."""
    device = adapted.base_layer.weight.device
    adapted = copy.deepcopy(adapted)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, IN, generator=generator).to(device, torch.bfloat16).to(dtype).requires_grad_(requires_grad)
    weights = torch.randn(*shape, OUT, generator=generator).to(device)
    torch.manual_seed(2)  # of the dropout
    with patched_peft() if patch else nullcontext(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        y = adapted(x)
    (y * weights.to(y.dtype)).sum().backward()
    factors = [parameter.grad for name, parameter in adapted.named_parameters() if "lora_" in name]
    return [y.detach(), *([x.grad] if requires_grad else []), *factors]


def expected(adapted, **options):
    """In float64, of the same parameters."""
    exact = copy.deepcopy(adapted).double()
    return solve(exact, False, autocast=False, dtype=torch.float64, **options)


CASES = {
    "float32 factors": {},
    "bfloat16 factors": {"dtype": torch.bfloat16},
    "a bias": {"bias": True},
    "a float32 layer": {"base_dtype": torch.float32},
    "a quantized layer": {"base": Quantized},
    "a quantized layer with an output in float32": {"base": Widened},
    "a scaling of its own": {"use_rslora": False, "lora_alpha": 3},
}


@pytest.mark.parametrize("device", ["cpu", *on_gpu("cuda")])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_peft_s(name, device):
    adapted = layer(device=device, **CASES[name])
    exact = expected(adapted)
    ours, theirs = (solve(adapted, patch) for patch in (True, False))
    for mine, other, truth in zip(ours, theirs, exact, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert oracles.relative_error(mine, truth) <= 1.5 * oracles.relative_error(other, truth) + 2**-9


def quantize_weight(adapted):
    weight = adapted.base_layer.weight.detach().as_subclass(QuantizedWeight)
    adapted.base_layer.weight = nn.Parameter(weight, requires_grad=False)
    return adapted


def of_class(kind):
    """The layer of another class of PEFT, around a layer with that class's kind of base."""

    def convert(adapted):
        config = LoraConfig(r=RANK, init_lora_weights=False)
        torch.manual_seed(0)
        return kind(Quantized(IN, OUT, bias=False).to(torch.bfloat16), "default", config=config, r=RANK, lora_alpha=2)

    return convert


@pytest.mark.parametrize("convert", [quantize_weight, of_class(GPTQLoraLinear), of_class(AwqLoraLinear)])
def test_the_base_of_a_quantized_model_runs_as_it_is(convert, monkeypatch):
    added = []
    monkeypatch.setattr(
        lora_linear.AddedLora,
        "apply",
        lambda *args, apply=lora_linear.AddedLora.apply: (added.append(1), apply(*args))[1],
    )
    adapted, results = convert(layer()), []
    for patch in (True, False):
        x = torch.randn(6, IN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with patched_peft() if patch else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            y = adapted(x)
        factors = [parameter for name, parameter in adapted.named_parameters() if "lora_" in name]
        results.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *factors])])
    assert added == [1]
    for mine, other in zip(*results, strict=True):
        assert oracles.relative_error(mine, other) < 2**-6


@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize("base", [Recorded, Viewed])
def test_the_output_of_a_quantized_layer_stays_as_it_is(base, use_reentrant):
    """Its autograd, the layer, a hook or a checkpoint keeps it."""
    adapted, results = layer(base=base), []
    for patch in (True, False):
        hooked = copy.deepcopy(adapted)
        kept = []
        hooked.base_layer.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output))
        x = torch.randn(2, 3, IN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with patched_peft() if patch else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            if use_reentrant is None:
                y = hooked(x)
            else:
                y = torch.utils.checkpoint.checkpoint(hooked, x, use_reentrant=use_reentrant)
            y.float().square().sum().backward()
        kept.append(getattr(hooked.base_layer, "last", kept[0]))
        results.append(
            [y, x.grad, *kept, *(hooked.lora_A["default"].weight.grad, hooked.lora_B["default"].weight.grad)]
        )
    for mine, other in zip(*results, strict=True):
        assert oracles.relative_error(mine, other) < 2**-6


@pytest.mark.parametrize("base", [nn.Linear, Quantized])
def test_dropout_is_peft_s_draw(base):
    """And not the layer without it."""
    adapted = layer(base=base, lora_dropout=0.5).train()
    ours, theirs, without = (solve(m, p) for m, p in ((adapted, True), (adapted, False), (layer(base=base), True)))
    for mine, other, undropped in zip(ours, theirs, without, strict=True):
        assert oracles.relative_error(mine, other) < 2**-6
        assert oracles.relative_error(mine, undropped) > 2**-4
    for mine, undropped in zip(solve(adapted.eval(), True), without, strict=True):
        assert torch.equal(mine, undropped)


@pytest.mark.parametrize("base", [nn.Linear, Quantized])
def test_the_dropout_is_a_module_of_its_own(base):
    """With a mode and hooks of its own."""
    adapted = layer(base=base, lora_dropout=0.5).eval()
    dropout = adapted.lora_dropout["default"].train()
    ours, theirs = (solve(adapted, patch) for patch in (True, False))
    dropout.eval().register_forward_hook(lambda module, args, output: 2 * output)
    ours, theirs = ([*before, *solve(adapted, patch)] for before, patch in ((ours, True), (theirs, False)))
    for mine, other in zip(ours, theirs, strict=True):
        assert oracles.relative_error(mine, other) < 2**-6


def test_an_input_without_a_gradient():
    adapted = layer()
    y, grad_a, grad_b = solve(adapted, True, requires_grad=False)
    whole_y, _, whole_a, whole_b = solve(adapted, True)
    assert torch.equal(y, whole_y)
    assert torch.equal(grad_a, whole_a)
    assert torch.equal(grad_b, whole_b)


def test_without_a_gradient_no_function_is_called(monkeypatch):
    adapted, x = layer(bias=True), torch.randn(2, 3, IN)
    with patched_peft(), torch.autocast("cpu", torch.bfloat16):
        expected = adapted(x)
        monkeypatch.setattr(lora_linear.LoraLinear, "apply", None)
        with torch.no_grad():
            assert torch.equal(adapted(x), expected)


@pytest.mark.parametrize("shape", [(), (7,), (2, 1, 3), (0,)])
def test_inputs_of_any_shape(shape):
    y, grad_x, *_ = solve(layer(), True, shape=shape)
    assert y.shape == (*shape, OUT)
    assert grad_x.shape == (*shape, IN)


def several(adapted):
    adapted.update_layer("other", r=2, lora_alpha=1, config=LoraConfig(r=2, init_lora_weights=False))
    adapted.set_adapter(["default", "other"])


def trained(adapted):
    adapted.base_layer.weight.requires_grad_(True)


def with_trained_bias(adapted):
    """As `LoraConfig(bias="lora_only")` and "all" leave it."""
    adapted.base_layer.bias.requires_grad_(True)


def with_a_bias_of_a(adapted):
    adapted.lora_A["default"].bias = nn.Parameter(torch.ones(RANK))


def hooked(adapted):
    adapted.lora_A["default"].register_forward_hook(lambda module, args, output: 2 * output)


def hooked_before_the_backward(adapted):
    adapted.base_layer.register_full_backward_pre_hook(lambda module, grads: (2 * grads[0],))


def parametrized(adapted):
    nn.utils.parametrizations.weight_norm(adapted.base_layer).requires_grad_(False)


def without_a_parameter(adapted, name="weight"):
    """As a weight that other parameters make, before the forward."""
    adapted.root = getattr(adapted.base_layer, name)
    delattr(adapted.base_layer, name)
    setattr(adapted.base_layer, name, adapted.root.requires_grad_()[:])


def with_a_made_bias(adapted):
    without_a_parameter(adapted, "bias")


def factor_without_a_plain_weight(adapted):
    weight = adapted.lora_A["default"].weight.detach().as_subclass(Subclass)
    adapted.lora_A["default"].weight = nn.Parameter(weight)


class Subclass(torch.Tensor):
    pass


def with_a_trained_scaling(adapted):
    adapted.gain = nn.Parameter(torch.tensor(3.0))
    adapted.scaling["default"] = adapted.gain


# What PEFT's own forward computes -> options of the layer, a change of it, whether autocast is on, what the log says.
LEFT = {
    "DoRA": ({"use_dora": True}, None, True, "no plain LoRA"),
    "a bias of the adapter": ({"lora_bias": True, "bias": True}, None, True, "the adapter has a bias"),
    "a bias of A": ({}, with_a_bias_of_a, True, "the adapter has a bias"),
    "several adapters": ({}, several, True, "several adapters"),
    "a trained layer": ({}, trained, True, "is trained"),
    "a trained bias": ({"bias": True}, with_trained_bias, True, "is trained"),
    "a weight that is no parameter": ({}, without_a_parameter, True, "is trained"),
    "a bias that is no parameter": ({"bias": True}, with_a_made_bias, True, "is trained"),
    "a layer of the user's": ({"base": Bounded}, None, True, "Bounded, is neither"),
    "a parametrized weight": ({}, parametrized, True, "ParametrizedLinear, is neither"),
    "a factor of another class": ({}, factor_without_a_plain_weight, True, "sharded on its own"),
    "a trained scaling": ({}, with_a_trained_scaling, True, "no number"),
    "hooks": ({}, hooked, True, "has hooks"),
    "hooks before the backward": ({}, hooked_before_the_backward, True, "has hooks"),
    "float64": ({"base_dtype": torch.float64, "dtype": torch.float64}, None, True, "float64"),
    "float32": ({"base_dtype": torch.float32}, None, False, "16-bit"),
    "merged": ({}, lambda adapted: adapted.merge(), True, None),
    "disabled": ({}, lambda adapted: adapted.enable_adapters(False), True, None),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_peft(name, caplog, monkeypatch):
    options, change, autocast, text = LEFT[name]
    monkeypatch.setattr(lora_linear, "_logged_reasons", set())
    caplog.set_level(logging.INFO, "liger_rl")
    adapted = layer(**options)
    if change is not None:
        change(adapted)
    ours, theirs = (solve_output(adapted, patch, autocast) for patch in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    assert (text or "") in caplog.text


def test_a_forward_without_a_graph_logs_no_reason(caplog, monkeypatch):
    """That of a trial has hooks on each layer."""
    monkeypatch.setattr(lora_linear, "_logged_reasons", set())
    caplog.set_level(logging.INFO, "liger_rl")
    adapted = layer()
    adapted.lora_A["default"].register_forward_hook(lambda *args: None)
    x = torch.randn(6, IN)
    with patched_peft(), torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            adapted(x)
        assert "has hooks" not in caplog.text
        adapted(x)
    assert "has hooks" in caplog.text


def solve_output(adapted, patch, autocast):
    torch.manual_seed(1)
    x = torch.randn(6, IN)
    x = (x.double() if adapted.lora_A["default"].weight.dtype == torch.float64 else x).requires_grad_()
    with patched_peft() if patch else nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = adapted(x)
        again = adapted(x)
    trained = [x, *(own for own in adapted.parameters() if own.requires_grad)]
    return [y, again, *torch.autograd.grad(y.float().square().sum(), trained, materialize_grads=True)]


def test_without_autocast_dtypes_decide():
    """PEFT computes in the adapter's dtype."""
    for dtype, is_ours in ((torch.bfloat16, True), (torch.float32, False)):
        x = torch.randn(6, IN, dtype=torch.bfloat16, requires_grad=True)
        with patched_peft():
            y = layer(dtype=dtype)(x)
        assert (y.grad_fn.next_functions[0][0].name() == "LoraLinearBackward") == is_ours


@pytest.mark.parametrize("name", ["lora_B.default.weight", "base_layer.bias"])
def test_without_autocast_dtypes_that_peft_cannot_multiply(name):
    adapted = layer(dtype=torch.bfloat16, bias=True)
    adapted.get_parameter(name).data = adapted.get_parameter(name).float()
    for context in (patched_peft(), nullcontext()):
        with context, pytest.raises(RuntimeError, match="dtype"):
            adapted(torch.randn(6, IN, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ],
)
def test_a_hook_for_all_modules_sees_every_module(register):
    adapted, called = layer(), {True: [], False: []}
    for patch in (True, False):
        handle = register(lambda module, *args, seen=called[patch]: seen.append(type(module)))
        try:
            solve(adapted, patch)
        finally:
            handle.remove()
    assert called[True] == called[False]


def test_transforms_of_torch_func():
    x = torch.randn(3, 5, IN, generator=torch.Generator().manual_seed(1))
    adapted, results = layer(), []
    for context in (patched_peft(), nullcontext()):
        with context, torch.autocast("cpu", torch.bfloat16):
            results.append(torch.func.vmap(torch.func.grad(lambda row: adapted(row).float().square().sum()))(x))
    assert torch.equal(*results)


def test_it_keeps_the_input_and_its_product_with_a():
    x = torch.randn(6, IN, requires_grad=True)
    kept: dict[bool, int] = {}
    for patch in (True, False):
        adapted, sizes = layer(), []
        weights = {parameter.untyped_storage().data_ptr() for parameter in adapted.parameters()}

        def pack(tensor, sizes=sizes, weights=weights):
            if tensor.untyped_storage().data_ptr() not in weights and 6 in tensor.shape:
                sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with (
            patched_peft() if patch else nullcontext(),
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            adapted(x)
        kept[patch] = sum(sizes)
    assert kept[True] == 2 * 6 * (IN + RANK)
    assert kept[False] >= kept[True]


def test_a_checkpoint_gives_the_same_bits():
    adapted = layer(lora_dropout=0.3).train()
    results = []
    for recompute, context in ((False, nullcontext), (True, nullcontext), (True, lora_linear.sharing_casts)):
        adapted.zero_grad()
        x = torch.ones(4, IN, requires_grad=True)
        torch.manual_seed(3)
        with patched_peft(), torch.autocast("cpu", torch.bfloat16):
            with context():
                y = torch.utils.checkpoint.checkpoint(adapted, x, use_reentrant=False) if recompute else adapted(x)
            y.float().sum().backward()
        results.append([y, x.grad, adapted.lora_A["default"].weight.grad.clone()])
    for plain, again, shared in zip(*results, strict=True):
        assert torch.equal(plain, again)
        assert torch.equal(plain, shared)


# --- casts of the adapters --------------------------------------------------------------------------------------------


def take_a_step(adapted):
    factors = [own for own in adapted.parameters() if own.requires_grad]
    for factor in factors:
        factor.grad = torch.ones_like(factor)
    torch.optim.AdamW(factors, lr=0.5).step()


def add_in_place(adapted):
    with torch.no_grad():
        adapted.lora_B["default"].weight.add_(1)


def add_to_data(adapted):
    """Its version does not change."""
    adapted.lora_A["default"].weight.data.add_(1)


def assign_data(adapted):
    weight = adapted.lora_A["default"].weight
    weight.data = weight + 1


def replace_a_factor(adapted):
    adapted.lora_A["default"] = nn.Linear(IN, RANK, bias=False)


def replace_a_weight(adapted):
    adapted.lora_B["default"].weight = nn.Parameter(torch.randn(OUT, RANK))


def load(adapted):
    adapted.load_state_dict({name: tensor + 1 for name, tensor in adapted.state_dict().items()})


def assign(adapted):
    adapted.load_state_dict({name: tensor + 1 for name, tensor in adapted.state_dict().items()}, assign=True)


def switch(adapted):
    adapted.update_layer("other", r=2, lora_alpha=1, config=LoraConfig(r=2, init_lora_weights=False))
    adapted.set_adapter("other")


def cast_the_factors(adapted):
    adapted.lora_A.to(torch.float16)


# Changes between two forwards of which no cast of an adapter may be left.
CHANGES = [
    take_a_step, add_in_place, assign_data, replace_a_factor, replace_a_weight, load, assign, switch, cast_the_factors
]  # fmt: skip
# What PEFT computes then, the patched layer computes too.
SETTINGS = [
    lambda adapted: adapted.set_scale("default", 3),
    lambda adapted: adapted.scale_layer(0.5),
    lambda adapted: adapted.merge(),
    lambda adapted: adapted.enable_adapters(False),
    lambda adapted: adapted.base_layer.weight.requires_grad_(True),
    lambda adapted: adapted.lora_B["default"].register_forward_hook(lambda module, args, output: 2 * output),
    lambda adapted: adapted.lora_dropout.update({"default": nn.Dropout(0.5)}),
    several,
]


# The context ends before anybody writes a weight without a new version.
@pytest.mark.parametrize(
    ("change", "context"),
    [(add_to_data, nullcontext), *product([*CHANGES, *SETTINGS], [nullcontext, lora_linear.sharing_casts])],
)
@pytest.mark.parametrize("base", [nn.Linear, Quantized])
def test_no_change_of_a_layer_is_missed(base, change, context):
    """The last two forwards are of the changed layer, and so is the backward."""
    x, adapted = torch.randn(6, IN, generator=torch.Generator().manual_seed(1)), layer(base=base)
    with patched_peft(), context(), torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            before = adapted(x)
        adapted(x)
        change(adapted)
        found = run_once(adapted, x)
        with torch.no_grad():
            torch.manual_seed(5)
            assert torch.equal(adapted(x), found[0])
    assert not torch.equal(found[0], before) or change is SETTINGS[4]
    fresh = copy.deepcopy(adapted)
    with patched_peft(), torch.autocast("cpu", torch.bfloat16):
        expected = run_once(fresh, x)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = run_once(fresh, x)
    for mine, other, plain in zip(found, expected, theirs, strict=True):
        assert torch.equal(mine, other)
        assert oracles.relative_error(mine, plain) < 2**-5


def run_once(adapted, x):
    """-> y and the gradients of what is trained."""
    torch.manual_seed(5)
    y = adapted(x)
    if not y.requires_grad:
        return [y]
    trained = [own for name, own in sorted(adapted.named_parameters()) if own.requires_grad]
    grads = torch.autograd.grad(y.float().square().sum(), trained, materialize_grads=True)
    return [y.detach(), *(grad.float() for grad in grads)]


class Casts(TorchDispatchMode):
    """Counts the casts of float32 matrices."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32:
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("base", [nn.Linear, Quantized])
def test_forwards_of_one_step_share_casts(base):
    adapted, x = layer(base=base), torch.randn(6, IN, dtype=torch.bfloat16)
    with patched_peft(), torch.autocast("cpu", torch.bfloat16):
        for context, number in ((lora_linear.sharing_casts, 1), (nullcontext, 3), (lora_linear.sharing_casts, 1)):
            with context(), Casts() as casts:
                with torch.no_grad():
                    adapted(x)
                for _ in range(2):
                    adapted(x)
            assert casts.shapes == [(RANK, IN), (OUT, RANK)] * number
        with lora_linear.sharing_casts():
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype):
                    assert adapted(x).dtype == dtype


def test_a_step_casts_its_adapters_once(monkeypatch):
    """Sequences with and without a gradient run apart."""
    from test_shared_prefixes import batch_of, tuned

    from step_calls import run

    model, loss = tuned(target_modules=["q_proj", "down_proj"], r=5), FusedLinearGRPOLoss("dapo", metrics="basic")
    forwards, multiply = [], lora_linear.multiply
    monkeypatch.setattr(lora_linear, "multiply", lambda *args: (forwards.append(1), multiply(*args))[1])
    with patched_peft(), torch.autocast("cpu", torch.bfloat16):
        run(model, batch_of(), loss)
        forwards.clear()
        with Casts() as casts:
            run(model, batch_of(), loss)
    assert len(forwards) == 2 * 2
    factors = sorted(tuple(own.shape) for name, own in model.named_parameters() if "lora_" in name)
    assert sorted(shape for shape in casts.shapes if shape in factors) == factors


def test_another_thread_shares_no_casts():
    adapted, x = layer(), torch.randn(6, IN, dtype=torch.bfloat16)

    def count():
        with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
            adapted(x)
        return len(casts.shapes)

    with patched_peft(), lora_linear.sharing_casts():
        assert (count(), count()) == (2, 0)
        assert in_threads(count, times=2) == [[2, 2]]


def test_shared_casts_under_the_inference_mode():
    with torch.inference_mode():
        adapted = layer()
    x = torch.randn(6, IN, dtype=torch.bfloat16)
    with patched_peft(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = adapted(x)
        with lora_linear.sharing_casts():
            assert torch.equal(adapted(x), expected)


def test_a_compiled_layer_is_one_graph():
    adapted, x = layer(), torch.randn(6, IN, dtype=torch.bfloat16)
    with patched_peft(), lora_linear.sharing_casts(), torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(adapted, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), adapted(x))


def test_the_patch_comes_and_goes():
    from peft.tuners.lora.layer import Linear

    original = Linear.forward
    patch_peft()
    assert Linear.forward is not original
    unpatch_peft()
    assert Linear.forward is original


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trl_trains_about_as_far_from_float32(dtype, tmp_path, monkeypatch):
    """In bfloat16, of a base model in either dtype; without a reference, which is without the adapters."""
    pytest.importorskip("trl", reason="TRL is not installed")
    import trl_runs

    calls = []
    apply = lora_linear.LoraLinear.apply
    monkeypatch.setattr(lora_linear.LoraLinear, "apply", lambda *inputs: calls.append(1) or apply(*inputs))
    path = trl_runs.save_model("qwen3", tmp_path)
    # A larger scaling, so that adapters count.
    config = LoraConfig(target_modules="all-linear", lora_alpha=64, init_lora_weights=False)
    options = {"peft_config": config, "max_steps": 4, "bf16": True, "learning_rate": 3e-3}
    exact = trl_runs.train("SFT", path, tmp_path, patch=False, **options | {"bf16": False})
    plain = trl_runs.train("SFT", path, tmp_path, patch=False, dtype=dtype, **options)
    assert not calls
    patched = trl_runs.train("SFT", path, tmp_path, patch=True, dtype=dtype, **options)
    assert len(calls) >= 4 * 14
    for run in (plain, patched):
        run.weights.update({name: weight.float() for name, weight in run.weights.items()})
    assert trl_runs.log_distance(patched, exact, "loss") <= 2 * trl_runs.log_distance(plain, exact, "loss") + 2**-8
    assert trl_runs.weight_distance(patched, exact) <= 1.5 * trl_runs.weight_distance(plain, exact)
