import hashlib
import os
import stat

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hookdiff import StorageError
from hookdiff.disk import check_tensors, new_file, new_folder, write_file, write_tensors, writing
from tests.conftest import locked, refused

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64),
]


def example(dtype, shape):
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5).to(dtype)


@given(
    kinds=st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    )
)
def test_safetensors_reads_the_written_tensors(kinds, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "some.safetensors"
    tensors = {name: example(*kind) for name, kind in kinds.items()}
    written = write_tensors(path, tensors, {"step": "3"})
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        if tensor.numel():
            here, there = (value.reshape(-1).view(torch.uint8) for value in (read[name], tensor))
            assert torch.equal(here, there)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "3"}
    data = path.read_bytes()
    assert (written.bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_the_file_equals_the_file_of_safetensors(tmp_path):
    tensors = {"b": torch.randn(3, 4), "a": torch.randn(2), "c": torch.ones(1, dtype=torch.float64)}
    save_file(tensors, tmp_path / "library", {"format": "pt"})
    write_tensors(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_tensors_may_share_memory_and_have_any_memory_layout(tmp_path):
    base = torch.randn(4, 3, 5, 5)
    tensors = {
        "whole": base,
        "tied": base,
        "part": base[1:3],
        "turned": base.transpose(0, 1),
        "last": base.to(memory_format=torch.channels_last),
        "scalar": base[0, 0, 0, 0],
    }
    write_tensors(tmp_path / "t", tensors)
    for name, value in load_file(tmp_path / "t").items():
        assert torch.equal(value, tensors[name])


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [(torch.zeros(2, dtype=torch.complex128), "complex128"), (torch.eye(2).to_sparse(), "sparse_coo")],
)
def test_an_unsupported_tensor_is_refused_by_name(tensor, kind, tmp_path):
    with refused(TypeError, "odd", kind):
        write_tensors(tmp_path / "t", {"fine": torch.ones(1), "odd": tensor})
    assert not list(tmp_path.iterdir())
    with refused(TypeError, "odd", kind):
        check_tensors({"odd": tensor})


def test_the_mode_of_a_file_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "t", {"a": torch.ones(1)})
        write_file(tmp_path / "f", b"text")
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "tf"} == {0o640}


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    with new_file(tmp_path / "made" / "one") as path:
        write_file(path, b"first")
        assert not (tmp_path / "made" / "one").exists()
    assert (tmp_path / "made" / "one").read_bytes() == b"first"

    with refused(OSError, "no more"), new_file(tmp_path / "made" / "one") as path:
        write_file(path, b"half")
        raise OSError("no more")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["one"]
    assert (tmp_path / "made" / "one").read_bytes() == b"first"


def test_a_file_is_synced_before_it_has_its_name_and_its_folder_after(tmp_path, monkeypatch):
    path, synced, sync = tmp_path / "one", [], os.fsync

    def noted(descriptor):
        synced.append((os.fstat(descriptor).st_ino, path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with new_file(path) as partial:
        write_file(partial, b"text")
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    for content in (b"first", b"second"):
        with new_folder(tmp_path / "made") as path:
            write_file(path / "one", content)

    with refused(OSError, "no more"), new_folder(tmp_path / "made") as path:
        write_file(path / "two", b"half")
        raise OSError("no more")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()} == {"one": b"second"}


@pytest.mark.parametrize("remains", ["nothing", "a file"])
def test_a_run_directory_that_goes_away_just_before_a_write_is_no_mistake_in_the_input(tmp_path, remains):
    run = tmp_path / "run"
    run.mkdir()
    with locked(run), refused(StorageError, run, ".lock", "moved or removed"), writing(run / "metrics.jsonl"):
        run.rename(tmp_path / "elsewhere")
        if remains == "a file":
            run.touch()
        (run / "metrics.jsonl").open("ab")
