"""The plugin `wandb`. It copies what stands in the run directory, so its runs can be deleted."""

from __future__ import annotations

import html
import importlib
import os
from collections.abc import Mapping
from netrc import NetrcParseError, netrc
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from attrs import define, field
from attrs.validators import in_, optional

from hookdiff import Sink, TrackedRun
from hookdiff.distribution import Distribution
from hookdiff.events import Event
from hookdiff.history import History
from hookdiff.mirroring import replay
from hookdiff.options import about
from hookdiff.pictures import Picture

_COLUMNS = ("step", "time", "kind", "severity", "text")  # of the table of events


@define(eq=False)
class WandB(Sink):
    """Writes metrics, pictures, histograms, texts, events and the config to Weights & Biases, also without a network.

    W&B drops a value when its step goes back. So a resumed run gets a W&B run of its own, which begins with what the
    run directory has of the steps before. The table of the events is written when the run ends.
    """

    needs: ClassVar[Mapping[str, str]] = {"wandb": "hookdiff[wandb]"}

    project: str | None = field(default=None, metadata=about("project; without it that of the environment"))
    entity: str | None = field(default=None, metadata=about("user or team; without it that of the account"))
    name: str | None = field(default=None, metadata=about("name of the run; without it the run directory's"))
    group: str | None = field(
        default=None, metadata=about("group of runs; without it the run directory's name, which resumed runs share")
    )
    tags: tuple[str, ...] = field(default=(), converter=tuple, metadata=about("tags of the run"))
    mode: Literal["online", "offline"] | None = field(
        default=None,
        validator=optional(in_(("online", "offline"))),
        metadata=about('"online" or "offline"; without it offline unless this machine has a key of W&B'),
    )
    system_stats: bool = field(default=False, metadata=about("also record the load of the machine"))
    console: bool = field(default=False, metadata=about("also record what is printed"))
    _run: Any = field(init=False, default=None)
    _events: list[tuple[Any, ...]] = field(init=False, factory=list)  # rows of the table
    _step: int = field(init=False, default=0)  # the newest

    def open(self, run: TrackedRun) -> None:
        wandb, name = _wandb(), run.run_dir.name if run.run_dir else None
        settings = wandb.Settings(
            console="auto" if self.console else "off",
            finish_timeout=self.timeout,  # also for the end of the process, which waits for unsent values
            init_timeout=self.timeout,
            silent=True,
            x_disable_stats=not self.system_stats,
        )
        self._events, self._step = [], run.step
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name or name,
            group=self.group or name,
            tags=self.tags or None,
            mode=self.mode or os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline"),
            dir=str(run.run_dir) if run.run_dir else None,
            config=dict(run.hparams),
            settings=settings,
            reinit="create_new",
        )
        if run.step and run.run_dir:
            replay(History(run.run_dir), self, run.step)

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._log(step, dict(values))

    def images(self, step: int, time: float, images: Mapping[str, Picture]) -> None:
        self._log(step, {name: _wandb().Image(picture.as_pillow()) for name, picture in images.items()})

    def texts(self, step: int, time: float, texts: Mapping[str, str]) -> None:
        pages = {name: f"<pre>{html.escape(text)}</pre>" for name, text in texts.items()}
        self._log(step, {name: _wandb().Html(page, inject=False) for name, page in pages.items()})

    def distributions(self, step: int, time: float, distributions: Mapping[str, Distribution]) -> None:
        wandb = _wandb()
        histograms = {name: (list(one.counts), one.edges) for name, one in distributions.items()}
        self._log(step, {name: wandb.Histogram(np_histogram=found) for name, found in histograms.items()})

    def event(self, step: int, time: float, event: Event) -> None:
        self._events.append((step, time, event.kind, event.severity, event.text))

    def close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        if self._events:
            rows = [list(row) for row in self._events]
            run.log({"events": _wandb().Table(columns=list(_COLUMNS), data=rows)}, step=self._step)
        run.finish()

    def is_transient(self, error: Exception) -> bool:
        """Return False: W&B repeats its own calls."""
        return False

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._step = max(step, self._step)
        self._run.log(values, step=step)


def _wandb() -> Any:
    return importlib.import_module("wandb")


def _has_key() -> bool:
    """Return whether this machine is logged in to W&B, which otherwise asks for a key on the terminal."""
    settings = _wandb().setup().settings
    if settings.api_key or settings.identity_token_file:
        return True
    try:
        return netrc(os.environ.get("NETRC")).authenticators(urlsplit(settings.base_url).hostname or "") is not None
    except (OSError, NetrcParseError):
        return False
