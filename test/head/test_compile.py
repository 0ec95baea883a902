"""torch.compile: the graph breaks around the head and around the losses, with the numbers of eager mode."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from head_calls import CALLS, Batch, batch, functional
from liger_rl import FusedLinearGRPOLoss


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that counts the products with 2 in its graphs, and runs them as they are."""

    doublings = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs) -> Callable:
        self.doublings += sum(node.op == "call_function" and "mul" in str(node.target) for node in graph.graph.nodes)
        return graph.forward


def solve(x: Batch, name: str, function: Callable, *, backend=None, inside: bool = False) -> list[Tensor | None]:
    """Results of two calls, and the gradients of the table's inputs; `inside`: the step has the backward in it."""
    inputs = CALLS[name].inputs
    x = x.leaves(inputs)
    # No NamedTuple: Dynamo of torch 2.11 loses the fields of one that a graph has made.
    doubled = SimpleNamespace(**x._asdict())

    def step() -> list[Tensor]:
        setattr(doubled, inputs[0], getattr(x, inputs[0]) * 2)
        outputs = [values * 2 for values in function(doubled) if values is not None]
        total = functional(*(values for values in outputs if values.requires_grad))
        if inside:
            total.backward()
        return [total, *outputs]

    call = step if backend is None else torch.compile(step, backend=backend)
    results = []
    for _ in range(2):
        total, *outputs = call()
        if not inside:
            total.backward()
        results += [values.detach() for values in outputs]
    return [*results, *(getattr(x, part).grad for part in inputs)]


# Of the others, which take the compiler seconds each, `make test-compile` asks.
CALLED = ["dense", "JSD in one pass", *(
    pytest.param(name, marks=pytest.mark.compilation)
    for name in ("support with empty rows", "a teacher's lists", "given logits", "policy of given logits")
)]  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_the_graph_breaks_around_a_call(name):
    x, graphs = batch(), Graphs()
    expected = solve(x, name, CALLS[name].function)
    torch.testing.assert_close(solve(x, name, CALLS[name].function, backend=graphs), expected, rtol=0.0, atol=0.0)
    assert graphs.doublings
    torch._dynamo.reset()  # torch 2.8 would run the function as it ran it behind the graph's break
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(CALLS[name].function, fullgraph=True, backend="eager")(x)


@pytest.mark.compilation
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_a_loss_of_a_compiled_step(inside):
    x, loss = batch(), FusedLinearGRPOLoss("grpo", beta=0.1, metrics="basic")
    old = torch.full(x.mask.shape, -4.0)

    def step(x: Batch) -> list[Tensor]:
        columns = {"old_per_token_logps": old, "ref_per_token_logps": old}
        result = loss(x.hidden, x.weight, x.targets, x.advantages[:, 0], x.mask, **columns)
        return [result.loss, *(metric.total.detach().float() for metric in result.metrics.values())]

    found = solve(x, "dense", step, backend="inductor", inside=inside)
    torch.testing.assert_close(found, solve(x, "dense", step))


@pytest.mark.compilation
def test_a_swapped_model(device):
    transformers = pytest.importorskip("transformers", reason="the model is HuggingFace's")
    from liger_rl import swap_lm_head

    config = transformers.Gemma2Config(
        vocab_size=160, hidden_size=32, num_hidden_layers=1, intermediate_size=32, head_dim=16, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = swap_lm_head(transformers.Gemma2ForCausalLM(config).to(device))
    ids = torch.randint(160, (2, 9), device=device)
    labels = ids.masked_fill(torch.arange(9, device=device) < 3, -100)

    def step_of(call: Callable) -> list[Tensor]:
        model.zero_grad()
        out = call(input_ids=ids, labels=labels, temperature=0.8, entropy=True, fused=True)
        (out.loss + out.entropy.sum()).backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        return [*(values.detach() for values in (out.loss, out.per_token_logps, out.entropy)), *grads]

    compiled, expected = torch.compile(model, backend="inductor"), step_of(model)
    for _ in range(2):
        torch.testing.assert_close(step_of(compiled), expected)
    # The head still answers for itself, in one graph.
    whole = torch.compile(model, backend="inductor", fullgraph=True)
    torch.testing.assert_close(whole(input_ids=ids).logits, model(input_ids=ids).logits)
