"""The layout of sequences that begin alike, and the mask of its blocks, token by token."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the blocks are for its models")

from liger_rl.step import attention, prefix_tree


def grow_sequences(depth: int, longest: int) -> list[list[int]]:
    """Sequences of runs of 1 to `longest` tokens that branch up to `depth` times."""
    start = draw_tokens(longest)
    branches = int(torch.randint(1, 4, ()))
    return [start + end for _ in range(branches) for end in (grow_sequences(depth - 1, longest) if depth else [[]])]


def draw_tokens(longest: int) -> list[int]:
    return torch.randint(3, 6, (int(torch.randint(1, longest + 1, ())),)).tolist()


@pytest.mark.parametrize("longest", [prefix_tree.LEAST_SHARED, 2 * prefix_tree.LEAST_SHARED])
def test_each_place_sees_the_beginning_of_its_sequence(longest):
    for trial in range(60):
        sequences = [torch.tensor(run) for _ in range(trial % 4) for run in grow_sequences(trial % 3, longest)]
        lengths, starts = [len(tokens) for tokens in sequences], torch.randint(2, (len(sequences),)).tolist()
        known = prefix_tree.sort_sequences(sequences, starts)
        tree = prefix_tree.build_prefix_tree(lengths, known)
        assert tree.tokens == sum(known.sizes(lengths)) <= sum(lengths)
        place = torch.arange(tree.tokens)
        sees = (place <= place[:, None]) & (place[:, None] < tree.ends)
        pairs = list(zip(tree.sequences.tolist(), tree.offsets.tolist(), strict=True))
        tokens = torch.tensor([int(sequences[s][offset]) for s, offset in pairs])
        for q, (s, offset) in enumerate(pairs):
            assert tree.offsets[sees[q]].tolist() == list(range(offset + 1))
            assert torch.equal(tokens[sees[q]], sequences[s][: offset + 1])
            assert {starts[pairs[k][0]] for k in sees[q].nonzero()[:, 0].tolist()} == {starts[s]}
            assert bool(tree.follows[q]) == (offset > 0 and bool(sees[q, q - 1]) and pairs[q - 1][1] == offset - 1)
        for s, places in enumerate(tree.places):
            assert torch.equal(tokens[places], sequences[s])
            assert tree.follows[places[1:]].all()
            for offset, q in enumerate(places.tolist()):
                assert torch.equal(tokens[sees[q]], sequences[s][: offset + 1])


def test_a_long_chain_of_sequences():
    sequences = [torch.arange(18 * n) for n in range(1, 1200)]
    known = prefix_tree.sort_sequences(sequences, [0] * len(sequences))
    assert prefix_tree.build_prefix_tree([len(tokens) for tokens in sequences], known).tokens == 18 * 1199 + 1198


@pytest.mark.parametrize("multiple", [1, 8, 128])
def test_repeated_tokens_fill_the_row(multiple):
    for _ in range(20):
        sequences = [torch.tensor(run) for run in grow_sequences(2, 40)]
        lengths, known = (
            [len(tokens) for tokens in sequences],
            prefix_tree.sort_sequences(sequences, [0] * len(sequences)),
        )
        tree, filled = (prefix_tree.build_prefix_tree(lengths, known, m) for m in (1, multiple))
        assert filled.tokens == -(-tree.tokens // multiple) * multiple
        for name in ("sequences", "offsets", "ends", "follows"):
            values, first = getattr(filled, name), getattr(tree, name)
            assert torch.equal(values[: tree.tokens], first)
        assert (filled.sequences[tree.tokens :] == tree.sequences[-1]).all()
        assert (filled.offsets[tree.tokens :] == tree.offsets[-1]).all()
        assert not filled.follows[tree.tokens :].any()
        assert all(map(torch.equal, filled.places, tree.places))
        place = torch.arange(filled.tokens)
        sees = (place <= place[:, None]) & (place[:, None] < filled.ends)
        assert torch.equal(sees[tree.tokens :].nonzero()[:, 1], place[tree.tokens :])
        assert not sees[: tree.tokens, tree.tokens :].any()


@pytest.mark.parametrize("window", [None, 50, 300])
def test_blocks_of_the_mask(window):
    """None that is left out has a pair that sees each other, and each whole one has them all."""
    for _ in range(8):
        starts = [torch.randint(3, 9, (int(length),)) for length in torch.randint(20, 400, (3,))]
        sequences = [torch.cat([starts[n % 3], torch.randint(3, 99, (90 + 20 * n,))]) for n in range(7)]
        lengths = [len(tokens) for tokens in sequences]
        tree = prefix_tree.build_prefix_tree(lengths, prefix_tree.sort_sequences(sequences, [0] * 7), 128)
        mask = attention._make_block_mask(tree.ends, tree.offsets, window, torch.device("cpu"))
        q, k = torch.meshgrid(torch.arange(tree.tokens), torch.arange(tree.tokens), indexing="ij")
        dense = (k <= q) & (q < tree.ends) & (tree.offsets[q] - tree.offsets[k] < (window or 10**6))
        assert torch.equal(mask.mask_mod(0, 0, q, k), dense)
        blocks = dense.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        partial_, whole = (
            listed(*lists[:2], len(blocks))
            for lists in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
        )
        assert not (partial_ & whole).any()
        assert not (blocks.any(3).any(1) & ~partial_ & ~whole).any()
        assert not (whole & ~blocks.all(3).all(1)).any()


def listed(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    chosen = torch.zeros(blocks, blocks, dtype=torch.bool)
    for row, (count, columns) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0], strict=True)):
        chosen[row, columns[:count].long()] = True
    return chosen
