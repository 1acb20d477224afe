"""Text encoders of transformers: the conditions equal those of transformers, and other folders are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from PIL import Image

from hookdiff import InMemory, UserError
from hookdiff_init.captions import with_captions
from hookdiff_init.look import look
from hookdiff_init.write import Network, Plan, text
from hookdiff_text import Text
from hookdiff_text.folder import tokens_of
from tests.conftest import Command, Succeed, check_facts, check_refused, refused, write_small

pytest.importorskip("transformers", reason="needs hookdiff[text]")

WORDS = (
    *("<pad>", "<s>", "<unk>", "</s>", "a", "on", "disc", "square", "ring", "large", "small"),
    *("red", "green", "blue", "yellow", "white", "black"),
)
Write = Callable[[str], Path]
CAPTIONS = ["a large red disc", "", "a small unheard square on " + "blue " * 20]
LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CLIP = {**LAYERS, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 0}
T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "eos_token_id": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIPTextModel": ("CLIPTextConfig", {**CLIP, "initializer_factor": 5.0}),
    "CLIPTextModelWithProjection": ("CLIPTextConfig", {**CLIP, "projection_dim": 32}),
    "T5EncoderModel": ("T5Config", T5),
    "BertModel": ("BertConfig", {**LAYERS, "max_position_embeddings": 12}),
}
first, *others = KINDS
every_kind = pytest.mark.parametrize("kind", [first, *(pytest.param(kind, marks=pytest.mark.slow) for kind in others)])


def words_tokenizer(**options: Any) -> Any:
    """Return a tokenizer of a few words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 3)])
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special, **options)


def save_encoder(kind: str, folder: Path, **sizes: int) -> Path:
    """Save a small encoder with random weights and its tokenizer in a folder of its name, and return that."""
    import transformers

    words_tokenizer().save_pretrained(folder / kind)
    config, options = KINDS[kind]
    torch.manual_seed(0)
    made = getattr(transformers, config)(vocab_size=len(WORDS), **{**options, **sizes})
    getattr(transformers, kind)(made).save_pretrained(folder / kind)
    return folder / kind


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that saves an encoder."""
    return lambda kind: save_encoder(kind, tmp_path)


@every_kind
def test_it_makes_the_conditions_of_the_model_of_transformers(kind: str, write: Write) -> None:
    import transformers

    folder = write(kind)
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    has_vector = not kind.startswith("T5")
    tokens = tokenizer(CAPTIONS, padding="max_length", truncation=True, max_length=10, return_tensors="pt")
    for attend, layer in ((None, -1), ("tokens", -1), ("all", -2)):
        made = Text(path=str(folder), length=10, attend=attend, layer=layer, pooled=has_vector, mask=True)
        found = made.open(torch.device("cpu")).encode(CAPTIONS)
        is_masked = attend == "tokens" or (attend is None and not kind.startswith("CLIP"))
        with torch.no_grad():
            given = {**tokens, "attention_mask": tokens["attention_mask"] if is_masked else None}
            own = model(**given, output_hidden_states=True)
        expected = own.last_hidden_state if layer == -1 else own.hidden_states[layer]
        assert torch.equal(found[""], expected)
        assert torch.equal(found["_mask"], tokens["attention_mask"].bool())
        assert found["_mask"].sum(1).tolist() == [6, 2, 10]
        if has_vector:
            assert torch.equal(found["_pooled"], own.text_embeds if "Projection" in kind else own.pooler_output)
    network = made.open(torch.device("cpu"))
    assert network.lengths(CAPTIONS) == [6, 2, 27]
    assert network.tokens(CAPTIONS) == [[1, 4, 9, 11, 6, 3], [1, 3], [1, 4, 10, None, 7, 5, *[13] * 3, 3]]
    assert made.limit == 10
    assert Text(path=str(folder)).limit == (128 if kind.startswith("T5") else 12)


def test_a_blank_before_an_unknown_word_of_sentencepiece_is_no_word() -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = Tokenizer(models.Unigram([("<pad>", 0.0), ("<unk>", 0.0), ("▁a", -1.0), ("▁", -2.0)], unk_id=1))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="<pad>", unk_token="<unk>")
    assert tokens_of(tokenizer, ["a кот шар", "", "a a a"], 2) == [[2], [], [2, 2]]
    assert tokens_of(tokenizer, ["a кот шар"], 9) == [[2, None, None]]


@pytest.mark.slow
def test_a_part_of_a_pipeline_finds_its_tokenizer(write: Write, tmp_path: Path) -> None:
    folder = write(first)
    moved = tmp_path / "pipeline"
    (moved / "tokenizer_2").mkdir(parents=True)
    for file in folder.glob("*token*"):
        file.rename(moved / "tokenizer_2" / file.name)
    folder.rename(moved / "text_encoder_2")
    encoder = Text(path=str(moved / "text_encoder_2"))
    assert encoder.open(torch.device("cpu")).encode([""])[""].shape == (1, 12, 64)
    changed = encoder.digest()
    (moved / "tokenizer_2" / "tokenizer_config.json").write_text("{}")
    assert encoder.digest() != changed


@pytest.mark.slow
def test_more_tokens_and_layers_than_there_are_are_refused(write: Write) -> None:
    path = str(write(first))
    with refused(UserError, "data.encode", "length = 13", "12 positions"):
        Text(path=path, length=13).digest()
    with refused(UserError, "layer = 5", "-3 to 2"):
        Text(path=path, layer=5).open(torch.device("cpu")).encode([""])


def write_text_config(folder: Path) -> Path:
    """Write a config that trains a DiT on the captions of `drawings`, which the encoder in `folder` encodes."""
    encoder = {"use": "text", "path": str(folder / "CLIPTextModel"), "mask": True}
    return write_small(
        folder / "text.toml",
        run={"steps": 4, "batch_size": 6, "plugins": ["checkpoint", "ema", "samples"]},
        data={"source": f"{__name__}:drawings", "cache_dir": str(folder / "cache"), "encode": {"text": encoder}},
        model={"use": "dit", "hidden_size": 32, "depth": 1, "num_heads": 4, "patch_size": 2, "text_dim": 64},
        diffusion={"conditions": ["text", "text_mask"]},
        sampling={"steps": 2, "guidance": {"scale": 2.0}},
        plugins={"samples": {"every": 2, "prompts": ["a red ring"], "num": 2}},
    )


def drawings() -> InMemory:
    return InMemory(torch.zeros(12, 1, 4, 4), texts={"text": [["a red disc", "red"], ["a blue ring"]] * 6})


@pytest.mark.slow
def test_a_config_trains_a_dit_on_captions(write: Write, succeed: Succeed, hookdiff: Command, tmp_path: Path) -> None:
    write(first)
    path = write_text_config(tmp_path)
    assert "bit for bit" in succeed("selftest", "resume", path)
    succeed("run", path, "--out", tmp_path / "run")
    succeed("sample", tmp_path / "run", "--num", "2", "--out", tmp_path / "two.png", "--trust")
    check_refused(hookdiff("run", path, "--set", "model.text_dim=0", "--out", tmp_path / "other"), "text_dim", "64")
    check_refused(hookdiff("run", path, "--set", "model.text_dim=32", "--out", tmp_path / "other"), "model", 64, 32)
    (tmp_path / first).rename(tmp_path / "moved")
    resume = "resume", tmp_path / "run", "--steps", "6", "--trust", "--set", f"data.encode.text.path={tmp_path}/moved"
    check_refused(hookdiff(*resume, "--set", "data.encode.text.layer=-2"), "data.encode.text", "another encoder")
    succeed(*resume)


@pytest.mark.parametrize(
    ("kind", "words", "length"),  # the tokenizer adds two tokens
    [
        ("CLIPTextModel", 2, 8),
        ("CLIPTextModel", 6, 8),
        ("CLIPTextModel", 9, 12),  # all that it takes
        ("CLIPTextModel", 40, 12),
        ("T5EncoderModel", 40, 48),
        ("T5EncoderModel", 200, 208),  # any number
    ],
)
def test_init_fits_a_length_to_the_captions(write: Write, tmp_path: Path, kind: str, words: int, length: int) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for k in range(4):
        Image.new("RGB", (12, 12)).save(folder / f"{k}.png")
        (folder / f"{k}.txt").write_text("red" if k else f"a red\n{'blue ' * words}")
    pictures = with_captions(look(folder), write(kind))
    config = tomli.loads(text(pictures, Plan(8, Network(8, 32, (1, 2), 1), 4), tmp_path / "mine.toml"))
    encoder = config["data"]["encode"]["text"]
    assert encoder["length"] == length
    assert Text(path=encoder["path"], length=length).limit == length
    assert config["plugins"]["samples"]["prompts"] == ["a red", f"{'blue ' * words}".strip(), "red"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["CLIPTextModel", "T5EncoderModel"])
def test_three_commands_go_from_a_folder_with_captions_to_samples(
    kind: str, write: Write, succeed: Succeed, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    for k in range(24):
        path = Path("mine") / "ab"[k % 2] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), ("red", "blue")[k % 2]).save(path)
        if k:
            path.with_suffix(".txt").write_text(("a red disc", "a blue ring\na ring")[k % 2])
    encoder = write(kind).name
    out = succeed("init", "mine", "--text-encoder", encoder, "--minutes", "0.02")
    check_facts(out, "24 colour images with captions", "hookdiff sample runs/mine --prompt 'a red disc'")
    table = tomli.loads(Path("mine.toml").read_text())
    assert table["data"] == {
        "source": "folder",
        "path": "mine",
        "labels": "none",
        "flip": False,
        "captions": "txt",
        "missing": "empty",
        "encode": {"text": {"use": "text", "path": encoder, "length": 8, "mask": True}},
    }
    assert table["diffusion"] == {"conditions": ["text", "text_mask"]}
    assert (table["model"]["use"], table["model"]["text_dim"]) == ("unet", 64)
    succeed("run", "mine.toml", "--set", "run.steps=4", "--set", "sampling.steps=2")
    assert table["plugins"]["samples"]["prompts"] == ["a red disc", "a blue ring", "a ring"]
    succeed("sample", "runs/mine", "--num", "4", "--steps", "2", "--prompt", "a blue ring")
    assert Path("runs/mine/samples/seed-0.png").is_file()
