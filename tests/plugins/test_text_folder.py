"""The folder of a text encoder: each file that is read is hashed, and other files are refused or not opened."""

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hookdiff import UserError
from hookdiff.encoding import digest_of
from hookdiff_text import Text
from tests.conftest import refused
from tests.hostile.mutations import CANARY, Bomb
from tests.plugins.test_text import WORDS, save_encoder

pytest.importorskip("transformers", reason="needs hookdiff[text]")

CAPTION = "a large red disc"
CONFIG, SETTINGS = "config.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index"
Change = Callable[[Path], object]


def save(folder: Path) -> Path:
    """Save an encoder; its tokenizer is in a folder of its own, as in a pipeline, and has two versions."""
    save_encoder("CLIPTextModel", folder)
    path, tokens = folder / "text_encoder", folder / "tokenizer"
    (folder / "CLIPTextModel").rename(path)
    tokens.mkdir()
    for file in path.glob("*token*"):
        file.rename(tokens / file.name)
    return path


def edit(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    table = {**(json.loads(path.read_text()) if path.exists() else {}), **values}
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def other_weights(path: Path) -> None:
    """Change the weights, and neither their size nor the time of the last change."""
    about = path.stat()
    save_file({name: -one for name, one in load_file(path).items()}, path, {"format": "pt"})
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert path.stat().st_size == about.st_size


def split(folder: Path, place: str = "") -> None:
    """Save the weights as two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    (folder / place).mkdir(exist_ok=True)
    placed = {}
    for k, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / place / f"{k}.safetensors", {"format": "pt"})
        placed |= dict.fromkeys(part, f"{place}{k}.safetensors")
    (folder / WEIGHTS).unlink()
    (folder / f"{INDEX}.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def other_words(tokens: Path, name: str = "tokenizer.json") -> None:
    """Exchange two words of a vocabulary."""
    text = (tokens / "tokenizer.json").read_text()
    (tokens / name).write_text(text.replace('"red"', '"?"').replace('"disc"', '"red"').replace('"?"', '"disc"'))


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    (folder / WEIGHTS).unlink()
    names = dict.fromkeys(["text_model.final_layer_norm.bias"], "pytorch_model.bin")
    (folder / f"{INDEX}.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def nothing(_: Path) -> None:
    pass


# What a folder has at first, and what is then changed: the embeddings change with the hash, and only with it.
CHANGED: dict[str, tuple[Change, Change]] = {
    "weights of the same size and time": (nothing, lambda folder: other_weights(folder / WEIGHTS)),
    "a shard": (split, lambda folder: other_weights(folder / "1.safetensors")),
    "a shard in a folder": (lambda folder: split(folder, "deep/"), lambda at: other_weights(at / "deep/1.safetensors")),
    "weights of another name": (
        lambda folder: (
            shutil.copy(folder / WEIGHTS, folder / "other.safetensors"),
            edit(folder / CONFIG, transformers_weights="other.safetensors"),
        ),
        lambda folder: other_weights(folder / "other.safetensors"),
    ),
    "the only weights": (
        lambda folder: (folder / WEIGHTS).replace(folder / "model.fp16.safetensors"),
        lambda folder: other_weights(folder / "model.fp16.safetensors"),
    ),
    "words": (nothing, lambda folder: other_words(folder.parent / "tokenizer")),
    "a tokenizer for a version": (
        lambda folder: (
            other_words(folder.parent / "tokenizer", "tokenizer.4.0.0.json"),
            edit(folder.parent / "tokenizer" / SETTINGS, fast_tokenizer_files=["tokenizer.4.0.0.json"]),
        ),
        lambda folder: shutil.copy(*(folder.parent / "tokenizer" / f"tokenizer{k}.json" for k in ("", ".4.0.0"))),
    ),
    "the config of the tokenizer": (
        nothing,
        lambda folder: edit(folder.parent / "tokenizer" / CONFIG, model_type="clip"),
    ),
}

# Files that are not read: neither the hash nor the embeddings change.
KEPT: dict[str, Change] = {
    "other weights": lambda folder: save_file({"x": torch.ones(1)}, folder / "x.safetensors"),
    "a pickle": lambda folder: (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb())),
    "a template": lambda folder: (folder.parent / "tokenizer" / "chat_template.jinja").write_text("{{"),
    "other settings": lambda folder: (folder / "generation_config.json").write_text("["),
}

# What is refused before transformers opens anything, and words of the message.
REFUSED: dict[str, tuple[Change, tuple[object, ...]]] = {
    "weights in a folder": (
        lambda folder: edit(folder / CONFIG, transformers_weights="deep/other.safetensors"),
        (CONFIG, "transformers_weights", "deep/other.safetensors"),
    ),
    "no config": (lambda folder: (folder / CONFIG).unlink(), (CONFIG,)),
    "a pickle": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        ("pytorch_model.bin", "safetensors"),
    ),
    "another class": (
        lambda folder: edit(folder / CONFIG, architectures=["GPT2LMHeadModel"]),
        ("GPT2LMHeadModel", "CLIPTextModel"),
    ),
    "a class of its own": (lambda folder: edit(folder / CONFIG, architectures=["Mine"]), ("Mine",)),
    "no tokenizer": (lambda folder: shutil.rmtree(folder.parent / "tokenizer"), ("tokenizer",)),
    "an index of pickles": (pickled, (f"{INDEX}.json", "pytorch_model.bin")),
    "an adapter": (lambda folder: edit(folder / "adapter_config.json", peft_type="LORA"), ("adapter_config.json",)),
    "code": (
        lambda folder: edit(folder / CONFIG, auto_map={"AutoModel": "mine.Mine"}),
        (CONFIG, "auto_map", "mine.Mine"),
    ),
    "code of the tokenizer": (
        lambda folder: edit(folder.parent / "tokenizer" / SETTINGS, auto_map={"AutoTokenizer": ["mine.Mine", None]}),
        (SETTINGS, "auto_map", "mine.Mine"),
    ),
    "quantized": (
        lambda folder: edit(folder / CONFIG, text_config={"quantization_config": {"quant_method": "x"}}),
        (CONFIG, "quantization_config"),
    ),
    "two": (
        lambda folder: (
            [shutil.copy(folder / WEIGHTS, folder / f"{k}.safetensors") for k in "ab"] and (folder / WEIGHTS).unlink()
        ),
        ("a.safetensors", "b.safetensors", WEIGHTS),
    ),
    "no index": (
        lambda folder: (folder / WEIGHTS).replace(folder / "model-00001-of-00002.safetensors"),
        ("model-00001-of-00002.safetensors", "index"),
    ),
}


def encoded(encoder: Text) -> tuple[str, torch.Tensor]:
    """Return the hash, and the embedding of a caption."""
    return encoder.digest(), encoder.open(torch.device("cpu")).encode([CAPTION])[""]


@pytest.mark.parametrize("name", CHANGED)
def test_each_file_that_changes_the_embeddings_changes_the_hash(tmp_path: Path, name: str) -> None:
    prepare, change = CHANGED[name]
    folder = save(tmp_path)
    prepare(folder)
    encoder = Text(path=str(folder))
    digest, rows = encoded(encoder)
    assert encoded(encoder)[0] == digest
    change(folder)
    changed, other = encoded(encoder)
    assert changed != digest
    assert torch.equal(rows, other) == (name == "the config of the tokenizer")


def test_a_token_that_the_network_does_not_have_is_refused(tmp_path: Path) -> None:
    encoder = Text(path=str(save(tmp_path)))
    digest = encoder.digest()
    edit(tmp_path / "tokenizer" / SETTINGS, added_tokens_decoder=None)
    edit(tmp_path / "tokenizer" / "added_tokens.json", **{"large red": len(WORDS)})
    assert encoder.digest() != digest
    with refused(UserError, "data.encode", tmp_path / "tokenizer", encoder.folder, len(WORDS)):
        encoded(encoder)


def test_files_that_are_not_read_change_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path)
    digest, rows = encoded(Text(path=str(folder)))
    for name, change in KEPT.items():
        change(folder)
        same, others = encoded(Text(path=str(folder)))
        assert same == digest, name
        assert torch.equal(rows, others), name


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_hashed_is_refused(here: Path, name: str) -> None:
    change, facts = REFUSED[name]
    folder = save(here)
    change(folder)
    for refuse in (Text.digest, lambda encoder: encoder.open(torch.device("cpu"))):
        with refused(UserError, "data.encode", *facts):
            refuse(Text(path=str(folder)))
    assert not Path(CANARY).exists()


def test_a_config_opens_nothing_elsewhere(tmp_path: Path) -> None:
    folder, elsewhere = save(tmp_path / "here"), save(tmp_path / "elsewhere")
    _, rows = encoded(Text(path=str(folder)))
    other_words(elsewhere.parent / "tokenizer")
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps(dict.fromkeys(WORDS, 0)))
    words = str(elsewhere.parent / "tokenizer" / "tokenizer.json")
    keys = {"tokenizer_file": words, "vocab_file": str(vocabulary), "vocab": str(vocabulary), "init_inputs": [words]}
    edit(folder.parent / "tokenizer" / SETTINGS, **keys)
    edit(folder / CONFIG, attn_implementation="kernels-community/flash-attn", configuration_files=["config.4.0.0.json"])
    assert torch.equal(encoded(Text(path=str(folder)))[1], rows)


def test_weights_that_are_missing_are_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path)
    name = "final_layer_norm.bias"
    tensors = {key: value for key, value in load_file(folder / WEIGHTS).items() if not key.endswith(name)}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with refused(UserError, "data.encode", WEIGHTS, "CLIPTextModel", name):
        Text(path=str(folder)).open(torch.device("cpu"))


def test_a_model_without_a_pooler_encodes_all_but_a_vector(tmp_path: Path) -> None:
    from transformers import BertModel

    folder = save_encoder("BertModel", tmp_path)
    whole = BertModel.from_pretrained(folder)
    expected = encoded(Text(path=str(folder)))[1]
    part = BertModel(whole.config, add_pooling_layer=False)
    part.load_state_dict(whole.state_dict(), strict=False)
    part.save_pretrained(folder)
    assert torch.equal(encoded(Text(path=str(folder)))[1], expected)
    with refused(UserError, "data.encode: pooled", "BertModel", "no vector"):
        encoded(Text(path=str(folder), pooled=True))


def test_a_file_is_hashed_again_only_if_size_or_time_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, known = tmp_path / "weights", tmp_path / "cache" / "hookdiff" / "digests.json"
    file.write_bytes(b"one")
    digest = digest_of([file])
    assert not known.exists()  # a second change within a step of the clock would not be seen
    while time.time() < file.stat().st_ctime + 2.1:
        time.sleep(0.1)
    assert digest_of([file]) == digest
    (key,) = json.loads(known.read_text())
    known.write_text(json.dumps({key: "0" * 64}))
    assert digest_of([file]) != digest  # it was not read
    file.touch()
    assert digest_of([file]) == digest
    about = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert digest_of([file]) != digest


# What takes the place of a file.
SPECIAL: dict[str, Change] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}
FILES = [CONFIG, WEIGHTS, *(f"../tokenizer/{one}" for one in ("tokenizer.json", SETTINGS, "added_tokens.json", CONFIG))]


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path)
    for make in SPECIAL.values():
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        make(path)
        for refuse in (Text.digest, lambda encoder: encoder.open(torch.device("cpu"))):
            with refused(UserError, "data.encode", path.name):
                refuse(Text(path=str(folder)))


# Values in a JSON file that no library takes, and words of the message.
BROKEN: dict[str, tuple[str, Any, tuple[object, ...]]] = {
    "a panic": ("../tokenizer/tokenizer.json", {"added_tokens": [{"id": -1}]}, ("tokenizer",)),
    "no words": ("../tokenizer/tokenizer.json", {"model": {"type": "WordLevel", "vocab": []}}, ("tokenizer",)),
    "no table": ("../tokenizer/tokenizer.json", {"model": []}, ("tokenizer",)),
    "nested": (CONFIG, {"max_position_embeddings": [12]}, (CONFIG, "max_position_embeddings")),
    "negative": (CONFIG, {"max_position_embeddings": -1}, (CONFIG, "max_position_embeddings")),
    "not a number": (CONFIG, {"max_position_embeddings": float("nan")}, (CONFIG, "max_position_embeddings")),
    "huge": (CONFIG, {"hidden_size": 10**12}, ("text_encoder",)),
    "text": (CONFIG, {"hidden_size": "64"}, ("text_encoder",)),
    "another table": (CONFIG, {"text_config": [1]}, ("text_encoder",)),
    "no architecture": (CONFIG, {"architectures": [5]}, ("architectures",)),
    "token": ("../tokenizer/tokenizer_config.json", {"pad_token": ["<pad>"]}, ("tokenizer",)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_values_that_no_library_takes_are_refused(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path)
    place, values, facts = BROKEN[name]
    edit(folder / place, **values)
    with refused(UserError, "data.encode", *facts):
        encoded(Text(path=str(folder)))


def test_a_vocabulary_without_its_unknown_token_refuses_a_caption(tmp_path: Path) -> None:
    folder = save(tmp_path)
    path = tmp_path / "tokenizer" / "tokenizer.json"
    table = json.loads(path.read_text())
    del table["model"]["vocab"]["<unk>"]
    table["added_tokens"] = [one for one in table["added_tokens"] if one["content"] != "<unk>"]
    path.write_text(json.dumps(table))
    edit(tmp_path / "tokenizer" / SETTINGS, unk_token=None)
    network = Text(path=str(folder)).open(torch.device("cpu"))
    for call in (network.encode, network.lengths):
        with refused(UserError, "data.encode", tmp_path / "tokenizer", "an unheard word"):
            call(["an unheard word"])
