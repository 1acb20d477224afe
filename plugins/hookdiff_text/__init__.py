"""Encodes captions by text encoders of transformers or by a pipeline: `[data.encode.text] use = "text"`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import define, evolve, field
from attrs.validators import ge, in_, optional
from torch import Tensor

from hookdiff import UserError, listed
from hookdiff.disk import local_path
from hookdiff.encoding import ExportedTexts, TextEncoder, digest_seen, table_in
from hookdiff.options import about
from hookdiff_text.folder import (
    CONFIG,
    check_tokens,
    count_in,
    has_tokenizer,
    lengths_of,
    network_in,
    network_weights,
    tokenized,
    tokenizer_files,
    tokenizer_in,
    tokens_of,
)

logger = logging.getLogger("hookdiff")

# The class that loads a folder, by the class in its `architectures`. No file can make us load any other class.
_CLASSES = {
    "CLIPModel": "CLIPTextModel",
    "T5ForConditionalGeneration": "T5EncoderModel",
    "T5Model": "T5EncoderModel",
    **{
        name: name
        for name in (
            *("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel", "UMT5EncoderModel", "BertModel"),
            *("AlbertModel", "DistilBertModel", "ElectraModel", "ModernBertModel", "MPNetModel", "RobertaModel"),
            *("XLMRobertaModel",),
        )
    },
}
_USUAL = 128  # tokens to which captions are truncated by default


def _is_known(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") in [[name] for name in _CLASSES]


@define(frozen=True)
class Text(TextEncoder):
    """A frozen text encoder in a folder, as transformers saves it, with its tokenizer: CLIP, T5, BERT and others."""

    path: str = field(
        metadata=about(
            "folder with config.json, the weights in safetensors, and the tokenizer, which may also be in the folder "
            "`tokenizer` beside it; or `hub:ORG/NAME`"
        )
    )
    length: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=about("tokens to which captions are padded or truncated; default: the encoder's most, up to 128"),
    )
    layer: int = field(
        default=-1,
        metadata=about(
            "layer that gives the output: -1 is the last layer, with the final norm; -2 the layer before, without norm"
        ),
    )
    attend: Literal["all", "tokens"] | None = field(
        default=None,
        validator=optional(in_(("all", "tokens"))),
        metadata=about(
            'positions that a token attends to: "all", or the "tokens" of the caption; default: "all" for a CLIP, as '
            'in Stable Diffusion, else "tokens"'
        ),
    )
    pooled: bool = field(default=False, metadata=about("also give NAME_pooled, one vector for each caption"))
    mask: bool = field(default=False, metadata=about("also give NAME_mask, true for the caption's own tokens"))
    precision: Literal["float32", "bf16"] = field(
        default="float32", validator=in_(("float32", "bf16")), metadata=about("dtype of the network")
    )

    @property
    def folder(self) -> Path:
        return local_path(self.path, "data.encode")

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer; for the encoder `text_encoder_2`, the folder `tokenizer_2` beside it.

        Raises:
            UserError: if there is none.
        """
        name = self.folder.resolve().name
        beside = self.folder.resolve().parent / name.replace("text_encoder", "tokenizer")
        for folder in (self.folder, beside, self.folder.resolve().parent / "tokenizer"):
            if has_tokenizer(folder):
                return folder
        raise UserError(f"data.encode: {self.path} has no tokenizer: save it there, or in {beside}")

    def config(self) -> dict[str, Any]:
        """Read config.json.

        Raises:
            UserError: if there is no such file, or its class is not in `_CLASSES`.
        """
        config = table_in(self.folder, CONFIG, "model of transformers", _is_known)
        match config.get("architectures"):
            case [str(name)]:
                pass
            case _:
                raise UserError(f"data.encode: {self.folder / CONFIG}: expected `architectures` to name one class")
        if name not in _CLASSES:
            raise UserError(
                f"data.encode: {self.path} holds a {name}; expected {listed(list(_CLASSES), len(_CLASSES))}"
            )
        return config

    @property
    def limit(self) -> int | None:
        config = self.config()
        if isinstance(text_config := config.get("text_config"), dict):
            config = {**config, **text_config, "architectures": config["architectures"]}
        most = count_in(config, "max_position_embeddings", self.folder / CONFIG)
        if most and "oberta" in config["architectures"][0]:
            most = max(1, most - 2)  # RoBERTa's first position comes after the position of the padding token
        if self.length is None:
            return min(most or _USUAL, _USUAL)
        if most and self.length > most:
            raise UserError(f"data.encode: length = {self.length}: set at most the {most} positions of {self.path}")
        return self.length

    def digest(self) -> str:
        config = self.config()
        options = (self.limit, self.layer, self.attend, self.pooled, self.mask, self.precision)
        text = json.dumps([config, options], sort_keys=True)
        weights = network_weights(self.folder, config)
        return digest_seen([weights], tokenizer_files(self.tokenizer_folder), text)

    def open(self, device: torch.device) -> _Network:
        kind = _CLASSES[self.config()["architectures"][0]]
        tokenizer, limit = self.tokenizer_folder, self.limit
        logger.info("data.encode: the %s in %s, with the tokenizer in %s", kind, self.folder, tokenizer)
        network = network_in(self.folder, kind, device, self.precision)
        tokens = tokenizer_in(tokenizer, "AutoTokenizer")
        attend = self.attend or ("all" if kind.startswith("CLIP") else "tokens")
        return _Network(self, network, tokens, limit or _USUAL, attend == "tokens")

    def to_diffusers(self, name: str, folder: str) -> ExportedTexts:
        opened = evolve(self, precision="float32").open(torch.device("cpu"))
        network, tokenizer, kind = opened.network, opened.tokenizer, type(opened.network).__name__
        tokenizer.model_max_length = opened.length  # a pipeline truncates captions to this length
        outputs = {"": "made.last_hidden_state" if self.layer == -1 else f"made.hidden_states[{self.layer}]"}
        if self.pooled:
            outputs["_pooled"] = f"made.{'text_embeds' if kind.endswith('WithProjection') else 'pooler_output'}"
        if self.mask:
            outputs["_mask"] = "tokens.attention_mask.bool()"
        returned = ", ".join(f"{name + suffix!r}: {value}" for suffix, value in outputs.items())
        attends = ", attention_mask=tokens.attention_mask" * opened.is_masked
        layers = ", output_hidden_states=True" * (self.layer != -1)
        code = f"""\
tokenizer = AutoTokenizer.from_pretrained({folder!r}, subfolder='tokenizer')
text_encoder = {kind}.from_pretrained({folder!r}, subfolder='text_encoder')
def encode(texts):
    filled = dict(padding='max_length', truncation=True, max_length={opened.length})
    tokens = tokenizer(texts, **filled, return_tensors='pt')
    made = text_encoder(tokens.input_ids{attends}{layers})
    return {{{returned}}}
given, none = encode(prompts), encode([''] * len(prompts))
"""
        has_mask = getattr(network.config, "use_attention_mask", False)  # the pipeline decides by this attribute
        is_usual = kind == "CLIPTextModel" and self.layer == -1 and opened.is_masked == bool(has_mask)
        return ExportedTexts(
            {"text_encoder": network, "tokenizer": tokenizer},
            code,
            {name + suffix: (f"given[{name + suffix!r}]", f"none[{name + suffix!r}]") for suffix in outputs},
            "StableDiffusionPipeline" if is_usual else "",
        )


@define(eq=False)
class _Network:
    options: Text
    network: Any
    tokenizer: Any
    length: int
    is_masked: bool

    def encode(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        options, device = self.options, next(self.network.parameters()).device
        filled = {"padding": "max_length", "truncation": True, "max_length": self.length}
        tokens = tokenized(self.tokenizer, list(texts), **filled, return_tensors="pt")
        check_tokens(self.network, self.tokenizer, tokens["input_ids"].tolist())
        ids, mask = tokens["input_ids"].to(device), tokens["attention_mask"].to(device)
        layered = {} if options.layer == -1 else {"output_hidden_states": True}
        with torch.no_grad():
            output = self.network(input_ids=ids, attention_mask=mask if self.is_masked else None, **layered)
        outputs = {"": output.last_hidden_state if options.layer == -1 else self._layer(output.hidden_states)}
        if options.pooled:
            pooled = output.get("text_embeds", output.get("pooler_output"))
            if pooled is None:
                kind = type(self.network).__name__
                raise UserError(f"data.encode: pooled: a {kind} gives no vector for a caption; set pooled = false")
            outputs["_pooled"] = pooled
        outputs = {name: rows.float().cpu() for name, rows in outputs.items()}
        return {**outputs, **({"_mask": mask.bool().cpu()} if options.mask else {})}

    def _layer(self, states: Sequence[Tensor]) -> Tensor:
        layer = self.options.layer
        if not -len(states) <= layer < len(states):
            raise UserError(f"data.encode: layer = {layer}: set {-len(states)} to {len(states) - 1}")
        return states[layer]

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        return lengths_of(self.tokenizer, list(texts))

    def tokens(self, texts: Sequence[str]) -> Sequence[Sequence[int | None]]:
        return tokens_of(self.tokenizer, list(texts), self.length)
