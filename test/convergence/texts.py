"""The text of Python's own help pages as token ids, learnt from it."""

import pydoc_data.topics
from functools import cache

import pytest
import torch
from torch import Tensor

tokenizers = pytest.importorskip("tokenizers", reason="the text is cut into tokens by tokenizers")


@cache
def tokens(vocab: int) -> Tensor:
    text = [page for _, page in sorted(pydoc_data.topics.topics.items())]
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text, vocab_size=vocab, show_progress=False)
    return torch.tensor(tokenizer.encode("\n".join(text)).ids)


def sampled(shape: tuple[int, ...], length: int, vocab: int, generator: torch.Generator) -> Tensor:
    """(*shape, length) token ids, from anywhere in the text."""
    text = tokens(vocab)
    starts = torch.randint(len(text) - length, shape, generator=generator)
    return text[starts[..., None] + torch.arange(length)]
