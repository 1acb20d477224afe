"""Encodes captions by a text encoder of transformers: `[data.encode.text] use = "text"`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import define, field
from attrs.validators import ge, in_, optional
from torch import Tensor

from hookdiff import UserError, listed, why_missing
from hookdiff.authors import EncodedTexts, TextEncoder, digest_of
from hookdiff.disk import read_file
from hookdiff.options import about

logger = logging.getLogger("hookdiff")

# The class that opens a folder, by the one in its `architectures`. A file can name no other.
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
_OF_TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_USUAL = 128  # tokens of an encoder that takes more


@define(frozen=True)
class Text(TextEncoder):
    """A frozen text encoder in a folder, as transformers saves it, with its tokenizer: CLIP, T5, BERT and others."""

    path: str = field(
        metadata=about(
            "folder with config.json, the weights in safetensors, and the tokenizer, which may also be in the folder "
            "`tokenizer` beside it"
        )
    )
    length: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=about("tokens of a caption, to which it is filled or cut; unless given, what it takes, at most 128"),
    )
    layer: int = field(
        default=-1,
        metadata=about(
            "layer whose output is taken: -1 is the last, with its final norm; -2 the one before, without it"
        ),
    )
    attend: Literal["all", "tokens"] | None = field(
        default=None,
        validator=optional(in_(("all", "tokens"))),
        metadata=about(
            'what a token attends to: "all" positions, or the "tokens" of the caption; unless given, "all" for a CLIP, '
            "as Stable Diffusion calls it"
        ),
    )
    pooled: bool = field(default=False, metadata=about("also make NAME_pooled, one vector for a caption"))
    mask: bool = field(default=False, metadata=about("also make NAME_mask, which tokens are of the caption"))
    precision: Literal["float32", "bf16"] = field(
        default="float32", validator=in_(("float32", "bf16")), metadata=about("dtype of the network")
    )

    @property
    def folder(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer; of `text_encoder_2` beside it, `tokenizer_2`.

        Raises:
            UserError: if there is none.
        """
        name = self.folder.resolve().name
        beside = self.folder.resolve().parent / name.replace("text_encoder", "tokenizer")
        for folder in (self.folder, beside, self.folder.resolve().parent / "tokenizer"):
            if any((folder / file).is_file() for file in _OF_TOKENIZER):
                return folder
        raise UserError(f"data.encode: {self.path} has no tokenizer, and there is none in {beside}")

    def config(self) -> dict[str, Any]:
        """Read config.json.

        Raises:
            UserError: if there is none, or not of a class that is known here.
        """
        if not self.folder.is_dir():
            raise UserError(f"data.encode: {self.path}: {why_missing(self.folder) or 'no such folder'}")
        file = self.folder / "config.json"
        if not file.is_file():
            raise UserError(f"data.encode: {self.path} has no {file.name}, so it is no model of transformers")
        try:
            config = json.loads(read_file(file))
            (name,) = config["architectures"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"data.encode: {file} names no class of transformers in `architectures`") from None
        if name not in _CLASSES:
            raise UserError(
                f"data.encode: {self.path} holds a {name}; expected {listed(list(_CLASSES), len(_CLASSES))}"
            )
        return dict(config)

    @property
    def limit(self) -> int | None:
        config = self.config()
        config = {**config, **config.get("text_config", {})}
        most = config.get("max_position_embeddings")
        if "oberta" in config["architectures"][0]:
            most = most and most - 2  # its positions begin after that of the padding
        if self.length is None:
            return min(most or _USUAL, _USUAL)
        if most and self.length > most:
            raise UserError(f"data.encode: length = {self.length} is above the {most} positions of {self.path}")
        return self.length

    def digest(self) -> str:
        config, weights = self.config(), sorted(self.folder.glob("*.safetensors"))
        if not weights:
            pickled = [path.name for pattern in _PICKLES for path in self.folder.glob(pattern)]
            found = f"; {pickled[0]} is a pickle, which may run code: save it as safetensors" if pickled else ""
            raise UserError(f"data.encode: {self.path} has no weights in safetensors{found}")
        known = (*_OF_TOKENIZER, "tokenizer_config.json", "special_tokens_map.json")
        files = [self.tokenizer_folder / name for name in known]
        options = (self.limit, self.layer, self.attend, self.pooled, self.mask, self.precision)
        text = json.dumps([config, options], sort_keys=True)
        return digest_of([*weights, *(file for file in files if file.is_file())], text)

    def open(self, device: torch.device) -> EncodedTexts:
        import transformers

        kind = _CLASSES[self.config()["architectures"][0]]
        tokenizer, limit = self.tokenizer_folder, self.limit
        logger.info("data.encode: the %s in %s, with the tokenizer in %s", kind, self.folder, tokenizer)
        show: Any = transformers.utils.logging
        had_bar = show.is_progress_bar_enabled()
        show.disable_progress_bar()  # it would be drawn into the lines of the run
        try:
            network = getattr(transformers, kind).from_pretrained(
                str(self.folder), local_files_only=True, use_safetensors=True
            )
            tokens = transformers.AutoTokenizer.from_pretrained(
                str(tokenizer), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # of any type, for a file that does not fit
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"data.encode: {self.path} cannot be loaded: {reason}") from None
        finally:
            if had_bar:
                show.enable_progress_bar()
        if tokens.pad_token_id is None:
            raise UserError(f"data.encode: the tokenizer in {tokenizer} has no token to fill captions with (pad_token)")
        network = network.to(device, torch.bfloat16 if self.precision == "bf16" else torch.float32)
        attend = self.attend or ("all" if kind.startswith("CLIP") else "tokens")
        return _Network(self, network.eval().requires_grad_(False), tokens, limit or _USUAL, attend == "tokens")


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
        tokens = self.tokenizer(list(texts), **filled, return_tensors="pt")
        ids, mask = tokens["input_ids"].to(device), tokens["attention_mask"].to(device)
        layered = {} if options.layer == -1 else {"output_hidden_states": True}
        with torch.no_grad():
            made = self.network(input_ids=ids, attention_mask=mask if self.is_masked else None, **layered)
        found = {"": made.last_hidden_state if options.layer == -1 else self._layer(made.hidden_states)}
        if options.pooled:
            pooled = made.get("text_embeds", made.get("pooler_output"))
            if pooled is None:
                raise UserError(f"data.encode: pooled: a {type(self.network).__name__} has no vector for a caption")
            found["_pooled"] = pooled
        found = {name: rows.float().cpu() for name, rows in found.items()}
        return {**found, **({"_mask": mask.bool().cpu()} if options.mask else {})}

    def _layer(self, states: Sequence[Tensor]) -> Tensor:
        layer = self.options.layer
        if not -len(states) <= layer < len(states):
            raise UserError(f"data.encode: layer = {layer}: expected {-len(states)} to {len(states) - 1}")
        return states[layer]

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        return [len(one) for one in self.tokenizer(list(texts), verbose=False)["input_ids"]]
