from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, strategies as st

from hookdiff.machine.dtensor import place
from tests.conftest import check_facts, two_ranks

BLOCKS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from hookdiff import UserError
from hookdiff.machine import dtensor as shards
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(15.0).reshape(5, 3)
result = []
for placement in (Shard(0), Shard(1), Replicate()):
    sharded = distribute_tensor(whole, mesh, [placement])
    empty = torch.zeros_like(sharded)
    shards.fill_(empty, whole)
    alike = distribute_tensor(whole + 1, mesh, [placement])
    fills = torch.equal(shards.whole(empty), whole) and torch.equal(shards.local(sharded), whole[shards.place(sharded)])
    result.append((shards.counts(sharded), fills, shards.layout(sharded) == shards.layout(alike)))
result.append(len({shards.layout(distribute_tensor(whole, mesh, [kind])) for kind in (Shard(0), Shard(0), Shard(1))}))
result.append(shards.layout(whole))
result.append(shards.names_of_all_ranks([f"on {rank}", "on both"], [whole, alike]))
result.append(shards.names_of_all_ranks([f"on {rank}"], [whole]))
odd = distribute_tensor(whole, mesh, [Shard(0)])
odd._spec.placements = (_StridedShard(0, split_factor=2),)
try:
    shards.place(odd)
except UserError as error:
    result.append(str(error))
"""


def test_the_parts_of_a_sharded_tensor_are_blocks(tmp_path: Path) -> None:
    first, second = two_ranks(BLOCKS, tmp_path)
    shared = [(True, True, True), (True, True, True)]
    names = ["on 0", "on both", "on 1"]
    assert first[:-1] == [*shared, (True, True, True), 2, None, names, ["on 0"]]
    assert second[:-1] == [*shared, (False, True, True), 2, None, names, ["on 1"]]
    check_facts(first[-1], "(5, 3)", "_S(0, 2)")


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    axes=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 2)), min_size=1, max_size=2),
    data=st.data(),
)
def test_the_place_of_a_part_is_that_of_torch_chunk(
    shape: list[int], axes: list[tuple[int, bool, int]], data: st.DataObject
) -> None:
    from torch.distributed.tensor import Replicate, Shard

    whole = part = torch.arange(prod(shape)).reshape(shape)
    coordinates = [data.draw(st.integers(0, num - 1)) for num, _, _ in axes]
    placements = [Shard(dim % len(shape)) if is_sharded else Replicate() for _, is_sharded, dim in axes]
    for (num, _, _), at, placement in zip(axes, coordinates, placements, strict=True):
        if isinstance(placement, Shard):
            chunks = part.chunk(num, placement.dim)
            part = chunks[at] if at < len(chunks) else part.narrow(placement.dim, 0, 0)
    mesh = SimpleNamespace(shape=[num for num, _, _ in axes], get_coordinate=lambda: coordinates)
    tensor: Any = SimpleNamespace(shape=whole.shape, device_mesh=mesh, placements=placements, to_local=None)
    assert torch.equal(whole[place(tensor)], part)
