"""The text side of a pipeline of diffusers: `[data.encode.text] use = "pipeline"`."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import define, evolve, field
from attrs.validators import ge, in_, optional
from torch import Tensor

from hookdiff import UserError, listed
from hookdiff.disk import Weights, local_path
from hookdiff.encoding import ExportedTexts, TextEncoder, digest_seen, refused_as, table_in, usual_files
from hookdiff.options import about
from hookdiff_text.folder import (
    CONFIG,
    USUAL,
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

_TOKENIZERS = (
    *("CLIPTokenizer", "CLIPTokenizerFast", "T5Tokenizer", "T5TokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast"),
    *("PreTrainedTokenizerFast", "TokenizersBackend"),
)


@define(frozen=True)
class _Side:
    """The text side of a class of pipelines."""

    encoders: tuple[str, ...]  # classes of text_encoder, text_encoder_2 and so on
    # By the suffix of a condition's name: the network's keyword for the condition, and its positions in the result of
    # `encode_prompt`, first for the prompts, then for the empty prompt.
    returned: Mapping[str, tuple[str, int, int]]
    time_ids: bool = False  # whether the network also gets the sizes and the crop of a picture
    length: int | None = None  # default of the pipeline's argument `max_sequence_length`; None: no such argument
    lowers: bool = False  # whether the pipeline turns texts to lower case


_EMBEDDED = ("encoder_hidden_states", 0, 1)
_MASKED = {"": ("encoder_hidden_states", 0, 2), "_mask": ("encoder_attention_mask", 1, 3)}
_SIDES = {
    "StableDiffusionPipeline": _Side(("CLIPTextModel",), {"": _EMBEDDED}),
    "StableDiffusionXLPipeline": _Side(
        ("CLIPTextModel", "CLIPTextModelWithProjection"),
        {"": _EMBEDDED, "_pooled": ("added_cond_kwargs.text_embeds", 2, 3)},
        time_ids=True,
    ),
    "StableDiffusion3Pipeline": _Side(
        ("CLIPTextModelWithProjection", "CLIPTextModelWithProjection", "T5EncoderModel"),
        {"": _EMBEDDED, "_pooled": ("pooled_projections", 2, 3)},
        length=256,
    ),
    "SanaPipeline": _Side(("Gemma2Model",), _MASKED, length=300, lowers=True),
    "PixArtAlphaPipeline": _Side(("T5EncoderModel",), _MASKED, length=120, lowers=True),
    "PixArtSigmaPipeline": _Side(("T5EncoderModel",), _MASKED, length=300, lowers=True),
}


def _is_known(index: Mapping[str, Any]) -> bool:
    return index.get("_class_name") in list(_SIDES)


@define(frozen=True)
class _Part:
    """A text encoder of a pipeline with its tokenizer."""

    kind: str
    folder: Path
    tokenizer_kind: str
    tokenizer_folder: Path
    limit: int  # most tokens of a caption


@define(frozen=True)
class Pipeline(TextEncoder):
    """The text encoders and tokenizers of a pipeline of diffusers, joined by its own `encode_prompt`."""

    path: str = field(metadata=about("folder of the pipeline, with model_index.json, or `hub:ORG/NAME`"))
    length: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=about("tokens of a caption, the pipeline's max_sequence_length; default: that of the pipeline"),
    )
    precision: Literal["float32", "bf16"] = field(
        default="float32", validator=in_(("float32", "bf16")), metadata=about("dtype of the networks")
    )

    @property
    def folder(self) -> Path:
        return local_path(self.path, "data.encode")

    def index(self) -> dict[str, Any]:
        """Read model_index.json.

        Raises:
            UserError: if there is no such file, or its class is not in `_SIDES`.
        """
        index = table_in(self.folder, "model_index.json", "pipeline of diffusers", _is_known)
        if not _is_known(index):
            name = index.get("_class_name")
            raise UserError(f"data.encode: {self.path} holds a {name}; expected {listed(list(_SIDES), len(_SIDES))}")
        return index

    def parts(self) -> list[_Part]:
        """Return the text encoders, in order.

        Raises:
            UserError: for an encoder that is missing or of an unknown class, and for a wrong `length`.
        """
        index = self.index()
        side = _SIDES[index["_class_name"]]
        if self.length and not side.length:
            raise UserError(f"data.encode: leave out length: the tokenizer of a {index['_class_name']} sets it")
        return [
            self._part(index, suffix, kind, self.length or side.length)
            for suffix, kind in zip(("", "_2", "_3"), side.encoders, strict=False)
        ]

    def _part(self, index: Mapping[str, Any], suffix: str, kind: str, limit: Any) -> _Part:
        folders, kinds = [], []
        for name, known in ((f"text_encoder{suffix}", (kind,)), (f"tokenizer{suffix}", _TOKENIZERS)):
            match index.get(name):
                case ["transformers", str(class_name)] if class_name in known:
                    folders.append(self.folder / name)
                    kinds.append(class_name)
                case entry:
                    expected = f"{listed(known, len(known))} of transformers"
                    raise UserError(f"data.encode: the {name} of {self.path} is {entry}; expected {expected}")
        if not has_tokenizer(folders[1]):
            raise UserError(f"data.encode: {folders[1]} has no tokenizer: save the whole pipeline again")
        where = "length"
        if kind.startswith("CLIP"):
            limit = table_in(folders[1], "tokenizer_config.json", "tokenizer").get("model_max_length")
            where = f"{folders[1] / 'tokenizer_config.json'}: model_max_length"
        config = table_in(folders[0], CONFIG, "model of transformers")
        most = count_in(config, "max_position_embeddings", folders[0] / CONFIG) or limit
        if not (type(limit) is int and 1 <= limit <= most):
            raise UserError(f"data.encode: {where} = {limit}: set at most {most}, the tokens of {folders[0]}")
        return _Part(kind, folders[0], kinds[1], folders[1], limit)

    @property
    def limit(self) -> int:
        """The number of tokens to which the first tokenizer truncates."""
        return min(part.limit for part in self.parts())

    @property
    def time_ids(self) -> bool:
        return _SIDES[self.index()["_class_name"]].time_ids

    @property
    def keywords(self) -> dict[str, str]:
        side = _SIDES[self.index()["_class_name"]]
        named = {suffix: keyword for suffix, (keyword, *_) in side.returned.items()}
        return named | ({"_time_ids": "added_cond_kwargs.time_ids"} if side.time_ids else {})

    def digest(self) -> str:
        index, weights, files = self.index(), list[Weights](), list[Path]()
        facts: list[Any] = [index["_class_name"], _flags(index), self.precision]
        for part in self.parts():
            config = table_in(part.folder, CONFIG, "model of transformers")
            facts += [part.tokenizer_kind, part.limit, config]
            weights.append(network_weights(part.folder, config))
            tokenizer_paths = tokenizer_files(part.tokenizer_folder)
            facts.append(len(tokenizer_paths))
            files += tokenizer_paths
        return digest_seen(weights, files, json.dumps(facts, sort_keys=True))

    def open(self, device: torch.device) -> _Network:
        index, parts = self.index(), self.parts()
        name = index["_class_name"]
        side = _SIDES[name]
        keywords = ", ".join(f'"{keyword}" = "NAME{suffix}"' for suffix, keyword in self.keywords.items())
        logger.info("data.encode: the text side of the %s in %s, for conditions = { %s }", name, self.path, keywords)
        components: dict[str, Any] = {}
        for part in parts:
            components[part.folder.name] = network_in(part.folder, part.kind, device, self.precision)
            components[part.tokenizer_folder.name] = tokenizer_in(part.tokenizer_folder, part.tokenizer_kind)
        with refused_as(f"{self.path} cannot be loaded"):
            import diffusers

            kind = getattr(diffusers, name)
            for where in (kind.__module__, "transformers.tokenization_utils_base"):
                logging.getLogger(where).setLevel(logging.ERROR)  # the run itself counts truncated captions
            # Not by `from_pretrained` of the pipeline, which in some versions imports a file of the folder.
            taken, flags = inspect.signature(kind).parameters, _flags(index)
            others = {key: flags.get(key) for key, each in taken.items() if key in flags or each.default is each.empty}
            pipeline = kind(**{**others, **components})
        given = {"num_images_per_prompt": 1, **{f"prompt_{number}": None for number in range(2, len(parts) + 1)}}
        if side.length:
            given["max_sequence_length"] = self.length or side.length
        tokenizers = [(components[part.tokenizer_folder.name], part.limit) for part in parts]
        pairs = [(components[part.folder.name], components[part.tokenizer_folder.name]) for part in parts]
        return _Network(side, pipeline, components, others, given, pairs, tokenizers, device)

    def to_diffusers(self, name: str, folder: str) -> ExportedTexts:
        opened = evolve(self, precision="float32").open(torch.device("cpu"))
        kind, parts = type(opened.pipeline).__name__, opened.parts
        code = "".join(
            f"{each} = {type(part).__name__}.from_pretrained({folder!r}, subfolder={each!r})\n"
            for each, part in parts.items()
        )
        taken = [f"{each}={value!r}" for each, value in opened.others.items() if each not in parts]
        code += f"pipeline = {kind}({', '.join([*taken, *(f'{each}={each}' for each in parts)])})\n"
        given = {"device": "cpu", "do_classifier_free_guidance": True, **opened.given}
        asked = ", ".join(f"{each}={value!r}" for each, value in given.items())
        code += f"made = pipeline.encode_prompt(prompts, {asked})\n"
        conditions = {}
        for suffix, (_, prompted, unprompted) in opened.side.returned.items():
            as_bool = ".bool()" * (suffix == "_mask")
            conditions[name + suffix] = f"made[{prompted}]{as_bool}", f"made[{unprompted}]{as_bool}"
        files: dict[str, Mapping[str, Path]] = {}
        for part in self.parts():
            config = table_in(part.folder, CONFIG, "model of transformers")
            weights = usual_files(network_weights(part.folder, config), USUAL)
            files[part.folder.name] = {CONFIG: part.folder / CONFIG, **weights}
            files[part.tokenizer_folder.name] = {path.name: path for path in tokenizer_files(part.tokenizer_folder)}
        return ExportedTexts(parts, code, conditions, kind, files)


def _flags(index: Mapping[str, Any]) -> dict[str, bool]:
    """Return the options of the pipeline itself, such as `force_zeros_for_empty_prompt`."""
    return {name: value for name, value in index.items() if isinstance(value, bool)}


@define(eq=False)
class _Network:
    side: _Side
    pipeline: Any
    parts: Mapping[str, Any]  # the networks and tokenizers of the pipeline
    others: Mapping[str, Any]  # other arguments of the pipeline
    given: Mapping[str, Any]  # arguments of `encode_prompt`
    pairs: Sequence[tuple[Any, Any]]  # each network and its tokenizer
    tokenizers: Sequence[tuple[Any, int]]  # each with the number of tokens to which it truncates
    device: torch.device

    def encode(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        taken = self._taken(texts)
        for network, tokenizer in self.pairs:  # otherwise a token without an embedding would end in a traceback
            check_tokens(network, tokenizer, tokenized(tokenizer, taken, verbose=False)["input_ids"])
        is_empty = torch.tensor([not text for text in texts])
        with torch.no_grad():
            made = self.pipeline.encode_prompt(
                list(texts), device=self.device, do_classifier_free_guidance=bool(is_empty.any()), **self.given
            )
        outputs = {}
        for name, (_, prompted, unprompted) in self.side.returned.items():
            rows = made[prompted].cpu()
            if is_empty.any():
                rows[is_empty] = made[unprompted].cpu()[is_empty]
            outputs[name] = rows.bool() if name == "_mask" else rows.float()
        return outputs

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        taken, first = self._taken(texts), min(limit for _, limit in self.tokenizers)
        lengths = (lengths_of(tokenizer, taken) for tokenizer, limit in self.tokenizers if limit == first)
        return [max(all_of) for all_of in zip(*lengths, strict=True)]

    def tokens(self, texts: Sequence[str]) -> Sequence[Sequence[int | None]]:
        rows = (tokens_of(tokenizer, self._taken(texts), limit) for tokenizer, limit in self.tokenizers)
        return [list(chain.from_iterable(all_of)) for all_of in zip(*rows, strict=True)]

    def _taken(self, texts: Sequence[str]) -> list[str]:
        return [text.lower().strip() if self.side.lowers else text for text in texts]
