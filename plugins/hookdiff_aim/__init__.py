"""Tracks runs in Aim. All values are in the run directory, too, so the Aim repository can be deleted."""

import atexit
import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from attrs import define, field
from attrs.validators import ge, matches_re, optional
from filelock import FileLock, Timeout

from hookdiff import Loop, Sink, TrackedRun, UserError, plugin
from hookdiff.authors import Call, earlier
from hookdiff.disk import own_files
from hookdiff.log import Distribution, Event, Picture
from hookdiff.machine import safe_path
from hookdiff.options import Writes, about

logger = logging.getLogger("hookdiff")

_IS_FILLED = "is_filled"  # attribute of the Aim runs of hookdiff: false until they have all earlier steps


@define(frozen=True)
class AimState:
    """The saved state of `Aim`."""

    run: str | None = field(validator=optional(matches_re("[0-9a-f]+")))


# Even with a safe path, alembic would look for modules in the working directory, so leave that directory.
_UPGRADE = """import os, sys
os.chdir(os.path.dirname(sys.argv[2]))
from alembic.config import main
main(sys.argv[1:])"""


@contextmanager
def _safe_upgrades() -> Iterator[None]:
    """Keep the process that makes or upgrades a repository from importing modules of the working directory."""
    _aim()
    utils: Any = importlib.import_module("aim.storage.migrations.utils")
    words_of = utils.create_migration_cmd

    def words() -> list[str]:
        python, _, _, *rest = words_of()  # python -m alembic -c FILE ...
        return [python, "-c", _UPGRADE, *rest]

    utils.create_migration_cmd = words
    try:
        with safe_path():
            yield
    finally:
        utils.create_migration_cmd = words_of


@plugin(needs={"aim": "hookdiff[aim]"})
@define(eq=False)
class Aim(Sink):
    """Tracks metrics, pictures, histograms, texts, events and the config in Aim; look at them with `aim up --repo DIR`.

    A resumed run continues the same Aim run. After a crash, the Aim run may lack earlier steps, or have steps that the
    run repeats. Then a new Aim run replaces the old one, with the earlier steps from the run directory. A run that is
    resumed into another directory gets a new Aim run, too.
    """

    repo: Annotated[str | None, Writes()] = field(
        default=None, metadata=about("repository, a folder or aim://HOST:PORT; default: beside the run directory")
    )
    experiment: str | None = field(default=None, metadata=about('experiment in Aim; default: "default"'))
    name: str | None = field(default=None, metadata=about("name of the run in Aim; default: name of the run directory"))
    system_tracking_interval: float | None = field(
        default=None,
        validator=optional(ge(0)),
        metadata=about("time between two records of CPU, GPU and memory; 0: none; default: none", "seconds"),
    )
    capture_terminal_logs: bool = field(
        default=False, metadata=about("record all text that the process prints; Aim patches stdout and stderr")
    )
    _run: Any = field(init=False, default=None)
    _is_new: bool = field(init=False, default=False)  # the Aim run
    _lines: dict[tuple[int, str], list[str]] = field(init=False, factory=dict)  # of events, by step and kind
    _where: str = field(init=False, default="")
    _hash: str | None = field(init=False, default=None)  # Aim's identifier of the run

    def check(self, loop: Loop) -> None:
        try:
            _aim()
        except ImportError as error:
            way_out = "pip install 'hookdiff[aim]' (Aim has packages for Python up to 3.12)"
            raise UserError(f"the plugin 'aim' needs the package aim: {way_out}; {error}") from error

    @property
    def where(self) -> str:
        return self._where

    def place(self, run: TrackedRun) -> str:
        folder = self._folder(run)
        return folder if "://" in folder else str(Path(folder).resolve())

    @_safe_upgrades()
    def clear(self, run: TrackedRun) -> None:
        folder = self._folder(run)
        if "://" in folder or _aim().Repo.exists(folder):
            repo = _aim().Repo.from_path(folder)
            for run_hash in _mirrors(repo, run.run_dir):
                _delete(repo, run_hash)

    @_safe_upgrades()
    def open(self, run: TrackedRun) -> list[Call] | None:
        folder = self._folder(run)
        if "://" not in folder:
            own_files(Path(folder, ".aim"))
            _create(folder)
        if self._run is None:  # otherwise `open` is called again after a failure further down
            self._run = self._open_run(folder, run)
            self._is_new = self._run.hash != self._hash
            self._hash, self._lines = self._run.hash, {}
            self._where = f"the Aim run {self._hash} in {folder} (aim up --repo {folder})"
        if name := self.name or (run.run_dir and run.run_dir.resolve().name):
            self._run.name = name
        if run.run_dir:
            self._run["run_dir"] = str(run.run_dir.resolve())
        self._run["hparams"] = dict(run.hparams)
        if not self._is_new:
            return None
        calls = earlier(run, self)
        self._run[_IS_FILLED] = not calls
        return calls

    def filled(self) -> None:
        self._run[_IS_FILLED] = True

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._run.track(dict(values), step=step)

    def images(self, step: int, time: float, images: Mapping[str, Picture]) -> None:
        make = _aim().Image
        for name, picture in images.items():
            self._run.track(make(picture.as_pillow()), name=name, step=step)

    def texts(self, step: int, time: float, texts: Mapping[str, str]) -> None:
        make = _aim().Text
        for name, text in texts.items():
            self._run.track(make(text), name=name, step=step)

    def distributions(self, step: int, time: float, distributions: Mapping[str, Distribution]) -> None:
        make = _aim().Distribution
        for name, bins in distributions.items():
            self._run.track(make(hist=bins.counts, bin_range=(bins.low, bins.high)), name=name, step=step)

    def event(self, step: int, time: float, event: Event) -> None:
        # For one name, context and step, Aim keeps only one text, so the lines are joined.
        lines = self._lines.setdefault((step, event.kind), [])
        if event.text not in lines:
            lines.append(event.text)
        self._run.track(_aim().Text("\n".join(lines)), name="events", step=step, context={"kind": event.kind})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def _folder(self, run: TrackedRun) -> str:
        return self.repo or str(run.run_dir.parent if run.run_dir else ".")

    def _open_run(self, folder: str, run: TrackedRun) -> Any:
        """Return the Aim run that this run continues, or a new Aim run."""
        aim = _aim()
        repo, run_hash = aim.Repo.from_path(folder), None if run.is_branch else self._hash
        if run_hash and run_hash not in _hashes(repo):
            mirrors = _mirrors(repo, run.run_dir)  # such as one that `hookdiff mirror` has made
            if not mirrors:
                logger.warning("Aim has lost the run %s in %s; a new one begins", run_hash, folder)
            self._hash = run_hash = mirrors[-1] if mirrors else None
        if run_hash and run.has_earlier_steps and not _goes_on(repo, run_hash, run.step):
            if run_hash in _mirrors(repo, run.run_dir):  # false in a copy of a run directory
                _delete(repo, run_hash)
            run_hash = None
        options = {
            "repo": folder,
            "experiment": self.experiment,
            "system_tracking_interval": self.system_tracking_interval or None,
            "capture_terminal_logs": self.capture_terminal_logs,
        }
        try:
            return aim.Run(run_hash, **options)
        except Timeout:
            # A process that was killed on another machine left its lock; by the checkpoint, the Aim run is of this run.
            return aim.Run(run_hash, force_resume=True, **options)

    def is_transient(self, error: Exception) -> bool:
        """Return whether to repeat a call that raised `error`: as for any sink, and if Aim's database is locked."""
        from sqlalchemy.exc import OperationalError

        return super().is_transient(error) or isinstance(error, OperationalError)

    def state_dict(self) -> dict[str, Any]:
        return {"run": self._hash}

    def load_state_dict(self, state: AimState) -> None:
        if self._run is None:  # otherwise this is a rollback
            self._hash = state.run


def _aim() -> Any:
    with warnings.catch_warnings():
        # Aim calls a function that SQLAlchemy 2 has moved.
        warnings.filterwarnings("ignore", "The ``declarative_base")
        aim = importlib.import_module("aim")
    # At exit Aim closes its runs on a new thread; from Python 3.12 on, no thread can be started at that time.
    cleaner = importlib.import_module("aim.ext.cleanup").AutoClean
    for close in (cleaner.cleanup, cleaner._cleanup):
        atexit.unregister(close)
    cleaner._registered_with_atexit = True
    atexit.register(cleaner._cleanup)
    return aim


def _create(folder: str) -> None:
    """Make the repository if it does not exist; a lock keeps two processes from breaking it."""
    repo, missing = _aim().Repo, (0, 0)  # the version is written last
    if repo.get_version(folder) == missing:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with FileLock(Path(folder, ".aim-create.lock")):
            if repo.get_version(folder) == missing:
                repo.from_path(folder, init=True)


def _hashes(repo: Any) -> list[str]:
    _aim().Repo._all_run_hashes.cache_clear()  # Aim's cached list may be half a second old, and lack a new run
    return sorted(repo.list_all_runs())


def _tree(repo: Any, run_hash: str) -> Any:
    """Return the stored values of an Aim run; `aim.Run` shows no values of a run before Aim has indexed it."""
    return repo.request_tree("meta", run_hash, read_only=True).subtree("meta").subtree("chunks").subtree(run_hash)


def _mirrors(repo: Any, run_dir: Path | None) -> list[str]:
    """Return the hashes of the Aim runs that mirror this run directory."""
    if run_dir is None:
        return []
    place = str(run_dir.resolve())
    return [each for each in _hashes(repo) if _tree(repo, each).subtree("attrs").get("run_dir", None) == place]


def _goes_on(repo: Any, run_hash: str, step: int) -> bool:
    """Return whether an Aim run has all values that were logged up to `step`, and no values of later steps."""
    tree = _tree(repo, run_hash)
    traces = tree.get("traces", {}).values()
    # Aim itself logs the machine's load and the terminal, with steps of its own.
    logged = [(name, trace) for names in traces for name, trace in names.items() if name != "logs"]
    steps = [trace.get("last_step", 0) for name, trace in logged if not name.startswith("__")]
    return bool(tree.subtree("attrs").get(_IS_FILLED, True)) and max(steps, default=0) <= step


def _delete(repo: Any, run_hash: str) -> None:
    if not repo.delete_run(run_hash):
        raise RuntimeError(f"the Aim run {run_hash} in {repo.path} cannot be deleted")
