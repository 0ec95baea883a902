"""Variants on cases, in a process of its own: a JSON request per line of stdin, a JSON result per variant on stdout.

    {"case": {...}, "variants": ["eager", "ours"], "device": "cuda", "quantities": ["memory", "time", "error"]}

Inputs and gold are made once per request, the floor is timed after every variant, whose clock it has. What one variant
leaves behind reaches the next one, so a process that is to measure host memory is given one variant alone; on CUDA the
allocator's own counts are taken, its cache is emptied and compiled code forgotten between variants.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmark import variants
from benchmark.cases import LOGPS_AND_ENTROPY, STEP, Case
from benchmark.environment import first_line
from benchmark.errors import measure_errors
from benchmark.floor import Products
from benchmark.gold import GOLD_ROWS, Gold, gold_of
from benchmark.inputs import Inputs, make_inputs
from benchmark.loss import grpo_loss
from benchmark.memory import PeakMemory
from benchmark.peers import peer
from benchmark.peers.peer import Head
from benchmark.timing import Timing, measure_ms

# Of the loss over the whole case, in nats, against log-probabilities from float32 logits. bfloat16 logits move each
# log-probability by up to 0.12; thousands of tokens average that out.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
SURE = 0.99  # probability of a token that a policy is sure of

Compute = Callable[[], Tensor]


class Bench:
    """A case on a device: what all variants are given and compared with, each made when it is first asked for."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device

    @cached_property
    def inputs(self) -> Inputs:
        return make_inputs(self.case, self.device)

    @cached_property
    def expected(self) -> float:
        """The loss; of a case without one, the mean log-probability."""
        if self.case.task != STEP:
            return _mean(self.inputs.current_logps, self.inputs).item()
        return grpo_loss(self.inputs.current_logps, self.inputs).item()

    @cached_property
    def policy(self) -> dict[str, float]:
        """What the tokens that count are like."""
        counted = self.inputs.mask
        return {
            "mean_entropy": self.inputs.current_entropy[counted].mean().item(),
            "sure_share": (self.inputs.current_logps[counted].exp() > SURE).float().mean().item(),
        }

    def floor(self, *, gradients: bool) -> Timing:
        """Of the products of a step, or of the logits alone, as often in a row as a variant: at its power limit a GPU
        gives what takes less power the higher clock. After every variant: clocks differ from minute to minute."""
        return measure_ms(Products(self.case, self.inputs, self.device, gradients=gradients), self.device)

    @cached_property
    def small(self) -> "Bench":
        """The same on as many tokens as a gold is made for."""
        rows = GOLD_ROWS[self.device]
        return self if self.case.rows <= rows else Bench(self.case.with_rows(rows), self.device)

    @cached_property
    def gold(self) -> Gold:
        return gold_of(self.case, self.inputs)

    def compute(self, variant: Head) -> Compute:
        """What is measured: a loss, ready for .backward(), or the mean of log-probabilities."""
        case, inputs = self.case, self.inputs
        if case.task == STEP:
            return variant.make(case, inputs)
        entropy = case.task == LOGPS_AND_ENTROPY

        def logps() -> Tensor:
            with torch.no_grad():
                return _mean(variant.values(case, inputs, entropy=entropy).logps, inputs)

        return logps


def _mean(logps: Tensor, inputs: Inputs) -> Tensor:
    return torch.where(inputs.mask, logps, 0.0).sum() / inputs.mask.sum()


def measure(bench: Bench, variant_name: str, quantities: list[str]) -> dict[str, Any]:
    """-> {"status": "ok", ...numbers} or {"status", "reason"}."""
    variant = peer.load(variant_name)
    reason = variant.reason(bench.case, bench.device)
    if reason is not None:
        return {"status": "unavailable", "reason": reason}
    try:
        return _numbers(bench, variant, variant_name == variants.OURS, quantities)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        return {"status": "out of memory", "reason": first_line(error)}


def _numbers(bench: Bench, variant: Head, ours: bool, quantities: list[str]) -> dict[str, Any]:
    case, inputs, device = bench.case, bench.inputs, bench.device
    result: dict[str, Any] = {"status": "ok", "reason": None, **bench.policy}
    # Before what is measured is made: a variant holds the state of the latest.
    _load_libraries(variant, case, device)
    compute = bench.compute(variant)
    if "memory" in quantities or "time" in quantities:
        if "memory" in quantities:
            result |= _measure_memory(compute, case.gradient_bytes, case, inputs, device)
        if "time" in quantities:
            result |= _measure_time(compute, bench, warm="memory" in quantities, forward="error" in quantities)
        loss = _run(compute, case, inputs).item()
        result |= {"loss": loss, "expected_loss": bench.expected}
        if not abs(loss - bench.expected) <= LOSS_TOLERANCE[case.dtype]:
            result |= {"status": "wrong", "reason": f"loss {loss:.6f}, expected {bench.expected:.6f}"}
    if "error" in quantities:
        small = bench.small
        if small is not bench:
            # Code that a variant compiled was for the case's own shapes.
            torch.compiler.reset()
            compute = small.compute(variant)
        try:
            result |= measure_errors(variant, compute, small.case, small.inputs, small.gold)
        except Exception as error:
            if ours:
                raise
            # A peer's numbers so far stand.
            result["reason"] = f"no errors measured: {type(error).__name__}: {first_line(error)}"
    return result


def _measure_memory(compute: Compute, gradient_bytes: int, case: Case, inputs: Inputs, device: str) -> dict[str, float]:
    if device == "cuda":
        # Compilers and autotuners allocate once, in the first step; what a training run feels is every later one.
        # Host memory has no such count of live bytes: there the first step it is, before anything can be reused.
        _run(compute, case, inputs)
    _clear_gradients(inputs)
    with PeakMemory(device) as memory:
        _run(compute, case, inputs)
    # A gradient that is not there yet at the peak makes the difference smaller, never below nothing.
    extra = max(0, memory.peak_bytes - gradient_bytes)
    return {"peak_mib": memory.peak_bytes / 2**20, "peak_extra_mib": extra / 2**20}


def _measure_time(compute: Compute, bench: Bench, *, warm: bool, forward: bool) -> dict[str, float | int]:
    """`warm`: a step has been run before. `forward`: a step's forward is timed by itself, too."""
    case, inputs, device = bench.case, bench.inputs, bench.device
    _clear_gradients(inputs)

    result: dict[str, float | int] = {}
    if forward or case.task != STEP:
        with torch.no_grad():
            alone = measure_ms(compute, device)
        floor = bench.floor(gradients=False)
        result |= _with_floor("forward", alone, floor)
    if case.task == STEP:
        step = measure_ms(
            lambda: _run(compute, case, inputs), device, before=lambda: _clear_gradients(inputs), warm=warm
        )
        _clear_gradients(inputs)
        floor = bench.floor(gradients=True)
        result |= _with_floor("step", step, floor)
    return result


def _with_floor(name: str, timing: Timing, floor: Timing) -> dict[str, float | int]:
    return {
        f"{name}_ms": timing.median_ms,
        f"{name}_repeats": timing.repeats,
        f"{name}_floor_ms": floor.median_ms,
        f"{name}_x_floor": timing.median_ms / floor.median_ms,
    }


def _run(compute: Compute, case: Case, inputs: Inputs) -> Tensor:
    """Once, with the gradients that the case asks for."""
    _clear_gradients(inputs)
    loss = compute()
    if case.task == STEP:
        loss.backward()
    return loss.detach()


def _clear_gradients(inputs: Inputs) -> None:
    inputs.hidden.grad = inputs.weight.grad = None


def _load_libraries(variant: Head, case: Case, device: str) -> None:
    """Thread pools, matrix libraries and their workspaces belong to the process, not to the variant's step."""
    tiny = Bench(case.tiny(), device)
    # A backward runs on another thread, which on CUDA has a matrix library's workspace of its own.
    (tiny.inputs.hidden @ tiny.inputs.weight.T).sum().backward()
    if device == "cpu":
        # Not on CUDA: a variant that compiles for the first shape it sees must see the case's own.
        _run(tiny.compute(variant), tiny.case, tiny.inputs)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _forget(bench: Bench) -> None:
    """Leave the next variant nothing but the inputs."""
    _clear_gradients(bench.inputs)
    torch.compiler.reset()
    gc.collect()
    if bench.device == "cuda":
        torch.cuda.empty_cache()


def answer(request: dict[str, Any], write: Callable[[dict[str, Any]], object]) -> None:
    bench = Bench(Case.from_dict(request["case"]), request["device"])
    for name in request["variants"]:
        try:
            result = measure(bench, name, request["quantities"])
        except Exception as error:
            traceback.print_exc()
            result = {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}
        write(result)
        if result["status"] != "unavailable":
            _forget(bench)


def main() -> None:
    # Libraries print; what stdout was is the results'.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(result: dict[str, Any]) -> None:
        print(json.dumps(result), file=results, flush=True)

    for line in sys.stdin:
        answer(json.loads(line), write)
        gc.collect()


if __name__ == "__main__":
    main()
