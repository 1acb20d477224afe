"""The text side of pipelines of diffusers: the conditions equal those of the pipeline, other folders are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookdiff import UserError, load_config, load_run
from hookdiff.experiment.build import build_feed
from hookdiff_text.pipeline import Pipeline
from tests.conftest import Succeed, as_list, refused, write_small
from tests.plugins.test_text import CAPTIONS, CLIP, KINDS, LAYERS, T5, WORDS, words_tokenizer
from tests.plugins.test_text_folder import edit

pytest.importorskip("transformers", reason="needs hookdiff[text]")
pytest.importorskip("diffusers", reason="needs hookdiff[diffusers]")

CPU = torch.device("cpu")
GEMMA = {**LAYERS, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
TWO = ("CLIPTextConfig", {**CLIP, "hidden_size": 32, "projection_dim": 16})
WIDE = ("T5Config", {**T5, "d_model": 112})  # than both CLIPs together
JOINED, MASKED = {"": (0, 1), "_pooled": (2, 3)}, {"": (0, 2), "_mask": (1, 3)}
ONE, PROJECTED, SMALL_T5 = "CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"
# By class: the encoders; the places of what `encode_prompt` returns for prompts and for none; its own number of tokens.
PIPELINES: dict[str, tuple[list[tuple[str, Any]], dict[str, tuple[int, int]], int | None]] = {
    "StableDiffusionPipeline": ([(ONE, KINDS[ONE])], {"": (0, 1)}, None),
    "StableDiffusionXLPipeline": ([(ONE, KINDS[ONE]), (PROJECTED, TWO)], JOINED, None),
    "StableDiffusion3Pipeline": ([(PROJECTED, KINDS[PROJECTED]), (PROJECTED, TWO), (SMALL_T5, WIDE)], JOINED, 256),
    "SanaPipeline": ([("Gemma2Model", ("Gemma2Config", GEMMA))], MASKED, 300),
    "PixArtAlphaPipeline": ([(SMALL_T5, KINDS[SMALL_T5])], MASKED, 120),
    "PixArtSigmaPipeline": ([(SMALL_T5, KINDS[SMALL_T5])], MASKED, 300),
}
CLIP_TOKENS = 12
first, *others = PIPELINES
every_kind = pytest.mark.parametrize("kind", [first, *(pytest.param(kind, marks=pytest.mark.slow) for kind in others)])
Write = Callable[..., tuple[Any, Path]]


def save_pipeline(kind: str, folder: Path, **options: Any) -> Any:
    """Save a pipeline of small text encoders with random weights, and of other parts in `options`, and return it."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    parts: dict[str, Any] = dict.fromkeys(("vae", "unet", "transformer", "scheduler"))
    parts |= dict.fromkeys(("safety_checker", "feature_extractor"))
    for suffix, (name, (config, values)) in zip(("", "_2", "_3"), PIPELINES[kind][0], strict=False):
        made = getattr(transformers, config)(vocab_size=len(WORDS), **values)
        parts[f"text_encoder{suffix}"] = getattr(transformers, name)(made).eval()
        parts[f"tokenizer{suffix}"] = words_tokenizer(model_max_length=CLIP_TOKENS)
    pipeline_class = getattr(diffusers, kind)
    taken, _ = pipeline_class._get_signature_keys(pipeline_class)
    pipeline = pipeline_class(**{name: part for name, part in parts.items() if name in taken} | options)
    pipeline.save_pretrained(folder)
    (folder / "None.py").write_text("raise SystemExit('code of the folder was run')")  # earlier diffusers run it
    return pipeline


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that saves a pipeline in a folder of its name, and returns both."""
    return lambda kind, **options: (save_pipeline(kind, tmp_path / kind, **options), tmp_path / kind)


@every_kind
def test_it_makes_the_conditions_of_the_pipeline(kind: str, write: Write) -> None:
    pipeline, folder = write(kind)
    encoders, places, own_length = PIPELINES[kind]
    prompts = dict.fromkeys(("prompt_2", "prompt_3")[: len(encoders) - 1])
    for length in (None, 10) if own_length else (None,):
        given = {**prompts, **({"max_sequence_length": length} if length else {})}
        with torch.no_grad():
            own = pipeline.encode_prompt(
                CAPTIONS, device=CPU, num_images_per_prompt=1, do_classifier_free_guidance=True, **given
            )
        encoder = Pipeline(path=str(folder), length=length)
        network = encoder.open(CPU)
        found = network.encode(CAPTIONS)
        assert found.keys() == places.keys()
        for name, (prompted, unprompted) in places.items():
            assert torch.equal(found[name][::2], own[prompted][::2])
            assert torch.equal(found[name][1], own[unprompted][1])
            assert found[name].dtype == (torch.bool if name == "_mask" else torch.float32)
        tokens = [CLIP_TOKENS] * kind.startswith("Stable") + [length or own_length or 0] * (own_length is not None)
        assert found[""].shape[1] == sum(tokens)
        assert encoder.limit == min(tokens)
        marked = 3 if places is MASKED else 5  # "</s>" is one token, and these take texts in lower case
        assert network.lengths([*CAPTIONS, "</S>"]) == [6, 2, 27, marked]
        own_limit = length or own_length or 0
        limits = [CLIP_TOKENS if name.startswith("CLIP") else own_limit for name, _ in encoders]
        rows = network.tokens(CAPTIONS)
        assert [len(row) for row in rows] == [6 * len(encoders), 2 * len(encoders), sum(min(27, own) for own in limits)]
        assert [row.count(None) for row in rows] == [0, 0, len(encoders)]


@pytest.mark.slow
def test_no_prompt_of_xl_is_zeros_if_its_config_says_so(write: Write) -> None:
    digests = set()
    for force in (True, False):
        _, folder = write("StableDiffusionXLPipeline", force_zeros_for_empty_prompt=force)
        encoder = Pipeline(path=str(folder))
        for rows in encoder.open(CPU).encode([""]).values():
            assert bool(rows.any()) is not force
        digests.add(encoder.digest())
    assert len(digests) == 2


INDEX = "model_index.json"
Spoil = Callable[[Path], object]
BAD: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "no JSON": (lambda at: (at / INDEX).write_text("["), (INDEX, "JSON")),
    "another class": (lambda at: edit(at / INDEX, _class_name="FluxPipeline"), ("FluxPipeline", "SanaPipeline")),
    "code of its own": (lambda at: edit(at / INDEX, _class_name=["mine", "Mine"]), ("Mine", "SanaPipeline")),
    "an encoder of its own": (
        lambda at: edit(at / INDEX, text_encoder=["mine", "Mine"]),
        ("text_encoder", "Mine", "CLIPTextModel"),
    ),
    "pickled": (
        lambda at: (at / "text_encoder" / "model.safetensors").rename(at / "text_encoder" / "pytorch_model.bin"),
        ("pytorch_model.bin", "safetensors"),
    ),
    "no tokenizer": (lambda at: (at / "tokenizer" / "tokenizer.json").unlink(), ("tokenizer",)),
    "no length": (
        lambda at: (at / "tokenizer" / "tokenizer_config.json").write_text("{}"),
        ("model_max_length = None", "at most 12"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_other_folders_are_refused(write: Write, name: str) -> None:
    _, folder = write(first)
    spoil, facts = BAD[name]
    spoil(folder)
    with refused(UserError, "data.encode", *facts):
        Pipeline(path=str(folder)).digest()


@pytest.mark.slow
def test_a_damaged_part_and_a_length_that_it_cannot_take_are_refused(write: Write) -> None:
    _, folder = write(first)
    with refused(UserError, "data.encode", "length", first):
        Pipeline(path=str(folder), length=10).digest()
    (folder / "text_encoder" / "model.safetensors").write_bytes(b"damaged")
    with refused(UserError, "data.encode", "text_encoder", "model.safetensors", "cut short"):
        Pipeline(path=str(folder)).open(CPU)


SD3_MODEL = {
    "use": "diffusers:SD3Transformer2DModel",
    "patch_size": 2,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "joint_attention_dim": 112,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 48,
}
GUIDED = {"guidance": {"scale": 2.0}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of layers in diffusers
def test_a_network_of_diffusers_is_trained_from_a_config(write: Write, succeed: Succeed, tmp_path: Path) -> None:
    pipeline, _ = write("StableDiffusion3Pipeline")
    encode = {"text": {"use": "pipeline", "path": str(tmp_path / "StableDiffusion3Pipeline"), "length": 10}}
    path = write_small(
        tmp_path / "text.toml",
        run={"steps": 2, "batch_size": 6, "plugins": ["checkpoint"]},
        data={"source": "tests.plugins.test_text:drawings", "cache_dir": str(tmp_path / "cache"), "encode": encode},
        model=SD3_MODEL,
        diffusion={"conditions": {"encoder_hidden_states": "text", "pooled_projections": "text_pooled"}},
        sampling={"steps": 2, **GUIDED},
    )
    succeed("run", path, "--out", tmp_path / "run")
    succeed("sample", tmp_path / "run", "--num", "2", "--out", tmp_path / "two.png", "--trust")
    nothing = build_feed(load_config(path)).nothing
    with torch.no_grad():
        own = pipeline.encode_prompt([""], None, None, CPU, max_sequence_length=10)
    for name, place in (("text", 1), ("text_pooled", 3)):
        torch.testing.assert_close(nothing[name], own[place][0], atol=2e-3, rtol=2e-3)  # kept in float16


XL_MODEL = {
    "use": "diffusers:UNet2DConditionModel",
    "block_out_channels": [8, 8],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 96,
    "attention_head_dim": 4,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
}
XL_CONDITIONS = {
    "encoder_hidden_states": "text",
    "added_cond_kwargs.text_embeds": "text_pooled",
    "added_cond_kwargs.time_ids": "text_time_ids",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of layers in diffusers
def test_a_network_of_sdxl_gets_sizes_and_crops(write: Write, succeed: Succeed, tmp_path: Path) -> None:
    pipeline, _ = write("StableDiffusionXLPipeline")
    (tmp_path / "pictures").mkdir()
    for k in range(12):
        size, words = [(20, 30), (40, 16), (16, 16)][k % 3], ["a red disc", "a blue ring\n", "a large square"][k % 3]
        Image.new("RGB", size, "red").save(tmp_path / "pictures" / f"{k:02}.png")
        (tmp_path / "pictures" / f"{k:02}.txt").write_text(words)
    encode = {"text": {"use": "pipeline", "path": str(tmp_path / "StableDiffusionXLPipeline")}}
    source = {"source": "folder", "path": str(tmp_path / "pictures"), "captions": "txt", "labels": "none"}
    path = write_small(
        tmp_path / "xl.toml",
        run={"steps": 4, "batch_size": 4, "plugins": ["checkpoint", "ema"]},
        data={**source, "image_size": 16, "flip": True, "cache_dir": str(tmp_path / "cache"), "encode": encode},
        model=XL_MODEL,
        diffusion={"conditions": XL_CONDITIONS},
        sampling={"steps": 1, **GUIDED},
    )
    feed = build_feed(load_config(path))
    numbers = [[30, 20, 4, 0, 16, 16], [16, 40, 0, 12, 16, 16], [16, 16, 0, 0, 16, 16]]  # 20 x 30 becomes 16 x 24
    assert as_list(next(feed.unaugmented(torch.arange(3))).conditions["text_time_ids"]) == numbers
    assert "bit for bit" in succeed("selftest", "resume", path)
    succeed("run", path, "--out", tmp_path / "run")
    succeed("sample", tmp_path / "run", "--prompt", "a red disc", "--out", tmp_path / "one.png", "--trust")
    calls: list[dict[str, torch.Tensor]] = []
    with load_run(tmp_path / "run", trust=True) as run:
        net: Any = run.loop.model
        net.register_forward_pre_hook(lambda _, __, given: calls.append(given["added_cond_kwargs"]), with_kwargs=True)
        run.sample(1, prompts=["a red disc"], negative="a blue ring")
        run.sample(1, prompts=["a red disc"])
    pipeline.register_modules(unet=net)
    default = pipeline._get_add_time_ids((16, 16), (0, 0), (16, 16), torch.float32, 16)
    for given in calls:
        assert torch.equal(given["time_ids"], default.expand(2, 6))
    assert calls[0]["text_embeds"][1].any()  # of the negative prompt
    assert not calls[-1]["text_embeds"][1].any()  # SDXL has zeros for no prompt
