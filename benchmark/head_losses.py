"""Cross entropy and DPO from hidden states, beside the peers: `python -m benchmark.head_losses`.

Every variant gets the same hidden states, weight and token ids, which look like a published model's at temperature 0.6
(`inputs.CURVES`). DPO's reference has a head of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from benchmark.cases import TAILED, Case
from benchmark.command import run
from benchmark.errors import relative
from benchmark.gold import gold_of
from benchmark.inputs import Inputs, make_inputs
from benchmark.memory import PeakMemory
from benchmark.table import Columns, environment_line, gradient_error, markdown_table, number
from benchmark.timing import measure_ms

PREFIX = "head_losses-"
BETA, SPREAD = 0.1, 0.05  # of DPO; of the reference's weight from the policy's
HEADS = {"cuda": (4096, 128_256), "cpu": (64, 1000)}
BATCHES = {"cuda": (16, 512), "cpu": (8, 32)}
PEERS = ("liger-kernel", "trl", "cut-cross-entropy")

Step = Callable[[Inputs, tuple[Tensor, Tensor]], Tensor]  # (inputs, the reference's hidden and weight) -> loss


def _nll(logps: Tensor, _: Inputs) -> Tensor:
    return -logps.mean()


def _ours() -> Step:
    from liger_rl import FusedLinearCrossEntropyLoss

    loss = FusedLinearCrossEntropyLoss(metrics="none")
    return lambda x, _: loss(x.hidden, x.weight, x.ids).loss


def _liger() -> Step:
    module = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda x, _: module(x.weight, x.hidden.flatten(0, 1), x.ids.flatten())


def _liger_float32() -> Step:
    cross_entropy = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    module = cross_entropy(accum_dtype=torch.float32)
    return lambda x, _: module(x.weight, x.hidden.flatten(0, 1), x.ids.flatten())


def _cce(filter_eps: str | None) -> Step:
    function = import_module("cut_cross_entropy").linear_cross_entropy
    return lambda x, _: function(x.hidden, x.weight, x.ids, filter_eps=filter_eps)


def _torch() -> Step:
    function, options = torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
    return lambda x, _: function(x.hidden.flatten(0, 1), x.weight, x.ids.flatten(), options=options)


def _trl_logps(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    utils = import_module("trl.trainer.utils")
    chunk = getattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32768)
    arguments = hidden.flatten(0, 1), weight, None, ids.flatten(), 1.0, chunk, None, 1.0, ()
    return utils._ChunkedLogProbFunction.apply(*arguments)[0].view(ids.shape)


def _trl() -> Step:
    import_module("trl.trainer.utils")
    return lambda x, _: -_trl_logps(x.hidden, x.weight, x.ids).mean()


def _eager(x: Inputs, _: tuple[Tensor, Tensor]) -> Tensor:
    logits = x.hidden.flatten(0, 1) @ x.weight.T
    return torch.nn.functional.cross_entropy(logits.float(), x.ids.flatten())


def _dpo(logps: Tensor, ref_logps: Tensor) -> Tensor:
    margins = (logps - ref_logps).sum(1)
    chosen, rejected = margins.chunk(2)
    return -logsigmoid(BETA * (chosen - rejected)).mean()


def _our_dpo() -> Step:
    from liger_rl import FusedLinearPreferenceLoss
    from liger_rl.fused_linear import ReferenceHead

    loss = FusedLinearPreferenceLoss("dpo", beta=BETA)

    def step(x: Inputs, reference: tuple[Tensor, Tensor]) -> Tensor:
        head = ReferenceHead(hidden=reference[0], weight=reference[1])
        return loss(x.hidden, x.weight, x.ids, reference=head).loss

    return step


def _liger_dpo(*, compiled: bool) -> Step:
    module = import_module("liger_kernel.chunked_loss").LigerFusedLinearDPOLoss(beta=BETA, compiled=compiled)
    return lambda x, reference: module(x.weight, x.hidden, x.ids, None, *reference)[0]


def _trl_dpo() -> Step:
    import_module("trl.trainer.utils")

    def step(x: Inputs, reference: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            ref_logps = _trl_logps(*reference, x.ids)
        return _dpo(_trl_logps(x.hidden, x.weight, x.ids), ref_logps)

    return step


def _eager_dpo(x: Inputs, reference: tuple[Tensor, Tensor]) -> Tensor:
    def logps(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.log_softmax((hidden @ weight.T).float(), -1).gather(-1, x.ids[..., None]).squeeze(-1)

    with torch.no_grad():
        ref_logps = logps(*reference)
    return _dpo(logps(x.hidden, x.weight), ref_logps)


VARIANTS: dict[str, dict[str, Callable[[], Step]]] = {
    "cross entropy": {
        "liger_rl": _ours,
        "Liger": _liger,
        "Liger, accum_dtype=float32": _liger_float32,
        "cut-cross-entropy": lambda: _cce("high"),
        "cut-cross-entropy, no filter": lambda: _cce(None),
        "torch linear_cross_entropy": _torch,
        "TRL": _trl,
        "PyTorch, full logits": lambda: _eager,
    },
    "DPO": {
        "liger_rl": _our_dpo,
        "Liger": lambda: _liger_dpo(compiled=True),
        "Liger, compiled=False": lambda: _liger_dpo(compiled=False),
        "TRL": _trl_dpo,
        "PyTorch, full logits": lambda: _eager_dpo,
    },
}


def rows_of(name: str, case: Case, device: str) -> list[dict[str, Any]]:
    inputs = make_inputs(case, device)
    weight = inputs.weight.detach()
    generator = torch.Generator(device).manual_seed(1)
    noise = torch.empty_like(weight).normal_(std=SPREAD * case.hidden_size**-0.5, generator=generator)
    reference = inputs.hidden.detach(), weight + noise
    del noise
    if name == "DPO":
        of_reference = gold_logps(case, inputs, reference)
        gold = gold_of(case, inputs, lambda logps, _: _dpo(logps, of_reference))
    else:
        gold = gold_of(case, inputs, _nll)
    shape = {
        "loss": name,
        "tokens": case.rows,
        "vocab": case.vocab,
        "hidden_size": case.hidden_size,
        "dtype": case.dtype,
    }
    rows = []
    for label, make in VARIANTS[name].items():
        row = shape | {"variant": label, "status": "ok", "reason": None}
        try:
            row |= _measured(make(), inputs, reference, gold, device)
        except (ImportError, AttributeError, RuntimeError, ValueError) as error:  # Triton raises the last on a CPU
            if label.startswith("liger_rl"):
                raise
            row |= {"status": "unavailable", "reason": f"{type(error).__name__}: {error}"[:200]}
        rows.append(row)
        print(row, flush=True)
    floor = next(row.get("step_ms") for row in rows if row["variant"] == "Liger")
    return [row | {"x_liger": row["step_ms"] / floor if floor and "step_ms" in row else None} for row in rows]


def gold_logps(case: Case, inputs: Inputs, reference: tuple[Tensor, Tensor]) -> Tensor:
    """The reference's, in float64."""
    return gold_of(replace(case, task="logps"), replace(inputs, hidden=reference[0], weight=reference[1]), _nll).logps


def _measured(step: Step, inputs: Inputs, reference: tuple[Tensor, Tensor], gold: Any, device: str) -> dict[str, Any]:
    leaves = inputs.hidden, inputs.weight

    def both() -> tuple[Tensor, ...]:
        loss = step(inputs, reference)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    loss, *grads = both()
    numbers = {
        "loss_error": abs(loss.double() - gold.loss).item() / abs(gold.loss.item()),
        "grad_hidden_error": relative(grads[0], gold.grad_hidden),
        "grad_weight_error": relative(grads[1], gold.grad_weight),
    }
    del grads
    with PeakMemory(device) as memory:
        held = both()
    numbers["peak_extra_mib"] = (memory.peak_bytes - sum(part.nbytes for part in held)) / 2**20
    del held
    return numbers | {"step_ms": measure_ms(both, device).median_ms}


COLUMNS: Columns = {
    "ms": number("step_ms", ".1f"),
    "x Liger": number("x_liger", ".2f"),
    "extra MiB": number("peak_extra_mib", ",.0f"),
    "loss error": number("loss_error", ".1e"),
    "gradient error": lambda row: f"{gradient_error(row):.1e}" if row.get("grad_hidden_error") else "",
}


def markdown(results: dict[str, Any]) -> str:
    rows = [row for row in results["rows"] if row["status"] == "ok"]  # the others say why in the file
    lines = [(f"{row['loss']}: {row['variant']}", row) for row in rows]
    return f"{environment_line(results['environment'], PEERS)}\n\n{markdown_table(COLUMNS, lines)}\n"


def measure_all(device: str) -> dict[str, Any]:
    hidden_size, vocab = HEADS[device]
    batch, tokens = BATCHES[device]
    dtype = "bfloat16" if device == "cuda" else "float32"
    case = Case(
        name="8B", batch=batch, tokens=tokens, hidden_size=hidden_size, vocab=vocab, dtype=dtype, beta=0.0, peaks=TAILED
    )
    return {"rows": [row for name in VARIANTS for row in rows_of(name, case, device)]}


if __name__ == "__main__":
    run("head_losses", __doc__, PREFIX, measure_all, markdown)
