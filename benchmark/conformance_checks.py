"""Hold a function of hidden states, a weight and ids against float64, with torch alone.

    function(hidden (N, H), weight (V, H), ids (N,), **options) -> (N,) log-probabilities in nats, with gradients

Options are keywords: temperature and softcap (numbers), mask (N,) bool, bias (V,), support (N, V) bool, the ids that
could be drawn. A TypeError that names one of them says that the function does not serve it, which is no failure.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

Function = Callable[..., Tensor]
ORDERS = 8  # in which eager PyTorch adds: in one of them its error may be small by luck


class Result(NamedTuple):
    """Of one check: its name, a status ("pass", "fail" or "not served"), and the error nearest to its bound, or why."""

    name: str
    status: str
    detail: str


class NotServed(Exception):
    pass


class Inputs(NamedTuple):
    leaves: dict[str, Tensor]  # hidden, weight and, for the check of it, bias
    ids: Tensor
    upstream: Tensor  # (N,), d loss / d log-probability
    options: dict[str, Any]
    frozen: str = ""

    def trained(self) -> dict[str, Tensor]:
        return {name: leaf.detach().requires_grad_(name != self.frozen) for name, leaf in self.leaves.items()}

    def logps(self, function: Function, leaves: dict[str, Tensor]) -> Tensor:
        named = self.options | leaves
        hidden, weight = named.pop("hidden"), named.pop("weight")
        try:
            logps = function(hidden, weight, self.ids, **named)
        except TypeError as error:
            if any(re.search(rf"\b{name}\b", str(error)) for name in named):
                raise NotServed(error) from error
            raise
        if logps.shape != self.ids.shape:
            raise ValueError(f"log-probabilities must be {tuple(self.ids.shape)}, got {tuple(logps.shape)}")
        return logps


def reference(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, temperature: float = 1.0, softcap: float | None = None,
    mask: Tensor | None = None, bias: Tensor | None = None, support: Tensor | None = None, order: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Full logits: the truth if the inputs are float64, else eager PyTorch with float32 logits."""
    hidden = hidden if mask is None else hidden.masked_fill(~mask[:, None], 0.0)
    hidden, weight = (t if t.dtype == torch.float64 else t.float() for t in (hidden, weight))
    hidden, weight = (t if order is None else t[:, order] for t in (hidden, weight))
    z = hidden @ weight.T if bias is None else hidden @ weight.T + bias.to(hidden.dtype)
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    z = z if support is None else z.masked_fill(~support, -torch.inf)
    logps = z.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    return logps if mask is None else logps.masked_fill(~mask, 0.0)


Procedure = Callable[[Function, Inputs], dict[str, Tensor]]


def one_step(function: Function, given: Inputs) -> dict[str, Tensor]:
    """-> log-probabilities of the tokens that count, and the gradient of each leaf."""
    leaves = given.trained()
    logps = given.logps(function, leaves)
    logps.backward(given.upstream.to(logps.dtype))
    return {"logps": logps.detach()[given.options.get("mask", slice(None))], **_grads(leaves)}


def _grads(leaves: dict[str, Tensor], when: str = "") -> dict[str, Tensor]:
    trained = ((name, leaf) for name, leaf in leaves.items() if leaf.requires_grad)
    return {f"d{n}{when}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in trained}


def two_backwards(function: Function, given: Inputs) -> dict[str, Tensor]:
    leaves = given.trained()
    logps = given.logps(function, leaves)
    upstream = given.upstream.to(logps.dtype)
    first = torch.autograd.grad(logps, tuple(leaves.values()), upstream, retain_graph=True)
    second = torch.autograd.grad(logps, tuple(leaves.values()), -0.5 * upstream.flip(0))
    return dict(zip((f"d{name}, {n}" for n in ("first", "second") for name in leaves), first + second, strict=True))


def micro_batches(function: Function, given: Inputs) -> dict[str, Tensor]:
    leaves, found = given.trained(), dict[str, Tensor]()
    for number, rows in enumerate((slice(0, 20), slice(20, 64), slice(0, 64)), 1):
        logps = given._replace(ids=given.ids[rows]).logps(function, leaves | {"hidden": leaves["hidden"][rows]})
        logps.backward(given.upstream[rows].to(logps.dtype))
        found |= {name: grad.clone() for name, grad in _grads(leaves, f" after {number}").items()}
    return found


def derivative_of_gradients(function: Function, given: Inputs) -> dict[str, Tensor]:
    """Of their squared norm. Without a graph it is 0, as that of a penalty in a larger loss would be."""
    leaves, upstream = given.trained(), given.upstream.detach().requires_grad_()
    logps = given.logps(function, leaves)
    first = torch.autograd.grad(logps, tuple(leaves.values()), upstream.to(logps.dtype), create_graph=True)
    norm = sum((grad.double() ** 2).sum() for grad in first) + 0.0 * upstream.sum()
    of = leaves | {"upstream": upstream}
    second = torch.autograd.grad(norm, tuple(of.values()), allow_unused=True, materialize_grads=True)
    return dict(zip((f"second derivative by {name}" for name in of), second, strict=True))


class Measure(NamedTuple):
    what: str
    error: float
    bound: float = 0.0


def differing(what: str, found: Tensor, expected: Tensor) -> Measure:
    return Measure(what, int(found.ne(expected).sum()))


def largest_error(found: Tensor, truth: Tensor) -> float:
    return (found.double() - truth).abs().nan_to_num(nan=torch.inf).max().item()


class Subject(NamedTuple):
    function: Function
    device: torch.device
    dtype: torch.dtype

    def inputs(self, tokens: int = 64, vocab: int = 512, size: int = 32, frozen: str = "", **options: Any) -> Inputs:
        """The same numbers in each call, with logits of 3 nats' standard deviation."""
        g = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(tokens, size, generator=g), torch.randn(vocab, size, generator=g)
        upstream, ids = torch.randn(tokens, generator=g), torch.randint(vocab, (tokens,), generator=g)
        leaves = {"hidden": hidden.to(self.dtype), "weight": (weight * 3.0 / size**0.5).to(self.dtype)}
        leaves = {name: leaf.to(self.device) for name, leaf in leaves.items()}
        return Inputs(leaves, ids.to(self.device), upstream.to(self.device), options, frozen)

    def compare(self, given: Inputs, procedure: Procedure = one_step) -> Iterator[Measure]:
        """The bound is twice the error of eager PyTorch in the same dtype, plus one rounding of the largest value."""
        leaves = {name: leaf.double() for name, leaf in given.leaves.items()}
        truth = procedure(reference, given._replace(leaves=leaves, upstream=given.upstream.double()))
        size, g = given.leaves["hidden"].shape[1], torch.Generator().manual_seed(1)
        orders = (torch.arange(size), *(torch.randperm(size, generator=g) for _ in range(ORDERS - 1)))
        eager = [procedure(partial(reference, order=order.to(self.device)), given) for order in orders]
        found = procedure(self.function, given)
        for name, expected in truth.items():
            rounding = torch.finfo(found[name].dtype).eps * expected.abs().max().item()
            bound = 2.0 * max(largest_error(one[name], expected) for one in eager) + rounding
            assert bound < torch.inf, name
            yield Measure(name, largest_error(found[name], expected), bound)

    def tails(self) -> Iterator[Measure]:
        for sizes in ((37, 1031, 40), (1, 1031, 40), (5, 33001, 8), (4099, 13, 8)):
            yield from self.compare(self.inputs(*sizes))

    def border_ids(self) -> Iterator[Measure]:
        ids = [0, *(edge + side for edge in range(128, 1031, 128) for side in (-1, 0)), 1030]
        yield from self.compare(self.inputs(len(ids), 1031)._replace(ids=torch.tensor(ids, device=self.device)))

    def offset(self, columns: slice) -> Iterator[Measure]:
        def step(function: Function, given: Inputs) -> dict[str, Tensor]:
            found = one_step(function, given)
            return found | {"dhidden": found["dhidden"][:, columns]}

        for constant in (1e4, -1e4):
            given = self.inputs()
            given.leaves["hidden"][:, 0], given.leaves["weight"][:, 0] = 1.0, constant
            yield from self.compare(given, step)

    def bias(self) -> Iterator[Measure]:
        given = self.inputs()
        yield from self.compare(given._replace(leaves=given.leaves | {"bias": given.leaves["weight"].sum(1)}))

    def top_p(self) -> Iterator[Measure]:
        given = self.inputs()
        support = torch.rand(64, 512, generator=torch.Generator().manual_seed(2)).to(self.device) < 0.05
        yield from self.compare(given._replace(options={"support": support.scatter(1, given.ids[:, None], True)}))

    def zeros(self, given: Inputs, rows: slice) -> Iterator[Measure]:
        yield from self.compare(given)
        dhidden = one_step(self.function, given)["dhidden"][rows]
        yield differing("entries of dhidden that should be 0 and are not", dhidden, torch.zeros_like(dhidden))

    def masked_rows(self) -> Iterator[Measure]:
        given = self.inputs(mask=torch.arange(64, device=self.device) % 3 != 1)
        given.leaves["hidden"][1::3], given.leaves["hidden"][4::6] = torch.nan, torch.inf
        yield from self.zeros(given, slice(1, None, 3))

    def zero_gradient_rows(self) -> Iterator[Measure]:
        given = self.inputs()
        given.leaves["hidden"][::2] *= torch.finfo(self.dtype).max ** 0.5
        given.upstream[::2] = 0.0
        yield from self.zeros(given, slice(0, None, 2))

    def strides(self) -> Iterator[Measure]:
        given = self.inputs()
        leaves = {name: leaf.T.contiguous().T for name, leaf in given.leaves.items()}
        ids, upstream = given.ids.repeat_interleave(2)[::2], given.upstream[:1].expand(64)
        yield from self.compare(Inputs(leaves, ids, upstream, {}))

    def second_derivative(self) -> Iterator[Measure]:
        one_step(self.function, self.inputs())  # an error of the first derivative is a failure
        try:
            found = list(self.compare(self.inputs(), derivative_of_gradients))
        except Exception as error:
            found = [Measure(f"wrong second derivatives (raises {type(error).__name__})", 0)]
        yield from found

    def inputs_unchanged(self) -> Iterator[Measure]:
        given, before = self.inputs(), self.inputs()
        one_step(self.function, given)
        tensors = {"ids": before.ids, "upstream": before.upstream} | before.leaves
        for name, now in ({"ids": given.ids, "upstream": given.upstream} | given.leaves).items():
            yield differing(f"changed entries of {name}", now, tensors[name])

    def same_bits(self) -> Iterator[Measure]:
        first, second = (one_step(self.function, self.inputs(37, 1031, 40)) for _ in range(2))
        yield from (differing(f"entries of {name} with other bits", second[name], was) for name, was in first.items())

    @torch.no_grad()
    def batch_invariance(self) -> Iterator[Measure]:
        given, rows = self.inputs(64, 1031, 256), torch.arange(64, device=self.device)
        hidden, weight = given.leaves.values()
        parts = (rows, rows.flip(0), *rows.split(1))
        together, reverse, *alone = (self.function(hidden[part], weight, given.ids[part]) for part in parts)
        yield differing("of 64 tokens, with other bits alone", torch.cat(alone), together)
        yield differing("of 64 tokens, with other bits in reverse order", reverse.flip(0), together)

    def out_of_range_ids(self) -> Iterator[Measure]:
        one_step(self.function, self.inputs())  # an error for good ids is a failure
        for wrong in (512, -1):
            given = self.inputs()
            given.ids[0] = wrong
            try:
                found = one_step(self.function, given)
            except Exception as error:
                yield Measure(f"results for id {wrong} (raises {type(error).__name__})", 0)
            else:
                masked = found["logps"][0] == 0 and not found["dhidden"][0].any()
                yield Measure(f"results for id {wrong}", 0 if masked else 1)


class Check(NamedTuple):
    """A name, a sentence, and the function that measures."""

    name: str
    sentence: str
    measures: Callable[[Subject], Iterator[Measure]]


CHECKS = (
    Check("ordinary", "64 tokens, 512 ids, H = 32.", lambda s: s.compare(s.inputs())),
    Check("tails", "No tile divides the sizes; one token; 33,001 ids; 4,099 tokens.", Subject.tails),
    Check("border_ids", "Ids 0 and V - 1, and both sides of each multiple of 128.", Subject.border_ids),
    Check("offset", "All logits are 1e4 larger, or smaller.", lambda s: s.offset(slice(1, None))),
    Check("offset_gradient", "The gradient along that offset is 0.", lambda s: s.offset(slice(1))),
    Check("temperature", "Logits / 0.7.", lambda s: s.compare(s.inputs(temperature=0.7))),
    Check("softcap", "4 tanh(logits / 4).", lambda s: s.compare(s.inputs(softcap=4.0))),
    Check("softcap_temperature", "Both, in this order.", lambda s: s.compare(s.inputs(softcap=4.0, temperature=0.7))),
    Check("bias", "A bias, and its gradient.", Subject.bias),
    Check("top_p", "Probabilities over the ids that could have been drawn.", Subject.top_p),
    Check("masked_rows", "NaN or infinity in masked rows changes nothing; their gradient is 0.", Subject.masked_rows),
    Check("zero_gradient_rows", "Huge logits and no upstream gradient: exactly 0.", Subject.zero_gradient_rows),
    Check("frozen_head", "The hidden states' gradient alone.", lambda s: s.compare(s.inputs(frozen="weight"))),
    Check("frozen_hidden", "The weight's gradient alone.", lambda s: s.compare(s.inputs(frozen="hidden"))),
    Check("strides", "Transposed matrices, strided ids, an expanded upstream gradient.", Subject.strides),
    Check("second_backward", "Right; keeps the first's results.", lambda s: s.compare(s.inputs(), two_backwards)),
    Check("accumulation", "Micro-batches add to one .grad.", lambda s: s.compare(s.inputs(), micro_batches)),
    Check("second_derivative", "Right, or an error; never wrong or 0 in silence.", Subject.second_derivative),
    Check("inputs_unchanged", "No input is written to.", Subject.inputs_unchanged),
    Check("same_bits", "Two runs give the same bits.", Subject.same_bits),
    Check("batch_invariance", "The same bits alone, in a batch, in another order.", Subject.batch_invariance),
    Check("out_of_range_ids", "An id of V or -1 raises or is masked; on CPU alone.", Subject.out_of_range_ids),
)
"""All checks, in the order of the results."""


def _result(one: Check, subject: Subject) -> Result:
    if one.name == "out_of_range_ids" and subject.device.type != "cpu":
        return Result(one.name, "not served", "not run: such an id may end a process on a GPU")
    try:
        worst = max(one.measures(subject), key=lambda measure: measure.error / max(measure.bound, 1e-300))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        return Result(one.name, "not served" if isinstance(error, NotServed) else "fail", text)
    detail = f"{worst.what}: {worst.error:.2g}, at most {worst.bound:.2g}"
    return Result(one.name, "pass" if worst.error <= worst.bound else "fail", detail)


def check(
    function: Function, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32,
    checks: Sequence[Check] = CHECKS,
) -> list[Result]:  # fmt: skip
    """Results of all checks of a function.

    Args:
        function: function(hidden, weight, ids, **options) -> log-probabilities; docs/conformance.md says more.
        device: of the tensors; None is CUDA if there is a GPU, else CPU.
        dtype: of hidden, weight and bias.
        checks: some of `CHECKS`.

    Errors of the function are results.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return [_result(one, Subject(function, place, dtype)) for one in checks]
