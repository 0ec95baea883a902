"""What reads the rows of a batch in training keeps the batch as it is: noise, statistics, a loss inside of a layer."""

import copy
import functools
import gc
import weakref
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from test_trials import LOSS, batch_of
from torch import nn

from hf_models import BEFORE_5, build, transformers
from liger_rl import loss_step, loss_steps, swap_lm_head
from liger_rl.step.row_readers import find_row_reader

NEFTUNE_HOME = transformers.trainer_utils if BEFORE_5 else transformers.integrations.neftune
AS_IT_IS = "the batch as it is: "


class Around(nn.Module):
    """A layer of somebody's own in the place of one of the model."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer


class AddedLoss(torch.autograd.Function):
    """Remote code of mixtures of experts adds a loss of their router so."""

    @staticmethod
    def forward(ctx, values, loss):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(())


def add_loss(values):
    return AddedLoss.apply(values, values.square().mean())


class WithAddedLoss(Around):
    def forward(self, *args):
        return add_loss(self.layer(*args))


class WithKeptLoss(Around):
    loss = None

    def forward(self, *args):
        values = self.layer(*args)
        self.loss = values.square().mean()
        return values


class WithListOfLosses(Around):
    def __init__(self, layer) -> None:
        super().__init__(layer)
        self.losses: list = []

    def forward(self, *args):
        values = self.layer(*args)
        self.losses.append(values.square().mean())
        return values


class WithRunningMean(Around):
    def __init__(self, layer) -> None:
        super().__init__(layer)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, *args):
        values = self.layer(*args)
        if self.training:
            self.mean.lerp_(values.detach().mean(), 0.1)
        return values - self.mean


class WithTable(Around):
    """Builds a table in its first forward, as rotary embeddings of remote code do."""

    table = None

    def forward(self, *args):
        if self.table is None:
            self.table = torch.ones(4)
        return self.layer(*args) * self.table[0]


class WithBatchNorm(Around):
    def __init__(self, layer) -> None:
        super().__init__(layer)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, *args):
        return self.norm(self.layer(*args).mT).mT


def around(kind):
    def change(model):
        model.model.layers[0].mlp = kind(model.model.layers[0].mlp)

    return change


def add_neftune(model):
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    model.get_input_embeddings().register_forward_hook(NEFTUNE_HOME.neftune_post_forward_hook)


def add_hook(model):
    model.model.layers[0].register_forward_hook(lambda *_: None)


def set_forward(model):
    """As some libraries add noise to embeddings."""
    embeddings = model.get_input_embeddings()
    forward = embeddings.forward
    embeddings.forward = lambda ids: forward(ids) + (torch.rand(()) if embeddings.training else 0)


READERS = {
    "NEFTune": (add_neftune, "NEFTune's noise is scaled by a row's length"),
    "hook": (add_hook, "test_row_readers.add_hook.<locals>.<lambda>, a hook on LlamaDecoderLayer, may read"),
    "forward": (set_forward, "test_row_readers.set_forward.<locals>.<lambda>, a hook on Embedding, may read"),
    "added loss": (around(WithAddedLoss), "WithAddedLoss calls AddedLoss, an autograd function that may add a loss"),
    "kept loss": (around(WithKeptLoss), "WithKeptLoss keeps values of the batch in training (loss)"),
    "list of losses": (around(WithListOfLosses), "WithListOfLosses keeps values of the batch in training (losses)"),
    "running mean": (around(WithRunningMean), "WithRunningMean keeps values of the batch in training (mean)"),
    "batch norm": (around(WithBatchNorm), "BatchNorm1d takes statistics of the batch in training"),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_batch_stays_as_it_is_in_training(name):
    change, reason = READERS[name]
    model = swap_lm_head(build("Llama"))
    change(model)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for _ in range(2):
        assert loss_steps(model, batch_of(), LOSS).layout.startswith(AS_IT_IS + reason)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not [x for module in model.modules() for x in getattr(module, "losses", ())]
    with pytest.raises(ValueError, match=r"max_tokens must be None or at least .* stays as it is, got 50"):
        loss_steps(model, batch_of(), LOSS, max_tokens=50)
    assert "trees of shared prefixes" in loss_steps(model.eval(), batch_of(), LOSS).layout


@pytest.mark.parametrize("kind", [WithKeptLoss, WithListOfLosses, WithBatchNorm])
def test_a_swap_leaves_what_layers_keep(kind):
    """It runs the model on a few tokens."""
    model = build("Llama").train()
    around(kind)(model)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    swap_lm_head(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not getattr(model.model.layers[0].mlp, "losses", None)


@pytest.mark.parametrize(("package", "reads"), [("wandb.integration.torch.wandb_torch", False), ("my_probes", True)])
def test_hooks_that_watch_parameters(package, reads):
    """As `wandb.watch` has them on each layer."""
    namespace = {"__name__": package}
    exec("def log_parameters(module, inputs, output): pass", namespace)
    model = build("Qwen3")
    for layer in model.model.layers:
        layer.register_forward_hook(namespace["log_parameters"])
    reason = find_row_reader(model, list(model.modules()))
    assert (f"{package}.log_parameters" in str(reason)) == reads
    assert (reason is None) != reads


def see_gradient(*_):
    return None


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("where", ["every layer", "LlamaMLP"])
def test_hooks_of_every_kind(kind, where):
    model = build("Llama").train()
    home = torch.nn.modules.module if where == "every layer" else model.model.layers[0].mlp
    handle = getattr(home, f"register_module_{kind}_hook" if where == "every layer" else f"register_{kind}_hook")(
        see_gradient
    )
    try:
        reason = find_row_reader(model, list(model.modules()))
        assert str(reason) == f"test_row_readers.see_gradient, a hook on {where}, may read the batch's rows"
        assert find_row_reader(model.eval(), list(model.modules())) is None
    finally:
        handle.remove()


def quantize(mlp):
    from torch.ao.quantization import FakeQuantize

    mlp.act_fn = nn.Sequential(mlp.act_fn, FakeQuantize())


def observe(mlp):
    from torch.ao.quantization import MovingAverageMinMaxObserver

    mlp.act_fn = nn.Sequential(mlp.act_fn, MovingAverageMinMaxObserver())


KEEPING = {
    "FakeQuantize takes statistics": quantize,
    "MovingAverageMinMaxObserver takes statistics": observe,
    "_SpectralNorm takes statistics": lambda mlp: nn.utils.parametrizations.spectral_norm(mlp.up_proj),
    "spectral_norm of Linear takes statistics": lambda mlp: nn.utils.spectral_norm(mlp.up_proj),
}


@pytest.mark.parametrize("reason", KEEPING)
def test_layers_of_torch_that_keep_statistics(reason):
    model = build("Llama").train()
    KEEPING[reason](model.model.layers[0].mlp)
    assert reason in str(find_row_reader(model, list(model.modules())))
    assert find_row_reader(model.eval(), list(model.modules())) is None


QUANTIZED = """
class Dequantize(torch.autograd.Function):
    forward = staticmethod(lambda ctx, values: values)

class QuantLinear(torch.nn.Linear):
    def forward(self, values):
        return Dequantize.apply(super().forward(values))
"""


@pytest.mark.parametrize(("package", "reads"), [("gptqmodel.nn_modules.qlinear.marlin", False), ("my_layers", True)])
def test_layers_of_quantized_weights(package, reads):
    namespace = {"__name__": package, "torch": torch}
    exec(QUANTIZED, namespace)
    model = build("Qwen3")
    for layer in model.model.layers:
        layer.self_attn.q_proj.__class__ = namespace["QuantLinear"]
    assert (find_row_reader(model, list(model.modules())) is not None) == reads


def test_layers_that_keep_nothing_of_the_batch(monkeypatch):
    model = swap_lm_head(build("Llama"))
    around(WithTable)(model)
    norm = model.model.norm  # with a kernel of the hub
    monkeypatch.setattr(type(norm), "kernel_layer_name", "RMSNorm", raising=False)
    norm.forward = MethodType(lambda self, x: type(self).forward(self, x), norm)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()  # a hook of transformers on the embeddings
    assert "trees of shared prefixes" in loss_step(model, batch_of(), LOSS).layout


# --- what a trial finds -----------------------------------------------------------------------------------------------

LOSSES: list = []
CALLS, STATE = 0, {"aux": None}


class Register:
    losses: ClassVar[list] = []

    @classmethod
    def add(cls, loss):
        cls.losses.append(loss)


@dataclass
class Statistics:
    mean: float = 0.0


def keep(function):
    """A layer that does this with its output in training."""

    class Keeper(Around):
        losses: ClassVar[list] = []
        count = 0

        def __init__(self, layer) -> None:
            super().__init__(layer)
            self.state, self.stats, self.record = {"aux": None}, (0, 0), SimpleNamespace(mean=0)
            self.statistics, self.frozen = Statistics(), nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, *args):
            values = self.layer(*args)
            if self.training and torch.is_grad_enabled():
                changed = function(self, values)
                values = values if changed is None else changed
            return values

    return Keeper


def count_calls(layer, values):
    global CALLS
    CALLS += 1


def in_closure():
    kept, count = [], 0

    def keep_some(layer, values):
        nonlocal count
        count += 1
        kept.append(values.mean())

    return keep_some


def put(place, name):
    return lambda layer, values: setattr(place(layer), name, values.mean().item())


KEEPERS = {
    "a dict": lambda layer, values: layer.state.update(aux=values.mean()),
    "a tuple": lambda layer, values: setattr(layer, "stats", (values.mean(), values.var())),
    "a number": put(lambda layer: layer, "mean"),
    "an object": put(lambda layer: layer.record, "mean"),
    "a dataclass": put(lambda layer: layer.statistics, "mean"),
    "the config": put(lambda layer: layer.layer.config, "aux"),
    "another layer": put(lambda layer: layer.layer, "aux"),
    "a default": lambda layer, values, kept=[]: kept.append(values.mean()),
    "a method of another class": lambda layer, values: Register.add(values.mean()),
    "a count": lambda layer, values: setattr(layer, "count", layer.count + 1),
    "a parameter": lambda layer, values: layer.frozen.data.add_(1),
    "a global": count_calls,
    "a global list": lambda layer, values: LOSSES.append(values.mean()),
    "a global dict": lambda layer, values: STATE.update(aux=values.mean()),
    "a closure": in_closure(),
    "a list of the class": lambda layer, values: type(layer).losses.append(values.mean()),
    "a number of the class": lambda layer, values: setattr(type(layer), "count", type(layer).count + 1),
}
ROW_READERS = {
    "the row's mean": lambda layer, values: values - 0.1 * values.mean(1, keepdim=True),
    "the batch's mean": lambda layer, values: values - 0.1 * values.mean((0, 1)),
    "the row's length": lambda layer, values: values * (1 + 1 / values.shape[1]),
    "the number of rows": lambda layer, values: values / values.shape[0],
    "the last token": lambda layer, values: values + 0.1 * values[:, -1:],
    "noise": lambda layer, values: values + torch.rand_like(values) / values.shape[1],
    "noise of a root": lambda layer, values: values + torch.randn_like(values) / values.shape[1] ** 0.5,
}


def replace_forward(model):
    """As a library that patches a known class does."""
    layer = model.model.layers[0].mlp
    forward = type(layer).forward

    @functools.wraps(forward)
    def with_statistics(self, values):
        output = forward(self, values)
        self.last = output.mean()
        return output

    kind = type(
        type(layer).__name__, (type(layer),), {"forward": with_statistics, "__module__": type(layer).__module__}
    )
    layer.__class__ = kind


class KeepingCall(type(build("Llama").model.layers[0].mlp)):
    """A known layer's forward, and more around it."""

    def __call__(self, *args):
        output = super().__call__(*args)
        self.last = output.mean()
        return output


def change_class(model):
    model.model.layers[0].mlp.__class__ = KeepingCall


class NoisyEmbedding(nn.Embedding):
    def forward(self, ids):
        values = super().forward(ids)
        return values * (1 + 1 / ids.shape[1]) if self.training else values


def change_embedding(model):
    model.get_input_embeddings().__class__ = NoisyEmbedding


KEEPS, READS = "keeps values of the batch in training", "gives a row other values beside other rows"
FOUND = {
    **{name: (around(keep(function)), f"Keeper {KEEPS}") for name, function in KEEPERS.items()},
    **{name: (around(keep(function)), f"Keeper {READS}") for name, function in ROW_READERS.items()},
    "a patched class": (replace_forward, f"LlamaMLP {KEEPS}"),
    "a subclass": (change_class, f"KeepingCall {KEEPS}"),
    "an embedding": (change_embedding, f"NoisyEmbedding {READS}"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_trial_finds_what_layers_keep_and_read(name):
    change, reason = FOUND[name]
    model = swap_lm_head(build("Llama", num_hidden_layers=1)).train()
    change(model)
    mlp = model.model.layers[0].mlp
    names = ("state", "stats", "record", "statistics", "frozen", "losses")

    def read():
        values = [getattr(mlp, name, None) for name in names]
        return copy.deepcopy((values, vars(mlp).get("count"), LOSSES, Register.losses, STATE, model.config.to_dict()))

    before = read()
    assert loss_steps(model, batch_of(), LOSS).layout.startswith(AS_IT_IS + reason)
    assert read() == before


def read_mean(values):
    return values - 0.3 * values.mean((0, 1), keepdim=True)


def scale(values):
    return 1.5 * values


class Helped(Around):
    function = staticmethod(scale)

    def forward(self, values):
        return self.layer(self.function(values))


@pytest.mark.parametrize("place", ["a layer", "a method"])
def test_a_model_is_tried_again_if_its_layers_change(place, monkeypatch):
    model = swap_lm_head(build("Llama", num_hidden_layers=1)).train()
    layer = model.model.layers[0]
    if place == "a method":
        layer.mlp = Helped(layer.mlp)
    for reads in (False, True, False):
        if place == "a method":
            monkeypatch.setattr(Helped, "function", staticmethod(read_mean if reads else scale))
        elif reads:
            layer.mlp = keep(lambda layer, values: read_mean(values))(layer.mlp)
        else:
            layer.mlp = getattr(layer.mlp, "layer", layer.mlp)
        layout = loss_steps(model, batch_of(), LOSS).layout
        assert layout.startswith(AS_IT_IS) == reads == (READS in layout)


def test_classes_of_a_model_are_freed_with_it():
    def run():
        table = torch.ones(3)
        kind = type("Mine", (transformers.LlamaForCausalLM,), {"table": table})
        model = swap_lm_head(kind(build("Llama", num_hidden_layers=1).config)).train()
        model.model.layers[0].mlp = keep(lambda layer, values: values * table[0])(model.model.layers[0].mlp)
        assert "trees of shared prefixes" in loss_steps(model, batch_of(), LOSS).layout
        return [weakref.ref(x) for x in (table, kind, type(model.model.layers[0].mlp))]

    references = run()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


PLAIN_LAYERS = {
    "nothing": lambda layer, values: None,
    "the last shape": lambda layer, values: setattr(layer, "shape", values.shape),
    "an equal number": lambda layer, values: setattr(layer, "scale", 1.0 + 1.0),
    "a scale": lambda layer, values: values * 1.5,
    "each token": lambda layer, values: values / values.std(-1, keepdim=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLAIN_LAYERS)
def test_a_trial_passes_layers_that_see_each_token_alone(name, dtype):
    model = swap_lm_head(build("Llama", num_hidden_layers=4).to(dtype)).train()
    for layer in model.model.layers:
        layer.mlp = keep(PLAIN_LAYERS[name])(layer.mlp)
    assert "trees of shared prefixes" in loss_steps(model, batch_of(), LOSS).layout


@pytest.mark.parametrize(
    "noise",
    [
        lambda layer, values: nn.functional.dropout(values, 0.2),
        lambda layer, values: values + 0.1 * torch.randn_like(values),
    ],
    ids=["dropout", "normal"],
)
def test_a_trial_passes_noise_that_reads_no_row(noise):
    model = swap_lm_head(build("Llama", num_hidden_layers=3)).train()
    for layer in model.model.layers:
        layer.mlp = keep(noise)(layer.mlp)
    assert not loss_steps(model, batch_of(), LOSS).layout.startswith(AS_IT_IS)


# --- under TRL --------------------------------------------------------------------------------------------------------

trl_runs = pytest.importorskip("trl_runs", reason="TRL is not installed")
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}


def test_running_statistics_are_trls(tmp_path):
    """Also of the micro-batches of an optimizer step, from the first on."""

    def make():
        torch.manual_seed(0)
        model = trl_runs.transformers.Qwen3ForCausalLM(copy.deepcopy(trl_runs.MODELS["qwen3"]))
        around(WithRunningMean)(model)
        return model

    means, runs = [], []
    for patch in (False, True):
        model = make()
        runs.append(trl_runs.train("SFT", model, tmp_path, patch=patch, max_steps=2, **ACCUMULATED))
        means.append(model.model.layers[0].mlp.mean)
    trl_runs.assert_same_run(*reversed(runs))
    torch.testing.assert_close(*means, rtol=1e-5, atol=0)
    assert means[0]
