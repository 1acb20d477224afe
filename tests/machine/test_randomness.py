import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from hookdiff import SampleRequest
from hookdiff.machine.randomness import STREAMS, Randomness, derive_seed, splitmix64, splitmix64_tensor, uniforms

CPU = torch.device("cpu")
GAMMA = 0x9E3779B97F4A7C15  # SplitMix64 adds this to its state before each output

addresses = st.tuples(
    st.integers(0, 2**32), st.sampled_from(STREAMS), st.integers(0, 2**32), st.integers(0, 64), st.integers(0, 2**32)
)


def test_splitmix64_gives_the_published_outputs() -> None:
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [splitmix64(1234567 + number * GAMMA) for number in range(5)] == outputs


@pytest.mark.parametrize(
    ("address", "seed"),
    [
        ((0, "data"), 8695987549771912286),
        ((3, "noise", 1), 7800313230506819922),
        ((3, "augment", 5, 0, 7), 9543526490586248894),
        ((3, "model", 1, 2, 3), 8989099753515021792),
        ((2**63, "sample", 9), 9915792771085310164),
        ((1, "evaluate", 10**6), 3629177935965067233),
    ],
)
def test_the_seed_of_an_address_never_changes(address: tuple[int, str, int], seed: int) -> None:
    # Another seed for the same address would break every resume, replay and published curve.
    assert derive_seed(*address) == seed


@given(one=addresses, place=st.integers(0, 4), step=st.integers(1, 5))
def test_neighbours_have_different_seeds(one: tuple[int, str, int], place: int, step: int) -> None:
    other = list(one)
    stream = STREAMS[(STREAMS.index(one[1]) + step) % len(STREAMS)]
    other[place] = stream if place == 1 else other[place] + step  # type: ignore[operator]
    assert 0 <= derive_seed(*one) != derive_seed(*other) < 2**64  # type: ignore[arg-type]


def test_a_plugin_has_streams_of_its_own() -> None:
    names = ("mixup", "cutmix", "Mixup", *STREAMS)
    assert len({derive_seed(0, name, 5) for name in names}) == len(names)
    assert derive_seed(0, "mixup", 5) == 15530471381581132893  # the same in every process and version


def test_a_run_never_draws_the_same_numbers_twice() -> None:
    grid = itertools.product(range(3), STREAMS, range(20), range(3), range(3))
    seeds = [derive_seed(*address) & 0xFFFFFFFF for address in grid]  # a CPU generator uses only these 32 bits
    assert len(set(seeds)) == len(seeds) == 3240


@given(address=st.tuples(st.sampled_from(STREAMS), st.integers(0, 10**6)), drawn=st.integers(0, 1500))
def test_a_generator_starts_anew_whatever_was_drawn_before(address: tuple[str, int], drawn: int) -> None:
    random = Randomness(seed=5, rank=1)
    random.generator(*address, CPU)
    torch.rand(drawn, generator=random.generator("noise", 3, CPU))
    expected = torch.Generator().manual_seed(derive_seed(5, *address))
    got = random.generator(*address, CPU)
    assert torch.equal(torch.randn(20, generator=got), torch.randn(20, generator=expected))


def test_asking_for_one_stream_leaves_the_others_alone() -> None:
    random = Randomness(seed=5)
    noise = random.generator("noise", 3, CPU)
    first = torch.rand(4, generator=noise)
    torch.rand(4, generator=random.generator("sample", 9, CPU))
    random.seed_dropout(4, 0, CPU)
    rest = torch.rand(4, generator=noise)
    whole = torch.rand(8, generator=Randomness(seed=5).generator("noise", 3, CPU))
    assert torch.equal(torch.cat((first, rest)), whole)


def test_all_ranks_draw_the_noise_of_the_whole_step_and_dropout_of_their_own() -> None:
    noise, dropped = set(), set()
    for rank in range(4):
        random = Randomness(5, rank)
        noise.add(torch.randn(8, generator=random.generator("noise", 3, CPU)).numpy().tobytes())
        random.seed_dropout(3, 0, CPU)
        dropped.add(torch.nn.functional.dropout(torch.ones(100)).numpy().tobytes())
    assert (len(noise), len(dropped)) == (1, 4)


def test_the_drawn_numbers_never_change() -> None:
    draw = torch.randn(3, generator=Randomness(3).generator("noise", 1, CPU))
    assert draw.tolist() == pytest.approx([-0.12092422, 0.23691024, -0.37860397])


@given(position=st.integers(0, 10**6), part=st.integers(0, 100))
def test_seeding_dropout_equals_manual_seed_of_torch(position: int, part: int) -> None:
    Randomness(seed=7, rank=2).seed_dropout(position, part, CPU)
    got = torch.nn.functional.dropout(torch.ones(100))
    torch.manual_seed(derive_seed(7, "model", position, 2, part))
    assert torch.equal(torch.nn.functional.dropout(torch.ones(100)), got)


@given(start=st.integers(0, 50), num=st.integers(0, 5))
def test_an_image_has_a_generator_of_its_own(start: int, num: int) -> None:
    generators = SampleRequest(num, seed=3, start=start, stream="evaluate").generators()
    expected = [derive_seed(3, "evaluate", start + k) for k in range(num)]
    assert [generator.initial_seed() for generator in generators] == expected


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_tensors_are_mixed_like_numbers(values: list[int]) -> None:
    mixed = splitmix64_tensor(torch.tensor(values)).tolist()
    assert [value % 2**64 for value in mixed] == [splitmix64(value % 2**64) for value in values]


@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**40),
    parts=st.lists(st.integers(0, 2**40), min_size=1, max_size=9),
)
def test_numbers_of_a_part_are_those_of_its_seed(seed: int, position: int, parts: list[int]) -> None:
    for part, row in zip(parts, uniforms(seed, "augment", position, torch.tensor(parts), 3).tolist(), strict=True):
        state = derive_seed(seed, "augment", position, part=part)
        outputs = [splitmix64((state + step * 0x9E3779B97F4A7C15) % 2**64) for step in range(3)]
        assert row == [(output >> 11) / 2**53 for output in outputs]
