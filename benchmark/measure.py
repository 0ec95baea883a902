"""One variant on one case, in a process of its own: a JSON request on stdin, a JSON result on stdout.

    {"case": {...}, "variant": "ours", "device": "cpu", "quantities": ["memory", "time", "error"]}

A process of its own, because peaks, compiled code and cached memory of one variant must not reach the next one.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmark import peers
from benchmark.cases import Case
from benchmark.errors import measure_errors
from benchmark.floor import measure_floor
from benchmark.inputs import Inputs, make_inputs
from benchmark.loss import grpo_loss
from benchmark.memory import PeakMemory
from benchmark.timing import median_ms

# Of the loss over the whole case, in nats, against log-probabilities from float32 logits. bfloat16 logits move each
# log-probability by up to 3e-2; thousands of tokens average that out.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def measure(case: Case, variant_name: str, device: str, quantities: list[str]) -> dict[str, Any]:
    """-> {"status": "ok", ...numbers} or {"status", "reason"}."""
    variant = peers.load(variant_name)
    reason = variant.available(case)
    if reason is not None:
        return {"status": "unavailable", "reason": reason}
    result: dict[str, Any] = {"status": "ok", "reason": None}
    try:
        if "memory" in quantities or "time" in quantities:
            inputs = make_inputs(case, device)
            expected_loss = grpo_loss(inputs.current_logps, inputs).item()
            _load_libraries(variant.make, case, device)
            compute = variant.make(case, inputs)
            if "memory" in quantities:
                result |= _measure_memory(compute, case, inputs, device)
            if "time" in quantities:
                result |= _measure_time(compute, case, inputs, device)
            loss = _step(compute, inputs).item()
            result |= {"loss": loss, "expected_loss": expected_loss}
            if not abs(loss - expected_loss) <= LOSS_TOLERANCE[case.dtype]:
                result |= {"status": "wrong", "reason": f"loss {loss:.6f}, expected {expected_loss:.6f}"}
            del inputs, compute
        if "error" in quantities:
            try:
                result |= measure_errors(variant, case, device)
            except Exception as error:
                if variant_name == peers.OURS:
                    raise
                # A peer's numbers so far stand.
                result["reason"] = f"no errors measured: {type(error).__name__}: {_first_line(error)}"
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        return {"status": "out of memory", "reason": _first_line(error)}
    return result


def _measure_memory(compute: Callable[[], Tensor], case: Case, inputs: Inputs, device: str) -> dict[str, float]:
    if device == "cuda":
        # Compilers and autotuners allocate once, in the first step; what a training run feels is every later one.
        # Host memory has no such count of live bytes: there the first step it is, before anything can be reused.
        _step(compute, inputs)
    _clear_gradients(inputs)
    with PeakMemory(device) as memory:
        _step(compute, inputs)
    # A gradient that is not there yet at the peak makes the difference smaller, never below nothing.
    extra = max(0, memory.peak_bytes - case.gradient_bytes)
    return {"peak_mib": memory.peak_bytes / 2**20, "peak_extra_mib": extra / 2**20}


def _measure_time(compute: Callable[[], Tensor], case: Case, inputs: Inputs, device: str) -> dict[str, float]:
    _clear_gradients(inputs)
    with torch.no_grad():
        forward = median_ms(compute, device)
    step = median_ms(lambda: _step(compute, inputs), device, before=lambda: _clear_gradients(inputs))
    _clear_gradients(inputs)
    floor = measure_floor(case, inputs, device)
    return {
        "forward_ms": forward,
        "forward_floor_ms": floor.forward,
        "forward_x_floor": forward / floor.forward,
        "step_ms": step,
        "step_floor_ms": floor.step,
        "step_x_floor": step / floor.step,
        "floor_tflops": case.floor_flops / floor.step / 1e9,
    }


def _step(compute: Callable[[], Tensor], inputs: Inputs) -> Tensor:
    _clear_gradients(inputs)
    loss = compute()
    loss.backward()
    return loss.detach()


def _clear_gradients(inputs: Inputs) -> None:
    inputs.hidden.grad = inputs.weight.grad = None


def _load_libraries(make: Callable[[Case, Inputs], Callable[[], Tensor]], case: Case, device: str) -> None:
    """Thread pools, matrix libraries and their workspaces belong to the process, not to the variant's step."""
    tiny = case.tiny()
    inputs = make_inputs(tiny, device)
    # A backward runs on another thread, which on CUDA has a matrix library's workspace of its own.
    (inputs.hidden @ inputs.weight.T).sum().backward()
    if device == "cpu":
        # Not on CUDA: a variant that compiles for the first shape it sees must see the case's own.
        _step(make(tiny, inputs), inputs)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(". GPU ")[0][:160]


def main() -> None:
    request = json.load(sys.stdin)
    # Libraries print; stdout is the result's.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            result = measure(
                Case.from_dict(request["case"]), request["variant"], request["device"], request["quantities"]
            )
        except Exception as error:
            traceback.print_exc()
            result = {"status": "failed", "reason": f"{type(error).__name__}: {_first_line(error)}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
