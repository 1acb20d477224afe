"""The plugin `aim`. It copies metrics.jsonl and samples/, so its repository can be deleted."""

import atexit
import importlib
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, field
from attrs.validators import matches_re, optional
from filelock import FileLock, Timeout

from hookdiff import Loop, Sink, TrackedRun, UserError
from hookdiff.distribution import Distribution
from hookdiff.events import Event
from hookdiff.options import about
from hookdiff.pictures import Picture

log = logging.getLogger("hookdiff")


@define(frozen=True)
class AimState:
    """The saved state of `Aim`."""

    run: str | None = field(validator=optional(matches_re("[0-9a-f]+")))


@define(eq=False)
class Aim(Sink):
    """Tracks metrics, pictures, histograms, texts, events and the config in Aim; look at them with `aim up --repo DIR`.

    A resumed run goes on in the same Aim run, where the values of repeated steps replace the old ones. A run that is
    resumed into another directory gets an Aim run of its own.
    """

    state_class: ClassVar[type] = AimState
    needs: ClassVar[Mapping[str, str]] = {"aim": "hookdiff[aim]"}

    repo: str | None = field(
        default=None, metadata=about("repository, a folder or aim://HOST:PORT; without it beside the run directory")
    )
    experiment: str | None = field(default=None, metadata=about('experiment in Aim; without it "default"'))
    name: str | None = field(default=None, metadata=about("name of the run in Aim; without it the run directory's"))
    system_stats: bool = field(default=False, metadata=about("also record the load of the machine, on a thread"))
    console: bool = field(default=False, metadata=about("also record what is printed, on a thread"))
    _run: Any = field(init=False, default=None)
    _hash: str | None = field(init=False, default=None)  # Aim's identifier of the run

    def check(self, loop: Loop) -> None:
        try:
            _aim()
        except ImportError as error:
            way_out = "pip install 'hookdiff[aim]' (Aim has packages for Python up to 3.12)"
            raise UserError(f"the plugin 'aim' needs the package aim: {way_out}; {error}") from error

    def open(self, run: TrackedRun) -> None:
        folder = self._folder(run)
        if "://" not in folder:
            _create(folder)
        if self._run is None:  # otherwise this is the repetition of a call that failed further down
            self._run = _open(folder, None if run.is_branch else self._hash, self._options())
            self._hash = self._run.hash
        if name := self.name or (run.run_dir and run.run_dir.name):
            self._run.name = name
        if run.hparams:
            self._run["hparams"] = dict(run.hparams)
        if run.run_dir:
            self._run["run_dir"] = str(run.run_dir.resolve())  # by which `clear` finds it

    def clear(self, run: TrackedRun) -> None:
        folder = self._folder(run)
        if "://" not in folder:
            _create(folder)
        repo = _aim().Repo.from_path(folder)
        mine = [
            one.hash for one in repo.iter_runs() if run.run_dir and one.get("run_dir") == str(run.run_dir.resolve())
        ]
        if mine:
            repo.delete_runs(mine)

    def _folder(self, run: TrackedRun) -> str:
        return self.repo or str(run.run_dir.parent if run.run_dir else ".")

    def _options(self) -> dict[str, Any]:
        # Aim's own defaults patch stdout and start a thread that watches the machine.
        interval = 10 if self.system_stats else None
        return {
            "experiment": self.experiment,
            "system_tracking_interval": interval,
            "capture_terminal_logs": self.console,
        }

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._run.track(dict(values), step=step)

    def images(self, step: int, time: float, images: Mapping[str, Picture]) -> None:
        aim = _aim()
        for name, picture in images.items():
            self._run.track(aim.Image(picture.as_pillow()), name=name, step=step)

    def texts(self, step: int, time: float, texts: Mapping[str, str]) -> None:
        aim = _aim()
        for name, text in texts.items():
            self._run.track(aim.Text(text), name=name, step=step)

    def distributions(self, step: int, time: float, distributions: Mapping[str, Distribution]) -> None:
        aim = _aim()
        for name, found in distributions.items():
            histogram = aim.Distribution(hist=list(found.counts), bin_range=(found.low, found.high))
            self._run.track(histogram, name=name, step=step)

    def event(self, step: int, time: float, event: Event) -> None:
        self._run.track(_aim().Text(event.text), name="events", step=step, context={"kind": event.kind})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def is_transient(self, error: Exception) -> bool:
        """Return whether a call is repeated; "OperationalError" is SQLite's for a database that is locked."""
        return super().is_transient(error) or type(error).__name__ == "OperationalError"

    def state_dict(self) -> dict[str, Any]:
        """Return the hash of the Aim run."""
        return {"run": self._hash}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the saved Aim run."""
        if self._run is None:  # otherwise this is a rollback
            self._hash = state["run"]


def _aim() -> Any:
    with warnings.catch_warnings():
        # Aim calls a function that SQLAlchemy 2 has moved.
        warnings.filterwarnings("ignore", "The ``declarative_base")
        aim = importlib.import_module("aim")
    # At exit Aim closes its runs on a new thread; from Python 3.12 on, no thread can be started at that time.
    last = importlib.import_module("aim.ext.cleanup").AutoClean
    for close in (last.cleanup, last._cleanup):
        atexit.unregister(close)
    last._registered_with_atexit = True
    atexit.register(last._cleanup)
    return aim


def _create(folder: str) -> None:
    """Make the repository if it does not exist; a lock keeps two processes from breaking it."""
    repo, missing = _aim().Repo, (0, 0)  # the version is written last
    if repo.get_version(folder) == missing:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with FileLock(Path(folder, ".aim-create.lock")):
            if repo.get_version(folder) == missing:
                repo.from_path(folder, init=True)


def _open(folder: str, run_hash: str | None, options: Mapping[str, Any]) -> Any:
    aim = _aim()
    if run_hash is not None:
        # Aim caches its list of runs for half a second, so a run that was just made may be missing.
        aim.Repo._all_run_hashes.cache_clear()
    try:
        return aim.Run(run_hash, repo=folder, **options)
    except aim.sdk.errors.MissingRunError:
        log.warning("Aim has lost the run %s in %s; a new one begins with this step", run_hash, folder)
        return aim.Run(repo=folder, **options)
    except Timeout:
        # A process that was killed on another machine has left its lock; the checkpoint shows that the run is ours.
        return aim.Run(run_hash, repo=folder, force_resume=True, **options)
