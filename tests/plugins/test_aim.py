import contextlib
import importlib.util
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hookdiff import Loop, UserError, builtin_plugins, hookimpl
from hookdiff.builtin.logged import Metrics
from hookdiff.log import Distribution, Event
from hookdiff.loop.saved import restore_state
from hookdiff.testing.toy import toy_loop
from hookdiff_aim import Aim
from tests.conftest import PATIENCE, Restores, RollsBack, acting, check_facts, ran, refused, saved, wait_until, warnings
from tests.forked import python

HAS_AIM = sys.version_info < (3, 13) and importlib.util.find_spec("aim") is not None
WITHOUT_AIM = "aim is not installed; it has packages for Python up to 3.12"
needs_aim = pytest.mark.skipif(not HAS_AIM, reason=WITHOUT_AIM)


class Extras:
    """Logs a NaN and pictures."""

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        step = loop.progress.step
        loop.log({"fd/digits": math.nan if step == 2 else 1.0 / step})
        if step % 2 == 0:
            grey = torch.full((2, 1, 4, 6), step / 10)
            loop.log.images({"samples": grey, "colour": torch.tensor([1.0, -1.0, 0.0]).reshape(1, 3, 1, 1)})
            loop.log.texts({"prompt": f"cat {step}"})
            loop.log.distributions({"weights": torch.tensor([0.0, 0.0, 0.5, 1.0])})
            loop.log.event(Event("finding", f"found at {step}", "warning"))
            loop.log.event(Event("finding", "another"))


def make_loop(plugins: Mapping[str, object], run_dir: Path | None, steps: int = 4, **options: Any) -> Loop:
    hparams = {"run": {"steps": steps, "plugins": ["aim"]}, "optimizer": {"lr": 0.1, "fused": True}}
    return toy_loop(
        {"metrics": Metrics(), **plugins}, run_dir=run_dir, steps=steps, log_every=1, hparams=hparams, **options
    )


def the_sdk() -> Any:
    """Return Aim's own module, imported as the plugin imports it: a plain import warns."""
    Aim().check(toy_loop())
    return sys.modules["aim"]


def read(folder: Path, run_hash: str) -> dict[str, Any]:
    """Read a run of a repository."""
    from aim.sdk.index_manager import RepoIndexManager

    aim = the_sdk()
    repo = aim.Repo.from_path(str(folder))
    # Without this there is nothing to read, and no error.
    RepoIndexManager.get_index_manager(repo).index(run_hash)
    repo.container_pool.clear()
    run = aim.Run(run_hash, repo=repo, read_only=True)
    metrics = {}
    for metric in run.metrics():
        steps, (values, *_) = metric.data.numpy()
        metrics[metric.name] = dict(zip(steps.tolist(), values.tolist(), strict=True))
    images = {}
    for name, context, _ in run.iter_sequence_info_by_type("list(aim.image)"):
        sequence = run.get_image_sequence(name, context)
        images[name] = {step: numpy.asarray(image.to_pil_image()) for step, (image, *_) in sequence.data.items()}
    texts: dict[str, dict[int, str]] = {}
    events: dict[str, dict[int, str]] = {}
    for name, context, _ in run.iter_sequence_info_by_type("aim.text"):
        sequence = run.get_text_sequence(name, context)
        by_step = {step: value.data for step, (value, *_) in sequence.data.items()}
        (events if name == "events" else texts)[context.to_dict().get("kind", name)] = by_step
    distributions = {}
    for name, context, _ in run.iter_sequence_info_by_type("aim.distribution"):
        sequence = run.get_distribution_sequence(name, context)
        distributions[name] = {step: value.to_np_histogram() for step, (value, *_) in sequence.data.items()}
    return {
        "metrics": metrics,
        "texts": texts,
        "events": events,
        "distributions": distributions,
        "run_dir": run.get("run_dir", None),
        "images": images,
        "hparams": run["hparams"],
        "name": run.name,
        "experiment": run.experiment,
        "closed": run.end_time is not None,
    }


def of(sink: Aim, folder: Path) -> dict[str, Any]:
    """Read the run that `sink` has written to a repository."""
    return read(folder, sink.state_dict()["run"])


def only(folder: Path, name: str) -> dict[str, Any]:
    """Return the only Aim run with this name."""
    hashes = os.listdir(folder / ".aim" / "meta" / "chunks")  # the SDK's own list is up to 0.5 s old
    (named,) = (run for run in (read(folder, run_hash) for run_hash in hashes) if run["name"] == name)
    return named


def locks(folder: Path) -> list[Path]:
    return list((folder / ".aim" / "locks").glob("*.softlock"))


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that the tests share, because Aim takes two seconds to make one; without Aim, they are skipped."""
    if not HAS_AIM:
        pytest.skip(WITHOUT_AIM)
    return tmp_path_factory.mktemp("runs")


def test_a_run_can_be_read_back(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = Aim(experiment="tests")
    make_loop({"aim": sink, "extras": Extras()}, runs_dir / "first").run()
    run = of(sink, runs_dir)
    assert not caplog.records
    assert (run["name"], run["experiment"], run["closed"]) == ("first", "tests", True)
    assert run["hparams"] == {"run": {"steps": 4, "plugins": ["aim"]}, "optimizer": {"lr": 0.1, "fused": True}}
    assert set(run["metrics"]) == {"loss", "grad_norm", "fd/digits"}
    assert list(run["metrics"]["loss"]) == [1, 2, 3, 4]
    distances = run["metrics"]["fd/digits"]
    assert math.isnan(distances.pop(2))
    assert distances == pytest.approx({1: 1.0, 3: 1 / 3, 4: 1 / 4})
    assert list(run["images"]["samples"]) == [2, 4]
    for step, picture in run["images"]["samples"].items():
        assert picture.ndim == 2
        assert (picture[: picture.shape[0] // 2] == round((step / 10 + 1) * 127.5)).any()
    assert [255, 0, 128] in run["images"]["colour"][4].reshape(-1, 3).tolist()
    assert run["texts"] == {"prompt": {2: "cat 2", 4: "cat 4"}}
    assert run["events"] == {"finding": {2: "found at 2\nanother", 4: "found at 4\nanother"}}
    expected = Distribution.of(torch.tensor([0.0, 0.0, 0.5, 1.0]))
    counts, edges = run["distributions"]["weights"][2]
    assert counts.tolist() == list(expected.counts)
    assert edges.tolist() == pytest.approx(expected.edges)
    assert run["run_dir"] == str((runs_dir / "first").resolve())
    assert not locks(runs_dir)


def test_a_resumed_run_goes_on_in_the_same_aim_run(runs_dir: Path) -> None:
    sink = Aim()
    loop = ran(make_loop({"aim": sink, "extras": Extras()}, runs_dir / "resumed", steps=2))
    state, resumed = saved(loop), Aim()
    make_loop({"aim": resumed, "extras": Extras(), "saved": Restores(state)}, runs_dir / "resumed", steps=5).run()
    assert resumed.state_dict() == sink.state_dict()
    run = of(sink, runs_dir)
    assert list(run["metrics"]["loss"]) == [1, 2, 3, 4, 5]
    assert list(run["images"]["samples"]) == [2, 4]
    assert run["hparams"]["run"]["steps"] == 5

    fresh = Aim()
    plugins = {"aim": fresh, "extras": Extras(), "saved": Restores(state)}
    make_loop(plugins, runs_dir / "resumed", steps=3, fresh=["aim"]).run()
    assert fresh.state_dict() != sink.state_dict()
    # A new Aim run begins with the earlier steps, from the run directory.
    assert list(of(fresh, runs_dir)["metrics"]["loss"]) == [1, 2, 3]


def test_steps_that_a_resumed_run_does_not_log_again_are_gone(runs_dir: Path) -> None:
    odd = acting(after_optimizer_step=lambda loop: loop.log({"odd": 1.0}) if loop.progress.step % 2 else None)
    state, builtin = Restores(at=2), builtin_plugins(signals=False)
    make_loop({**builtin, "aim": Aim(), "odd": odd, "extras": Extras(), "state": state}, runs_dir / "again", 5).run()
    plugins = {**builtin_plugins(signals=False), "aim": Aim(), "state": Restores(state.state)}
    make_loop(plugins, runs_dir / "again", steps=3, resume=True).run()
    run = only(runs_dir, "again")
    assert (list(run["metrics"]["loss"]), list(run["metrics"]["odd"])) == ([1, 2, 3], [1])
    assert (list(run["images"]["samples"]), list(run["texts"]["prompt"])) == ([2], [2])
    assert run["events"]["finding"] == {2: "found at 2\nanother"}
    assert list(run["events"]["resume"]) == [2]


def test_the_aim_run_of_a_run_stays_when_a_copy_of_its_directory_is_resumed(runs_dir: Path) -> None:
    state = Restores(at=2)
    make_loop({"aim": Aim(), "state": state}, runs_dir / "source", steps=4).run()
    shutil.copytree(runs_dir / "source", runs_dir / "copy")
    make_loop({"aim": Aim(), "state": Restores(state.state)}, runs_dir / "copy", steps=3, resume=True).run()
    assert [list(only(runs_dir, name)["metrics"]["loss"]) for name in ("source", "copy")] == [[1, 2, 3, 4], [1, 2, 3]]


def test_after_a_rollback_no_step_stands_twice(runs_dir: Path) -> None:
    plugins = {**builtin_plugins(signals=False), "aim": Aim(), "back": RollsBack(at=1, position=3)}
    make_loop(plugins, runs_dir / "back", steps=4).run()
    run = only(runs_dir, "back")
    assert list(run["metrics"]["loss"]) == [1, 2, 3, 4]
    assert list(run["events"]["rollback"]) == [1]
    assert "nan" not in run["events"]  # of step 3, which was made again


def test_a_fill_that_was_broken_off_is_made_again(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Aim):
        def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
            if step == 2:
                raise ValueError("the repository has moved")
            Aim.scalars(self, step, time, values)

    state, end, folder = Restores(at=3), Restores(at=4), runs_dir / "broken"
    make_loop({"state": state}, folder, steps=3).run()
    make_loop({"aim": Fails(), "from": Restores(state.state), "end": end}, folder, 4, fresh=["aim"]).run()
    (warning,) = warnings(caplog)
    check_facts(warning, "Fails", "scalars", "the repository has moved")
    assert list(only(runs_dir, "broken")["metrics"]["loss"]) == [1]
    make_loop({"aim": Aim(), "from": Restores(end.state)}, folder, steps=5).run()
    assert list(only(runs_dir, "broken")["metrics"]["loss"]) == [1, 2, 3, 4, 5]


def test_a_branch_has_an_aim_run_of_its_own(runs_dir: Path) -> None:
    sink, branch = Aim(), Aim()
    trunk = ran(make_loop({"aim": sink}, runs_dir / "trunk", steps=2))
    plugins = {"aim": branch, "saved": Restores(saved(trunk))}
    make_loop(plugins, runs_dir / "branch", steps=3, resume=runs_dir / "trunk").run()
    first, second = (of(one, runs_dir) for one in (sink, branch))
    assert (first["name"], list(first["metrics"]["loss"])) == ("trunk", [1, 2])
    assert (second["name"], list(second["metrics"]["loss"])) == ("branch", [1, 2, 3])


def test_a_lost_aim_run_is_replaced_by_a_new_one(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = Aim()
    restore_state(sink, {"run": "0123456789abcdef01234567"})
    make_loop({"aim": sink}, runs_dir / "lost", steps=1).run()
    (warning,) = warnings(caplog)
    check_facts(warning, "0123456789abcdef01234567", runs_dir)
    assert list(of(sink, runs_dir)["metrics"]["loss"]) == [1]


def test_a_run_that_was_just_created_is_found(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = Aim()
    make_loop({"aim": sink}, runs_dir / "just-now", steps=1).run()
    resumed = Aim()
    restore_state(resumed, sink.state_dict())
    loop = make_loop({"aim": resumed}, runs_dir / "just-now", steps=2)
    aim = the_sdk()
    listed = aim.Repo._all_run_hashes
    # As if Aim had listed the runs just before this one was made.
    listed.cache[listed.cache_key(aim.Repo.from_path(str(runs_dir)))] = set()
    loop.run()
    assert resumed.state_dict() == sink.state_dict()
    assert "Aim" not in caplog.text


def test_the_lock_of_a_killed_process_is_ignored(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Aim()
    ran(make_loop({"aim": sink}, runs_dir / "killed", steps=1))
    run_hash = sink.state_dict()["run"]
    (runs_dir / ".aim" / "locks" / f"{run_hash}.softlock").write_text("12345-1-0.0")  # machine, process, time
    repo = the_sdk().Repo
    wait = repo.request_run_lock
    monkeypatch.setattr(repo, "request_run_lock", lambda repo, run: wait(repo, run, timeout=0.1))  # for 10 s
    resumed = Aim()
    restore_state(resumed, {"run": run_hash})
    make_loop({"aim": resumed}, runs_dir / "killed", steps=2).run()
    assert list(read(runs_dir, run_hash)["metrics"]["loss"]) == [1, 2]
    assert not locks(runs_dir)


def test_fields_and_loops_without_a_run_directory(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, bare = Aim(repo=str(runs_dir), name="by hand"), Aim()
    make_loop({"aim": named}, None, steps=1).run()
    monkeypatch.chdir(runs_dir)
    make_loop({"aim": bare}, None, steps=1).run()
    assert of(named, runs_dir)["name"] == "by hand"
    assert of(bare, runs_dir)["name"].startswith("Run")  # Aim's own


ONE_RUN = """
import sys
from hookdiff.testing.toy import toy_loop
from hookdiff_aim import Aim
toy_loop({"aim": Aim(repo=sys.argv[1], timeout=300)}, steps=1).run()
"""


@pytest.mark.slow
@needs_aim
def test_two_processes_may_create_the_same_repository(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    command = [sys.executable, "-c", ONE_RUN, str(tmp_path / "runs")]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors  # at exit
    assert len(list((tmp_path / "runs" / ".aim" / "meta" / "chunks").iterdir())) == 2


@needs_aim
def test_only_the_first_of_two_makes_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = []
    create = the_sdk().Repo.from_path

    def note(*arguments: Any, **options: Any) -> Any:
        if options.get("init"):
            made.append(arguments)
            time.sleep(0.2)
        return create(*arguments, **options)

    monkeypatch.setattr(the_sdk().Repo, "from_path", note)
    loops = [make_loop({"aim": Aim(repo=str(tmp_path / "runs"), timeout=300)}, None, steps=1) for _ in range(2)]
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [(str(tmp_path / "runs"),)]
    assert not warnings(caplog)


def test_a_missing_package_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aim", None)
    loop = make_loop({"aim": Aim()}, tmp_path / "run")
    with refused(UserError, "aim", "pip install 'hookdiff[aim]'"):
        loop.run()
    assert loop.progress.step == 0


@needs_aim
def test_a_repository_that_cannot_be_made_costs_only_the_sink(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert make_loop({"aim": Aim(repo=str(tmp_path / "file" / "repo"))}, None).run() == "done"
    (warning,) = warnings(caplog)
    check_facts(warning, "Aim", "open", "NotADirectoryError")


@needs_aim
def test_the_load_of_the_machine_and_the_terminal_are_recorded_if_asked(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    plain, asked = Aim(), Aim(system_tracking_interval=0.1, capture_terminal_logs=True)

    def prints() -> None:
        print("seen on the terminal")
        time.sleep(0.3)

    for name, sink in (("plain", plain), ("asked", asked)):
        make_loop({"aim": sink, "prints": acting(after_optimizer_step=prints)}, folder / name, steps=6).run()
    assert set(of(plain, folder)["metrics"]) == {"loss", "grad_norm"}
    assert any(name.startswith("__system__") for name in of(asked, folder)["metrics"])
    printed = {}
    for sink in (plain, asked):
        run = the_sdk().Run(sink.state_dict()["run"], repo=str(folder), read_only=True)
        lines = run.get_terminal_logs()
        printed[sink] = "" if lines is None else "".join(line.data for _, (line, *_) in lines.data.items())
    assert printed[plain] == ""
    assert "seen on the terminal" in printed[asked]


def numbers(folder: Path) -> dict[tuple[int, str], float]:
    """Return the numbers of the newest run of a repository."""
    chunks = folder / ".aim" / "meta" / "chunks"
    newest = max(os.listdir(chunks), key=lambda one: (chunks / one).stat().st_ctime)
    metrics = read(folder, newest)["metrics"]
    return {(step, name): value for name, values in metrics.items() for step, value in values.items()}


TRACKS = """
import os
from hookdiff.testing import assert_tracks
from hookdiff_aim import Aim
from tests.plugins.test_aim import numbers

assert_tracks(lambda folder: Aim(repo=str(folder), timeout=300), numbers)
print("it tracks", flush=True)
os._exit(0)  # threads that Aim leaves after a call that hung write to a folder that is gone
"""


@needs_aim
@pytest.mark.slow
def test_it_has_the_numbers_of_each_run_and_costs_none_when_it_fails() -> None:
    _, output, problems = python(TRACKS, folder=Path(__file__).parents[2])
    assert "it tracks" in output, problems


@needs_aim
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of playwright
def test_the_page_shows_metrics_and_images(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    sink = Aim(timeout=300)
    make_loop({"aim": sink, "extras": Extras()}, tmp_path / "runs" / "shown", steps=6).run()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("up", "--repo", str(tmp_path / "runs"), "--host", "127.0.0.1", "--port", str(port))
    with (tmp_path / "server.log").open("w") as log:
        command = [str(Path(sys.executable).parent / "aim"), *words]
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: server.poll() is not None or answers(port))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page()
            page.set_default_timeout(1000 * PATIENCE)
            address = f"http://127.0.0.1:{port}/runs/{sink.state_dict()['run']}"
            page.goto(f"{address}/metrics")
            page.get_by_text("grad_norm", exact=True).first.wait_for()
            page.get_by_text("loss", exact=True).first.wait_for()
            page.goto(f"{address}/images")
            page.get_by_text("samples", exact=True).first.wait_for()
            page.wait_for_function("[...document.images].some(one => one.src.startsWith('data:') && one.naturalWidth)")
            browser.close()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(PATIENCE)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
