"""What `conformance_checks` finds of this library and others: `python -m benchmark.conformance`.

    pip install trl liger-kernel cut-cross-entropy
    pip download --no-deps verl==0.9.1    # unpack the wheel on PYTHONPATH: its requirements are not needed
    export OMP_NUM_THREADS=1              # CCE's compiled loop ends a process of several threads at a bad id

Each function below is an adapter.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmark.command import run
from benchmark.conformance_checks import check
from benchmark.environment import first_line
from benchmark.peers.trl_chunked import CHUNK_VOCAB
from benchmark.peers.verl_triton import verl_module
from benchmark.table import environment_line
from liger_rl import linear_logprobs, support_logprobs
from liger_rl.head import LogitTransform
from liger_rl.support import Support

PREFIX = "conformance-"
DTYPES = ("float32", "bfloat16")
CELLS = {"pass": "✓", "fail": "**fails**", "not served": ""}


def ours(hidden, weight, ids, *, temperature=1.0, softcap=None, mask=None, bias=None, support=None) -> Tensor:
    transform = LogitTransform(temperature=temperature, softcap=softcap)
    if support is None:
        return linear_logprobs(hidden, weight, ids, mask=mask, bias=bias, transform=transform).logps
    listed = Support.from_padded(torch.where(support, torch.arange(support.shape[1], device=ids.device), -1))
    return support_logprobs(hidden, weight, ids, listed, mask=mask, bias=bias, transform=transform).logps


def eager(hidden, weight, ids, *, temperature=1.0, softcap=None, mask=None, bias=None, support=None) -> Tensor:
    """As training code on HuggingFace models has it: a product in its dtype, float32 softmax, a mask at the end."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    logits = logits if support is None else logits.masked_fill(~support, -torch.inf)
    logps = logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    return logps if mask is None else logps * mask


def trl(hidden, weight, ids, *, temperature=1.0, softcap=None, bias=None) -> Tensor:
    from trl.trainer.utils import _ChunkedLogProbFunction

    return _ChunkedLogProbFunction.apply(hidden, weight, bias, ids, temperature, CHUNK_VOCAB, softcap, 1.0, ())[0]


def liger_selective(hidden, weight, ids, *, temperature=1.0, bias=None) -> Tensor:
    from liger_kernel.chunked_loss import fused_linear_ppo as ppo

    chunk = ppo._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE
    return ppo._ChunkedSelectiveLogProbFunction.apply(hidden, weight, ids, bias, temperature, chunk)


def liger_scaled_ce(hidden, weight, ids, *, temperature=1.0, mask=None) -> Tensor:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    ids = ids if mask is None else ids.masked_fill(~mask, -100)
    return -LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, ids, temperature)


def cce(hidden, weight, ids, *, softcap=None, mask=None) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    ids = ids if mask is None else ids.masked_fill(~mask, -100)
    impl = "cce" if hidden.is_cuda else "torch_compile"
    return -linear_cross_entropy(hidden, weight, ids, softcap=softcap, reduction="none", impl=impl)


def verl(hidden, weight, ids, *, temperature=1.0) -> Tensor:
    torch_functional = verl_module("verl.utils.experimental.torch_functional")
    return torch_functional.FusedLinearForPPO()(hidden, weight, ids, temperature)[0]


def torch_linear_ce(hidden, weight, ids) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return -torch.nn.functional.linear_cross_entropy(hidden, weight, ids, reduction="none", options=options)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "liger_rl": ours,
    "eager PyTorch": eager,
    "TRL": trl,
    "Liger GRPO": liger_selective,
    "Liger scaled CE": liger_scaled_ce,
    "CCE": cce,
    "verl": verl,
    "torch": torch_linear_ce,
}


def measure(device: str) -> dict[str, Any]:
    # CCE compiles once for each kind of input, and refuses after so many.
    torch._dynamo.config.recompile_limit = 256
    inputs = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2, dtype=torch.long)
    rows: list[dict[str, Any]] = []
    for name, function in FUNCTIONS.items():
        try:
            function(*(tensor.to(device) for tensor in inputs))
        except (ImportError, AttributeError) as error:
            rows.append({"function": name, "reason": first_line(error)})
            continue
        for dtype in DTYPES:
            found = check(function, device=device, dtype=getattr(torch, dtype))
            rows.append({"function": name, "dtype": dtype, "results": [result._asdict() for result in found]})
    return {"rows": rows}


def markdown(results: dict[str, Any], dtype: str | None = None, *checks: str) -> str:
    """A line for each check, a column for each function, and what fails; an empty cell is not served."""
    blocks = [environment_line(results["environment"])]
    if absent := [f"{row['function']} ({row['reason']})" for row in results["rows"] if "reason" in row]:
        blocks.append(f"Not run: {'; '.join(absent)}.")
    for one in [dtype] if dtype else DTYPES:
        rows = {
            row["function"]: [found for found in row["results"] if found["name"] in checks or not checks]
            for row in results["rows"] if row.get("dtype") == one
        }  # fmt: skip
        lines = [[one, *rows], ["---", *(":-:" for _ in rows)]]
        for of_check in zip(*rows.values(), strict=True):
            lines.append([f"`{of_check[0]['name']}`", *(CELLS[found["status"]] for found in of_check)])
        blocks.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        failed = [(name, found) for name, row in rows.items() for found in row if found["status"] == "fail"]
        blocks.append("\n".join(f"- {name}, `{found['name']}`: {found['detail']}" for name, found in failed))
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    run("conformance", __doc__, PREFIX, measure, markdown)
