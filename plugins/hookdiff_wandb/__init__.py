"""Tracks runs in Weights & Biases, with copies of the values in the run directory."""

import atexit
import html
import importlib
import logging
import os
from collections.abc import Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from attrs import define, field
from attrs.validators import ge, optional

from hookdiff import Loop, Sink, TrackedRun, UserError, plugin
from hookdiff.authors import Call, earlier
from hookdiff.disk import folder_in
from hookdiff.log import Distribution, Event, Picture
from hookdiff.options import Connects, Writes, about

logger = logging.getLogger("hookdiff")

_FOLDERS = ("wandb", ".wandb")  # W&B uses the second folder if it exists
_NO_GIT = "WANDB_DISABLE_GIT"  # a variable that W&B reads


@plugin(needs={"wandb": "hookdiff[wandb]"})
@define(eq=False)
class WandB(Sink):
    """Tracks metrics, pictures, texts, histograms and the config in Weights & Biases.

    W&B takes no values of an earlier step. So a resumed or rolled-back run goes on in a new W&B run, which first gets
    the earlier values from the run directory.
    """

    project: str | None = field(
        default=None, metadata=about('project; default: the project in W&B\'s settings, or "uncategorized"')
    )
    entity: str | None = field(default=None, metadata=about("user or team; default: the owner of the key"))
    name: str | None = field(default=None, metadata=about("name of the run; default: the name of the run directory"))
    group: str | None = field(
        default=None,
        metadata=about("group of the run; default: the name of the run directory, which resumed runs share"),
    )
    tags: tuple[str, ...] = field(default=(), metadata=about("tags of the run"))
    mode: Annotated[Literal["online", "offline"] | None, Connects(lambda mode: _is_online(mode))] = field(
        default=None, metadata=about("mode of W&B; default: the mode in W&B's settings, or offline without a key")
    )
    dir: Annotated[str | None, Writes()] = field(
        default=None, metadata=about("folder in which W&B makes its folder `wandb`; default: the run directory")
    )
    system_tracking_interval: float | None = field(
        default=None,
        validator=optional(ge(0)),
        metadata=about("time between two records of CPU, GPU and memory; 0: none; default: none", "seconds"),
    )
    _library: Any = field(init=False, default=None)
    _run: Any = field(init=False, default=None)
    _step: int = field(init=False, default=0)  # step of the newest values
    _lines: dict[tuple[int, str], list[str]] = field(init=False, factory=dict)  # texts of events, by W&B step and kind
    _exit_code: int = field(init=False, default=0)
    _where: str = field(init=False, default="")

    @property
    def where(self) -> str:
        return self._where

    def place(self, run: TrackedRun) -> object:
        """Return an object that equals no other, because each W&B run is new."""
        return object()

    def check(self, loop: Loop) -> None:
        for run_dir in (loop.run_dir, loop.resume):
            _refuse_settings_of(run_dir)
        if (self.mode or os.environ.get("WANDB_MODE")) == "online":
            try:
                self._find_mode()
            except UserError:
                raise
            except Exception as error:  # from W&B itself; `open` then fails too, and warns
                logger.debug("W&B cannot be asked for its key:", exc_info=error)

    def open(self, run: TrackedRun) -> list[Call]:
        _refuse_settings_of(run.run_dir)  # here too, since `hookdiff mirror` does not call `check`
        wandb = _wandb()
        directory = run.run_dir.resolve().name if run.run_dir else None
        folder = Path(self.dir or run.run_dir or ".")
        if run.run_dir and not self.dir:
            for name in _FOLDERS:
                folder_in(run.run_dir, name)
        folder.mkdir(parents=True, exist_ok=True)
        self._library = _set_up()
        atexit.register(self._abandon)
        settings = wandb.Settings(
            console="off",  # otherwise it patches stdout and stderr
            disable_git=True,  # a mirror, which is made later, would show another commit
            disable_code=True,
            x_disable_stats=not self.system_tracking_interval,
            x_stats_sampling_interval=self.system_tracking_interval or 15,
            reinit="create_new",  # does not end a W&B run of the user's own script
            init_timeout=self.timeout * 0.8,
            finish_timeout=self.timeout * 0.8,  # this limit also holds at the end of the process
        )
        self._run = wandb.init(
            project=self.project or self._library.settings.project or "uncategorized",  # otherwise W&B would ask git
            entity=self.entity,
            name=self.name or directory,
            group=self.group or directory,
            tags=self.tags or None,
            mode=self._find_mode(),
            dir=str(folder),
            config=dict(run.hparams),
            settings=settings,
        )
        self._step, self._lines, self._exit_code = 0, {}, 0
        place = self._run.settings.sync_dir
        is_offline = self._run.offline
        self._where = f"the new W&B run {place} (wandb sync {place})" if is_offline else f"the new {self._run.url}"
        if is_offline and self.mode is None:
            logger.info("W&B: offline; to upload the run: wandb sync %s", place)
        return earlier(run, self)

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._log(step, time, values)

    def images(self, step: int, time: float, images: Mapping[str, Picture]) -> None:
        make = _wandb().Image
        self._log(step, time, {name: make(picture.as_pillow(), file_type="png") for name, picture in images.items()})

    def texts(self, step: int, time: float, texts: Mapping[str, str]) -> None:
        self._log(step, time, {name: _page(text) for name, text in texts.items()})

    def distributions(self, step: int, time: float, distributions: Mapping[str, Distribution]) -> None:
        make = _wandb().Histogram
        ready = {name: make(np_histogram=(each.counts, each.edges)) for name, each in distributions.items()}
        self._log(step, time, ready)

    def event(self, step: int, time: float, event: Event) -> None:
        if event.kind == "stop":
            self._exit_code = int(event.severity == "error")
        # W&B keeps only one value for a name and step, and a late event gets the newest step.
        lines = self._lines.setdefault((max(step, self._step), event.kind), [])
        if event.text not in lines:
            lines.append(event.text)
        self._log(step, time, {f"events/{event.kind}": _page("\n".join(lines))})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=self._exit_code)
            atexit.unregister(self._abandon)

    def _abandon(self) -> None:
        """Stop W&B from waiting for its own process when ours ends, if W&B has failed or hangs."""
        connection = self._library._connection
        if connection and connection._cleanup:
            connection._cleanup()  # removes the hook in which W&B waits without a limit

    def _log(self, step: int, time: float, values: Mapping[str, Any]) -> None:
        # A finding may be logged late, for an earlier step.
        self._step = max(step, self._step)
        self._run.log({**values, "_timestamp": time}, step=self._step)

    def _find_mode(self) -> str | None:
        """Return the mode for W&B; raises UserError for "online" without a key, because W&B would ask for a key."""
        wanted = self.mode or os.environ.get("WANDB_MODE")
        if wanted not in (None, "online") or _has_key():
            return wanted
        if wanted:
            raise UserError(
                'plugins.wandb.mode: "online" needs a key: run `wandb login` or set WANDB_API_KEY; "offline" needs none'
            )
        return "offline"


def _wandb() -> Any:
    # W&B reads these variables when it is imported. It would send its own errors over the network, even when offline.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    return importlib.import_module("wandb")


def _set_up() -> Any:
    """Set up W&B without git, which might wait forever for a pipe in a stranger's repository around this folder."""
    before = os.environ.get(_NO_GIT)
    os.environ[_NO_GIT] = "true"
    try:
        library = _wandb().setup()
    finally:
        if before is None:
            del os.environ[_NO_GIT]
        else:
            os.environ[_NO_GIT] = before
    if before is None:
        library.settings.disable_git = False  # for W&B runs of the user's own script
    return library


def _refuse_settings_of(run_dir: Path | None) -> None:
    """Raise UserError if W&B would read settings from a file of the run, which may name another server."""
    for file in (Path(name, "settings").resolve() for name in _FOLDERS):
        if run_dir and file.exists() and file.is_relative_to(run_dir.resolve()):
            raise UserError(f"{file}: start from another folder: W&B would read its server from this file")


def _is_online(mode: str | None) -> bool:
    """Return whether a run with this option would go to a server."""
    wanted = mode or os.environ.get("WANDB_MODE")
    return wanted == "online" or (wanted is None and _has_key())


def _has_key() -> bool:
    """Return whether W&B has a key for its server; unlike `wandb.login`, this does not ask the server."""
    settings = _set_up().settings
    if settings.api_key or settings.identity_token_file:
        return True
    try:
        place = os.environ.get("NETRC") or Path.home() / (".netrc" if os.name != "nt" else "_netrc")
        return netrc(place).authenticators(urlsplit(settings.base_url).netloc) is not None
    except (OSError, NetrcParseError):
        return False


def _page(text: str) -> Any:
    return _wandb().Html(f"<pre>{html.escape(text)}</pre>", inject=False)
