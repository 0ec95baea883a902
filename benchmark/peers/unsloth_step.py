"""One row of `benchmark.step`: `python -m benchmark.peers.unsloth_step FOLDER`.

Unsloth is imported before transformers, whose classes it replaces, and beside TRL 1.15 and datasets 4. The folder holds
the model and its tokenizer, the rollouts and the adapters (`inputs.pt`), and the options of the run (`options.json`).
The result goes to `measured.json` there. The loop is that of the other rows, with Unsloth's GRPOTrainer and its
gradient checkpointing. Unsloth differs from TRL in three points:

- Its GRPOConfig has other defaults, so `loss_type="dapo"`, TRL's clipping and TRL's optimizer are passed by name.
- It finds padding by the pad id, which no token of the rollouts has.
- It moves padding to the right of each row, and reads the old policy's log-probabilities in that layout.
"""

import unsloth  # isort: skip
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmark.step_policy import LORA_RANK
from benchmark.step_runs import Clock, grpo_trainer, run_trainer

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load_model(folder: Path, tokens: int, dtype: str, dropout: float | None, adapters: dict[str, Tensor]) -> Any:
    """The model; `dropout` is that of LoRA adapters, None trains all weights."""
    model, _tokenizer = unsloth.FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=tokens,
        dtype=getattr(torch, dtype),
        load_in_4bit=False,
        full_finetuning=dropout is None,
    )
    if dropout is not None:
        model = unsloth.FastLanguageModel.get_peft_model(
            model, r=LORA_RANK, lora_alpha=LORA_RANK, lora_dropout=dropout, target_modules=list(LINEAR_LAYERS)
        )
        parameters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
        if parameters.keys() != adapters.keys():
            raise RuntimeError(f"adapters must be {sorted(adapters)[:2]}..., got {sorted(parameters)[:2]}...")
        for name, parameter in parameters.items():
            parameter.data.copy_(adapters[name])
    unsloth.FastLanguageModel.for_training(model)
    return model


def align_old_logps(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the columns in Unsloth's layout, (B, T + most padding of a prompt)."""
    padding, old = (batch["prompt_mask"] == 0).sum(1), batch["old_per_token_logps"]
    most = int(padding.max())
    columns = most - padding[:, None] + torch.arange(old.shape[1], device=old.device)
    shifted = old.new_zeros(old.shape[0], old.shape[1] + most).scatter_(1, columns, old)
    return batch | {"old_per_token_logps": shifted, "max_left_pad": torch.full_like(padding, most)[:, None]}


def main(folder: Path) -> None:
    options: dict[str, Any] = json.loads((folder / "options.json").read_text())
    inputs = torch.load(folder / "inputs.pt")
    batch = align_old_logps({name: column.cuda() for name, column in inputs["batch"].items()})
    tokens = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # Unsloth's copy may have another pad token
    model = load_model(folder, tokens, options["dtype"], options["dropout"], inputs["adapters"])
    trainer = grpo_trainer(model, tokenizer, batch, options["arguments"])
    measured = run_trainer(trainer, Clock("cuda", options["settling"]))
    (folder / "measured.json").write_text(json.dumps(measured._asdict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
