"""Texts that come with Python, their tokens, and windows of them."""

import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

SEED = 0
END_OF_TEXT = "<|endoftext|>"
LONGEST_FILE = 1 << 20  # characters; longer ones are tables
DOCUMENTS_AT_ONCE = 512


def sources(limit: int) -> list[str]:
    """Python sources of the standard library and of what is installed beside it, shuffled, up to `limit` characters."""
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    folders |= {Path(entry) for entry in sys.path if entry and Path(entry).name in ("site-packages", "dist-packages")}
    paths = sorted({path for folder in folders for path in folder.rglob("*.py")})
    random.Random(SEED).shuffle(paths)
    texts, total = [], 0
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if not 0 < len(text) <= LONGEST_FILE:
            continue
        texts.append(text)
        total += len(text)
        if total >= limit:
            break
    if total < limit // 10:
        raise SystemExit(f"only {total:,} characters of Python sources are installed here, {limit:,} were asked for")
    return texts


def train_tokenizer(texts: list[str], vocab: int, most: int) -> Tokenizer:
    """Byte-level BPE of `vocab` token ids, from `most` characters of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def part() -> Iterator[str]:
        total = 0
        for text in texts:
            yield text
            total += len(text)
            if total >= most:
                return

    tokenizer.train_from_iterator(part(), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """-> (n,) int32 ids of all the texts, each with an end."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts = []
    for start in range(0, len(texts), DOCUMENTS_AT_ONCE):
        for document in tokenizer.encode_batch_fast(texts[start : start + DOCUMENTS_AT_ONCE]):
            parts.append(torch.tensor([*document.ids, end], dtype=torch.int32))
    return torch.cat(parts)


def windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """-> (count, length) int64 at random places."""
    starts = torch.randint(tokens.numel() - length + 1, (count, 1), generator=generator)
    return tokens[starts + torch.arange(length)].long()
