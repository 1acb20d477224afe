"""Published weights: from torch's download cache, a download, or a file; the SHA-256 is always checked."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor

from hookdiff import UserError, why_missing
from hookdiff.disk import open_file, open_tensors
from hookdiff.machine import agree, first_rank_does, gathered_or_raised
from hookdiff.options import about

logger = logging.getLogger("hookdiff")
# Help texts for the options of features that have published weights.
ABOUT_FILE = about(
    "file of the weights (.pth or .safetensors); default: the published weights, from torch's download cache"
)
ABOUT_SHA256 = about("SHA-256 of `weights`, for other weights than the published ones")


@define(frozen=True)
class Published:
    """Weights that are published on the web."""

    url: str
    sha256: str  # all digits, or the known first digits
    names: tuple[str, ...] = ()  # other names under which libraries keep this file in torch's cache

    @property
    def path(self) -> Path:
        """The file in torch's cache, under the first name that exists."""
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        files = [folder / name for name in (self.url.rpartition("/")[2], *self.names)]
        return next((file for file in files if file.is_file()), files[0])


@define(frozen=True)
class Weights:
    """Weights that were read from a file."""

    state: dict[str, Tensor]
    sha256: str
    is_published: bool

    def named(self, name: str) -> str:
        """Return the name of a space: `name`, followed, for unpublished weights, by the beginning of their hash."""
        return name if self.is_published else f"{name}-{self.sha256[:8]}"


def read_weights(published: Published, path: str | None, sha256: str | None, who: str) -> Weights:
    """Return the weights in the file `path`; None: the published weights, which are downloaded if necessary.

    A file must have the published SHA-256, or the given `sha256`. `who` begins the messages. Raises UserError for a
    file that is missing or has another SHA-256, with the way to get it.
    """
    file = Path(path).expanduser() if path else published.path
    if path is None and agree(not file.is_file()):  # ranks on several machines may have several caches
        first_rank_does(lambda: _fetch(published, file, who))
        gathered_or_raised(lambda: _fetch(published, file, who))
    try:
        with open_file(file) as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        reason = error.strerror if file.exists() else why_missing(file)
        raise UserError(f"{who}: {file}: {reason}") from None
    is_published = digest.startswith(published.sha256)
    if not is_published and digest != sha256:
        expected = sha256 or published.sha256
        way_out = (
            f"to use this file all the same, set sha256 = {digest!r} (for hookdiff fid: --feature-sha256)"
            if path
            else "remove the file, so that it is downloaded again"
        )
        raise UserError(f"{who}: {file} has the SHA-256 {digest}, expected {expected}: {way_out}")
    return Weights(_load(file, who), digest, is_published)


def _fetch(published: Published, file: Path, who: str) -> None:
    """Download the file, unless it is here; raises UserError if that fails."""
    if file.is_file():
        return
    logger.info("%s: downloading %s to %s", who, published.url, file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(published.url, str(file), hash_prefix=published.sha256)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{who}: the weights cannot be downloaded ({error}); on a machine with a network, download {published.url} "
            f"to {file}, or set weights = FILE (for hookdiff fid: --feature-weights FILE)"
            "\n  Without a download: features 'digits' for grey images of 8 x 8, 'fashion-mnist' for those of 28 x 28."
        ) from None


def _load(file: Path, who: str) -> dict[str, Tensor]:
    """Return the tensors in a .safetensors or .pth file; from a .pth, only tensors are unpickled."""
    try:
        if file.suffix == ".safetensors":
            with open_tensors(file) as tensors:
                return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{who}: {file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # unpicklers and zipfile raise many kinds on files of another format
        raise UserError(f"{who}: {file} is not a .safetensors or .pth of tensors; name a file of weights") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{who}: {file} holds a {type(state).__name__}, expected tensors by name")
    return state
