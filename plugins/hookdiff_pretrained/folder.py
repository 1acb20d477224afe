"""The folder of a network of diffusers: its class, its config and its weights. Nothing in it is run."""

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import define
from torch import nn

from hookdiff import UserError, nearest
from hookdiff.disk import INDEX, Weights
from hookdiff.encoding import file_in, table_in, weights_in
from hookdiff.options import structured

KEY = "model.path"
CONFIG, PIPELINE = "config.json", "model_index.json"
_USUAL = "diffusion_pytorch_model.safetensors"
_NETWORKS = ("unet", "transformer")  # folders of a pipeline


@define(frozen=True)
class NetworkFolder:
    """A folder with config.json and weights, and the class that it names."""

    path: Path
    config: Mapping[str, Any]
    kind: type[nn.Module]
    pipeline: Path | None  # the folder of the pipeline, if that was named

    @classmethod
    def at(cls, path: Path) -> "NetworkFolder":
        """Find the network at `path`, a folder of a network or of a pipeline.

        Raises:
            UserError: if there is no network of a class of diffusers.
        """
        if path.is_file():
            raise UserError(
                f"{KEY}: {path} is a file, expected a folder of diffusers; to make one of a single file:\n"
                f'  diffusers.StableDiffusionPipeline.from_single_file("{path}").save_pretrained("FOLDER")'
            )
        inner = path
        if path.is_dir() and not file_in(path, CONFIG, KEY) and file_in(path, PIPELINE, KEY):
            inner = next((path / name for name in _NETWORKS if (path / name).is_dir()), path)
        config = table_in(inner, CONFIG, "network of diffusers", lambda table: "_class_name" in table, KEY)
        return cls(inner, config, _class_of(config, inner / CONFIG), None if inner == path else path)

    def arguments(self) -> dict[inspect.Parameter, Any]:
        """Return the arguments of the class, with their values.

        Some types of diffusers are wrong, such as `int | tuple[int]` for a list of any length. An argument with a type
        that its own value does not fit has none.
        """
        known = inspect.signature(self.kind).parameters.values()
        values = {each: self.config.get(each.name, each.default) for each in known if each.kind is not each.VAR_KEYWORD}
        return {each if _fits(each, value) else each.replace(annotation=Any): value for each, value in values.items()}

    def weights(self) -> Weights:
        """Find the weights: by their index, else in the usual file, else in the only one.

        Raises:
            UserError: if the folder has no weights in safetensors, or several files to choose from.
        """
        return weights_in(self.path, (_USUAL.removesuffix(".safetensors") + INDEX, _USUAL), KEY)


def _fits(argument: inspect.Parameter, value: Any) -> bool:
    try:
        structured(argument.annotation, value)
    except ValueError:
        return False
    return True


def _class_of(config: Mapping[str, Any], where: Path) -> type[nn.Module]:
    if find_spec("diffusers") is None:
        raise UserError(f"{KEY}: a network of diffusers needs a package: pip install 'hookdiff[diffusers]'")
    import diffusers

    name = config.get("_class_name")
    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(kind) and issubclass(kind, diffusers.ModelMixin)):
        networks = [each for each in dir(diffusers) if each.endswith(("Model", "Transformer2DModel"))]
        expected = f"a network of diffusers{nearest(str(name), networks)}"
        raise UserError(f"{KEY}: {where}: _class_name = {name!r}; expected {expected}")
    network: Any = kind
    found: type[nn.Module] = network
    return found
