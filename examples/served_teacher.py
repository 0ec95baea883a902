"""Distillation from a teacher in another process: hidden states travel, logits do not. 20 seconds on one CPU core.

    python examples/served_teacher.py                      # hidden states in bfloat16
    python examples/served_teacher.py --dtype float8       # about half the bytes: float8_e4m3fn, one scale per token

The server holds the teacher, saves its lm_head once as a file, and answers token ids with the last hidden states of the
positions asked for. The trainer loads the head, and moves a student towards the teacher's whole distribution by the
reverse KL. Both models are small and random. The teacher's embeddings and head are enlarged, so that it has opinions.
"""

import argparse
import json
import multiprocessing
import secrets
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from liger_rl import linear_divergence
from liger_rl.head import LogitTransform


def small_model(hidden_size: int, layers: int, vocab: int) -> LlamaForCausalLM:
    sizes = {"vocab_size": vocab, "hidden_size": hidden_size, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(intermediate_size=2 * hidden_size, num_attention_heads=4, **sizes))


def save_head(model: PreTrainedModel, path: Path) -> None:
    """A safetensors file of the lm_head, with what the model does to its logits in the metadata."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    tensors = {"teacher_weight": head.weight} | ({} if head.bias is None else {"teacher_bias": head.bias})
    transform = {
        "softcap": getattr(config, "final_logit_softcapping", None),  # Gemma
        "scale": getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0),  # Cohere, Granite
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, {"transform": json.dumps(transform)})


def load_head(path: Path) -> dict[str, Any]:
    """-> the teacher's arguments of `linear_divergence`, except `teacher_hidden`."""
    with safe_open(path, "pt") as file:
        transform = LogitTransform(**json.loads(file.metadata()["transform"]))
        return {name: file.get_tensor(name) for name in file.keys()} | {"teacher_transform": transform}  # noqa: SIM118


def packed(hidden: torch.Tensor, dtype: str) -> bytes:
    """(n, H') -> what travels: bfloat16, or float8 rows and then their n scales in float32."""
    if dtype == "bfloat16":
        return hidden.bfloat16().view(torch.uint8).numpy().tobytes()
    scale = hidden.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    rows = (hidden / scale).to(torch.float8_e4m3fn)
    return rows.view(torch.uint8).numpy().tobytes() + scale.numpy().tobytes()


def unpacked(sent: bytes, tokens: int, hidden_size: int, dtype: str) -> torch.Tensor:
    """-> (n, H') float32, the dtype of the head."""
    received = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
    if dtype == "bfloat16":
        return received.view(torch.bfloat16).view(tokens, hidden_size).float()
    rows, scale = received.split([tokens * hidden_size, 4 * tokens])
    return rows.view(torch.float8_e4m3fn).view(tokens, hidden_size).float() * scale.view(torch.float32)[:, None]


@torch.no_grad()
def serve(key: bytes, head: Path, address: Connection, options: argparse.Namespace) -> None:
    """The server's process, until the trainer hangs up."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    teacher = small_model(2 * options.hidden_size, 2, options.vocab).eval()
    teacher.get_input_embeddings().weight.mul_(20.0)
    teacher.get_output_embeddings().weight.mul_(8.0)
    save_head(teacher, head)
    with Listener(("localhost", 0), authkey=key) as listener:
        address.send(listener.address)
        with listener.accept() as trainer:
            try:
                while True:
                    ids, mask = (torch.from_numpy(array) for array in trainer.recv())  # (B, T) int64, bool
                    trainer.send_bytes(packed(teacher.model(input_ids=ids).last_hidden_state[mask], options.dtype))
            except EOFError:
                return


def distill(server: Connection, teacher: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """-> the mean divergence of new tokens before and after, in nats, and the bytes that one token's answer has."""
    torch.manual_seed(1)
    student = small_model(options.hidden_size, 1, options.vocab)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0)
    record = {}

    def divergence(ids: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(ids.shape[1]) >= ids.shape[1] // 2).expand(ids.shape)  # the positions that count
        server.send((ids.numpy(), mask.numpy()))
        hidden = student.model(input_ids=ids).last_hidden_state[mask]  # while the teacher computes
        sent = server.recv_bytes()
        record["bytes"] = len(sent) / len(hidden)
        teacher_hidden = unpacked(sent, len(hidden), teacher["teacher_weight"].shape[1], options.dtype)
        found = linear_divergence(hidden, student.lm_head.weight, teacher_hidden, kind="reverse_kl", **teacher)
        return found.divergence.mean()

    held_out, *batches = torch.randint(options.vocab, (options.steps + 1, options.rows, 32))
    with torch.no_grad():
        record["before"] = divergence(held_out).item()
    for ids in batches:
        divergence(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        record["after"] = divergence(held_out).item()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float8"], default="bfloat16", help="of what travels")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=32, help="of 32 tokens, in a batch")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=64, help="the student's; the teacher has twice as many")
    options = parser.parse_args()
    key, (address, servers_end) = secrets.token_bytes(16), multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder) / "head.safetensors"
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(key, head, servers_end, options))
        process.start()
        servers_end.close()  # so that a server that ends early ends the wait for its address
        with Client(address.recv(), authkey=key) as server:
            record = distill(server, load_head(head), options)
        process.join()
    print(f"divergence from the teacher: {record['before']:.3f} nats before, {record['after']:.3f} after")
    print(f"bytes per token: {record['bytes']:.0f}, logits in bfloat16 {2 * options.vocab}")


if __name__ == "__main__":
    main()
