import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from hookdiff_networks.layers import LabelEmbedding, TimeEmbedding, sinusoids


def test_sinusoids_follow_the_paper_in_float32() -> None:
    t = torch.tensor([0, 1, 999, 1000])
    frequencies = 10000 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = t.double().outer(frequencies)
    expected = torch.cat([angles.cos(), angles.sin()], dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        got = sinusoids(t, 8)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)
    assert torch.equal(got, sinusoids(t.double(), 8))


def test_times_below_zero_and_between_integers_are_distinct() -> None:
    embed = TimeEmbedding(8, 16)
    t = torch.tensor([-1600.0, -1.5, -1.0, 0.0, 0.5, 1.0, 1200.0])
    rows = embed(t)
    assert rows.shape == (7, 8)
    assert rows.isfinite().all()
    assert torch.unique(rows, dim=0).shape == rows.shape
    torch.testing.assert_close(rows[5:6], embed(torch.tensor([1])))


def test_the_time_embedding_has_two_layers() -> None:
    embed = TimeEmbedding(6, 4)
    t = torch.tensor([3, 700])
    hidden = F.silu(sinusoids(t, 4) @ embed.linear1.weight.T + embed.linear1.bias)
    torch.testing.assert_close(embed(t), hidden @ embed.linear2.weight.T + embed.linear2.bias)


@given(st.integers(1, 12), st.lists(st.integers(-1, 11), max_size=6), st.sampled_from([torch.int64, torch.int32]))
def test_a_label_selects_its_row_and_minus_one_the_last(num_classes: int, drawn: list[int], dtype: torch.dtype) -> None:
    embed = LabelEmbedding(num_classes, 5)
    labels = [min(label, num_classes - 1) for label in drawn]
    assert embed.weight.shape == (num_classes + 1, 5)
    expected = torch.stack([embed.weight[label] for label in labels]) if labels else torch.empty(0, 5)
    assert torch.equal(embed(torch.tensor(labels, dtype=dtype)), expected)  # Python's index -1 is the last row too
