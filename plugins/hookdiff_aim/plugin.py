"""The plugin `aim`. What it writes is a mirror of metrics.jsonl and samples/: it can be thrown away."""

from __future__ import annotations

import atexit
import importlib
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, field
from filelock import FileLock, Timeout
from torch import Tensor

from hookdiff import Loop, Sink, UserError

log = logging.getLogger("hookdiff")


@define(eq=False)
class Aim(Sink):
    """Tracks metrics, pictures and the config in an Aim repository; look at them with `aim up --repo DIR`.

    A resumed run goes on in the same Aim run, where values of steps made again replace the old ones. One that goes on
    in another directory has an Aim run of its own.
    """

    needs: ClassVar[Mapping[str, str]] = {"aim": "hookdiff[aim]"}

    repo: str | None = None  # a folder or aim://HOST:PORT; None: the folder that the run directory is in
    experiment: str | None = None  # None: Aim's "default"
    name: str | None = None  # of the run; None: the run directory's
    _run: Any = field(init=False, default=None)
    _hash: str | None = field(init=False, default=None)  # of the Aim run, chosen by Aim

    def check(self) -> None:
        try:
            _aim()
        except ImportError as error:
            way_out = "pip install 'hookdiff[aim]' (Aim has packages for Python up to 3.12)"
            raise UserError(f"the plugin 'aim' needs the package aim: {way_out}; {error}") from error

    def open(self, loop: Loop) -> None:
        folder = self.repo or str(loop.run_dir.parent if loop.run_dir else ".")
        if "://" not in folder:
            _create(folder)
        if loop.is_branch:
            self._hash = None
        self._run = _open(folder, self._hash, self.experiment)
        self._hash = self._run.hash
        if name := self.name or (loop.run_dir and loop.run_dir.name):
            self._run.name = name
        if loop.hparams:
            self._run["hparams"] = dict(loop.hparams)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.track(dict(values), step=step)

    def images(self, step: int, images: Mapping[str, Tensor]) -> None:
        from PIL import Image

        aim = _aim()
        # Aim takes tensors too, but eight times slower and without a clamp.
        for name, pictures in images.items():
            arrays = [picture.squeeze(-1).numpy() for picture in pictures.permute(0, 2, 3, 1)]
            self._run.track([aim.Image(Image.fromarray(array)) for array in arrays], name=name, step=step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def state_dict(self) -> dict[str, Any]:
        """Return which Aim run this is."""
        return {"run": self._hash}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the same Aim run."""
        if self._run is None:  # else this is a rollback
            self._hash = state["run"]


def _aim() -> Any:
    with warnings.catch_warnings():
        # Aim calls a function that SQLAlchemy 2 has moved.
        warnings.filterwarnings("ignore", "The ``declarative_base")
        aim = importlib.import_module("aim")
    # At exit Aim closes what is open on a thread of its own, and from Python 3.12 on none can be started then.
    last = importlib.import_module("aim.ext.cleanup").AutoClean
    for close in (last.cleanup, last._cleanup):
        atexit.unregister(close)
    last._registered_with_atexit = True
    atexit.register(last._cleanup)
    return aim


def _create(folder: str) -> None:
    """Make the repository if it is not there; two processes that both do break it."""
    repo = _aim().Repo

    def is_there() -> bool:
        return bool(repo.get_version(folder) != (0, 0))  # written last

    if not is_there():
        Path(folder).mkdir(parents=True, exist_ok=True)
        with FileLock(Path(folder, ".aim-create.lock")):
            if not is_there():
                repo.from_path(folder, init=True)


def _open(folder: str, run_hash: str | None, experiment: str | None) -> Any:
    aim = _aim()
    # Otherwise Aim patches stdout and starts a thread that watches the machine.
    options = {"experiment": experiment, "system_tracking_interval": None, "capture_terminal_logs": False}
    if run_hash is not None:
        # Aim keeps its list of runs for half a second; to that list, a run made since then does not exist.
        aim.Repo._all_run_hashes.cache_clear()
    try:
        return aim.Run(run_hash, repo=folder, **options)
    except aim.sdk.errors.MissingRunError:
        log.warning("Aim has lost the run %s in %s; a new one begins with this step", run_hash, folder)
        return aim.Run(repo=folder, **options)
    except Timeout:
        # Left by a process that was killed on another machine: the run is ours, its checkpoint says so.
        return aim.Run(run_hash, repo=folder, force_resume=True, **options)
