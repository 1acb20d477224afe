"""Averages that are reconstructed after training, from the files of real runs."""

import json
import math
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hookdiff import UserError, build_loop, hookimpl, load_config
from hookdiff.testing import assert_same, toy_loop
from hookdiff_checkpoint import Checkpoint
from hookdiff_ema import EMA
from hookdiff_ema.snapshots import find_snapshots, plan, reconstruct
from tests.conftest import Restores, RollBackAt, check_refused, output, refused, toy_run, wide
from tests.plugins.test_ema import Tied

STEPS = 256


class Walk:
    """Stands in for an optimizer: a random walk, the same for each run, from any step on."""

    @hookimpl
    def optimizer_step(self, loop):
        generator = torch.Generator().manual_seed(loop.progress.step)
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        return True


def trained(run, *, net=Tied, plugins=None, steps=STEPS, resume=False, fresh=(), **options):
    """Train in the folder `run` and return the loop and its averages."""
    torch.manual_seed(0)
    ema = EMA(**{"std": [0.05, 0.1], "snapshot_every": 32, **options})
    plugins = {"walk": Walk(), "ema": ema, **(plugins or {})}
    return toy_run(plugins, model=net(), run_dir=run, steps=steps, resume=resume, fresh=fresh, log_every=1000), ema


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    loop, _ = trained(folder)
    return folder, loop


def made(run, std, step=None):
    return reconstruct(plan(find_snapshots(run), std, step))


def relative(one, other):
    apart = sum((one[name].double() - other[name].double()).square().sum() for name in other)
    return float((apart / sum(value.double().square().sum() for value in other.values())).sqrt())


def files(run):
    return {path.name: path.read_bytes() for path in sorted((run / "ema").iterdir())}


def test_snapshots_have_the_models_own_keys(run):
    folder, loop = run
    names = [f"step-{step:08d}-std={std}.safetensors" for step in range(32, STEPS + 1, 32) for std in (0.05, 0.1)]
    assert list(files(folder)) == names
    state = load_file(folder / "ema" / names[-1])
    assert Tied().load_state_dict(state) == ([], [])
    assert_same({name: state[name] for name in loop.plugins["ema"].shadow}, loop.plugins["ema"]._averages[1].shadow)


@pytest.mark.parametrize("std", [0.05, 0.07, 0.12, *wide(0.04, 0.075, 0.1)])
def test_an_average_that_was_not_kept_is_reconstructed(run, std, tmp_path):
    folder, _ = run
    found = made(folder, std)
    _, kept = trained(tmp_path, std=std, snapshot_every=0)
    assert relative(found, kept.shadow) < (1e-6 if std in (0.05, 0.1) else 5e-3)
    assert {value.dtype for name, value in found.items() if "num_batches" not in name} == {torch.float32}
    assert Tied().load_state_dict(found) == ([], [])
    assert torch.equal(found["out.weight"], found["into.weight"])
    assert found["norm.num_batches_tracked"] == STEPS


def test_a_reconstruction_at_an_earlier_step_is_the_average_of_that_step(run, tmp_path):
    folder, _ = run
    found = made(folder, 0.075, 128)
    _, kept = trained(tmp_path, std=0.075, snapshot_every=0, steps=128)
    assert relative(found, kept.shadow) < 1e-2
    assert found["norm.num_batches_tracked"] >= 128


@given(place=st.integers(0, 15))
def test_a_reconstruction_at_a_snapshot_equals_it(run, place):
    folder, _ = run
    snapshots = find_snapshots(folder)
    planned = plan(snapshots, snapshots[place].std, snapshots[place].step)
    assert [part for part, _ in planned.parts] == [snapshots[place]]
    assert_same(reconstruct(planned), load_file(snapshots[place].path))


def test_half_precision_has_the_documented_error(run, tmp_path):
    folder, _ = run
    trained(tmp_path, snapshot_dtype="float16")
    stored = load_file(tmp_path / "ema" / "step-00000256-std=0.1.safetensors")
    assert {stored[name].dtype for name in ("into.weight", "out.weight", "norm.weight")} == {torch.float16}
    assert stored["norm.running_mean"].dtype == torch.float32  # a buffer is kept as it is
    error = relative(made(tmp_path, 0.1), made(folder, 0.1))
    assert 1e-5 < error < 4e-4


def test_weights_that_half_precision_cannot_hold_are_kept_in_float32(tmp_path):
    def large():
        net = Tied()
        torch.nn.init.constant_(net.into.bias, 1e6)
        return net

    trained(tmp_path, net=large, steps=32, snapshot_dtype="float16")
    file = load_file(tmp_path / "ema" / "step-00000032-std=0.1.safetensors")
    assert file["into.bias"].dtype == torch.float32
    assert file["into.bias"].isfinite().all()
    assert file["into.weight"].dtype == torch.float16
    assert made(tmp_path, 0.1)["into.bias"].mean() == pytest.approx(1e6, rel=1e-4)


@pytest.mark.parametrize(("every", "steps", "due"), [(32, 40, [32, 40]), ("1 epochs", 12, [5, 10, 12])])
def test_snapshots_come_with_steps_or_epochs_and_at_the_end(every, steps, due, tmp_path):
    trained(tmp_path, steps=steps, snapshot_every=every)
    assert [(snapshot.step, snapshot.std) for snapshot in find_snapshots(tmp_path)] == list(product(due, (0.05, 0.1)))


def test_a_resumed_run_writes_the_same_files_again(run, tmp_path):
    folder, _ = run
    trained(tmp_path, steps=70, plugins={"checkpoint": Checkpoint(50)})
    assert list(files(tmp_path))[-1] == "step-00000070-std=0.1.safetensors"
    newest = tmp_path / "checkpoints" / "step-00000070"
    newest.rename(tmp_path / "gone")  # as if it had been killed: it goes on from step 50
    trained(tmp_path, resume=True, plugins={"checkpoint": Checkpoint(50)})
    assert files(tmp_path) == files(folder)


def test_snapshots_of_later_steps_are_removed_before_the_first_step(tmp_path):
    seen = []

    class Looks:
        @hookimpl(trylast=True)
        def on_ready(self):
            seen.append(files(tmp_path))

    trained(tmp_path, steps=96)
    trained(tmp_path, steps=1, plugins={"looks": Looks()})  # another run in the same folder
    assert seen == [{}]
    assert list(files(tmp_path)) == [f"step-00000001-std={std}.safetensors" for std in (0.05, 0.1)]


def test_snapshots_from_before_a_rollback_are_removed(tmp_path):
    # An epoch has five batches. The fourth one brings steps 16 and 17, and after the rollback 11 and 12.
    back = {"kept": Restores(at=10), "bad": RollBackAt(17)}
    trained(tmp_path, steps=20, snapshot_every="1 epochs", plugins=back)
    assert sorted({snapshot.step for snapshot in find_snapshots(tmp_path)}) == [5, 10, 12, 17, 20]


def test_an_average_that_starts_again_is_not_mixed_with_the_earlier_one(tmp_path):
    trained(tmp_path, steps=64, plugins={"checkpoint": Checkpoint(64)})
    trained(tmp_path, steps=192, plugins={"checkpoint": Checkpoint(64)}, resume=True, fresh=["ema"])
    found = find_snapshots(tmp_path)
    assert {(s.step, s.start, s.updates) for s in found} == {(96, 64, 32), (128, 64, 64), (160, 64, 96), (192, 64, 128)}
    at_128 = plan(found, 0.05, 128)
    assert [part.step for part, _ in at_128.parts] == [128]
    with pytest.raises(UserError, match="step 64 is outside of the range of the snapshots: 96 to 192"):
        plan(found, 0.05, 64)


@pytest.mark.parametrize(
    ("std", "step", "message"),
    [
        (0.28, None, r"std 0\.28 is outside of the range of the snapshots at step 256: 0\.0\d+ to 0\.2\d+$"),
        (0.01, None, r"std 0\.01 is outside of the range of the snapshots at step 256: 0\.0\d+ to 0\.2\d+$"),
        (0.075, 257, "step 257 is outside of the range of the snapshots: 32 to 256"),
        (0.075, 300, "step 300 is outside of the range of the snapshots: 32 to 256"),
        (0.075, 20, "the snapshots give no average at step 20; choose step 32, which has a snapshot"),
        (0.075, 139, "the snapshots give no average at step 139; choose step 128, which has a snapshot"),
    ],
)
def test_a_width_outside_of_the_range_is_refused_with_the_range(run, std, step, message):
    with pytest.raises(UserError, match=message):
        plan(find_snapshots(run[0]), std, step)


def test_the_reported_range_is_the_real_one(run):
    snapshots = find_snapshots(run[0])
    with pytest.raises(UserError) as caught:
        plan(snapshots, 0.28)
    low, high = (float(word) for word in str(caught.value).rpartition(": ")[2].split(" to "))
    assert low < 0.05 < 0.1 < high
    for std in (low + 0.002, 0.075, high - 0.002):
        assert plan(snapshots, std).error <= 0.1
    for std in (low - 0.002, high + 0.002):
        with pytest.raises(UserError):
            plan(snapshots, std)


def test_one_snapshot_reconstructs_few_widths(tmp_path):
    trained(tmp_path, std=[0.05, 0.2], steps=32)
    with pytest.raises(UserError, match=r"at step 32: 0\.04\d* to 0\.06\d*, 0\.1\d* to 0\.2\d*$"):
        plan(find_snapshots(tmp_path), 0.1)


@pytest.mark.wide
def test_rounded_snapshots_are_refused_where_large_weights_cancel(tmp_path):
    stds = []
    for dtype in ("float32", "float16"):
        trained(tmp_path / dtype, steps=128, snapshot_every=2, snapshot_dtype=dtype)
        with pytest.raises(UserError) as caught:
            plan(find_snapshots(tmp_path / dtype), 0.002)
        stds.append(float(str(caught.value).rpartition(": ")[2].split(" to ")[0]))
    assert stds[0] < 0.9 * stds[1]


def test_snapshots_of_several_models_are_refused(tmp_path):
    trained(tmp_path, steps=64)
    lost = tmp_path / "ema" / "step-00000032-std=0.05.safetensors"
    with safe_open(lost, framework="pt") as file:
        about = file.metadata()
    save_file({name: torch.zeros(3) for name in load_file(lost)}, lost, about)
    with pytest.raises(UserError, match=r"std=0\.05\.safetensors is of another model than the newest snapshot: "):
        made(tmp_path, 0.075)
    save_file({"other": torch.zeros(3)}, lost, about)
    with pytest.raises(UserError, match=r"std=0\.05\.safetensors is of another model than the newest snapshot$"):
        made(tmp_path, 0.075)


def test_files_that_are_not_snapshots_are_refused(tmp_path):
    trained(tmp_path, steps=64)
    path = tmp_path / "ema" / "step-00000032-std=0.05.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(UserError, match=r"not a snapshot of an average: its header: needs std"):
        find_snapshots(tmp_path)
    good = {"std": 0.05, "step": 32, "start": 0, "dtype": "float32", "averaged": ["x"]}
    bad = [{"std": value} for value in (0, math.nan, 10**400, "x", None)]
    bad += [{"step": 0}, {"step": 10**400}, {"start": 32}]
    bad += [{"dtype": "float64"}, {"dtype": []}, {"averaged": None}, {"averaged": [1]}]
    for text in ("[]", "null", "{", "[" * 100_000, *(json.dumps({**good, **change}) for change in bad)):
        save_file({"x": torch.zeros(1)}, path, {"ema": text})
        with refused(UserError, path, "not a snapshot"):
            find_snapshots(tmp_path)
    save_file({"x": torch.zeros(1)}, path, {"ema": json.dumps({**good, "averaged": ["y"]})})
    with refused(UserError, path, "another model"):
        reconstruct(plan(find_snapshots(tmp_path), 0.05, 32))
    path.unlink()
    (tmp_path / "ema" / "step-notes.txt").write_text("mine")
    assert len(find_snapshots(tmp_path)) == 3


def test_snapshots_need_a_run_directory():
    with pytest.raises(UserError, match="snapshot_every needs a place for files"):
        toy_loop({"ema": EMA(std=[0.1], snapshot_every=2)}).run()


def test_the_command_makes_a_file_that_others_load(hookdiff, write_config, here):
    write_config(
        run={"steps": 8, "log_every": 4, "plugins": ["ema", "checkpoint"]},
        plugins={"ema": {"std": [0.05, 0.1], "snapshot_every": 1}},
    )
    output(hookdiff("run", "small.toml", "--out", "run"))
    out = output(hookdiff("ema", "run", "--std", "0.08", "--out", "made/wide.safetensors"))
    assert out.startswith("made/wide.safetensors: std 0.08 at step 8, of ")
    out = output(hookdiff("sample", "run", "--num", 1, "--weights", "made/wide.safetensors", "--out", "x.png"))
    assert out == "x.png: 1 image from the weights in made/wide.safetensors\n"
    start = load_config("small.toml", (), ["model.start_from=made/wide.safetensors"])
    with build_loop(start, here / "again") as loop:
        assert_same(loop.model.state_dict(), load_file("made/wide.safetensors"))
    (here / "again").mkdir()

    output(hookdiff("ema", "run", "--std", "0.05", "--step", "5"))
    found = load_file("run/ema-step-00000005-std=0.05.safetensors")
    assert_same(found, load_file("run/ema/step-00000005-std=0.05.safetensors"))

    # The averages that the run held to its end can be sampled with by name.
    out = output(hookdiff("sample", "run", "--num", 1, "--weights", "ema/std=0.1", "--out", "y.png"))
    assert out == "y.png: 1 image from the ema/std=0.1 weights of step 8\n"

    for words, message in (
        (["run", "--std", "0.4"], "--std 0.4: expected a width above 0 and at most 0.2887"),
        (["run", "--std", "0.28"], "std 0.28 is outside of the range of the snapshots at step 8: "),
        (["run", "--std", "0.1", "--step", "9"], "step 9 is outside of the range of the snapshots: 1 to 8"),
        (["again", "--std", "0.1"], "again has no snapshots; a run writes them with"),
        (["nowhere", "--std", "0.1"], f"nowhere: {here} has no 'nowhere'"),
        (["run/config.toml", "--std", "0.1"], "run/config.toml: expected a run directory"),
        (["run", "--std", "0.1", "--out", "small.toml/x"], "small.toml/x: cannot be written; "),
    ):
        check_refused(hookdiff("ema", *words), message)


@pytest.mark.usefixtures("here")
def test_the_command_draws_how_much_each_step_counts(hookdiff, write_config):
    write_config(run={"steps": 100, "plugins": ["ema"]})
    given = ("plugins.ema.std=[0.1]", "plugins.ema.decay=[0.999]", "plugins.ema.warmup=none")
    widths = [word for setting in given for word in ("--set", setting)]
    first, decay, power, picture = output(hookdiff("ema", "small.toml", "--draw", *widths)).splitlines()
    assert first.endswith("at step 100")
    assert "90% of all steps and the initial weights; initial weights 90.5%" in decay  # 0.999^100
    assert "half of it is of the last 9 steps, 90% of the last 26 steps; initial weights 0.0%" in power
    with Image.open(picture.strip()) as drawn:
        assert drawn.width > 100
    for words, message in (
        (["small.toml", "--draw", "--std", "0.1"], "--std 0.1 cannot be used with --draw"),
        (["small.toml", "--draw", "--plugins", "no:ema,lr"], "small.toml: the plugin 'ema' is not switched on"),
        (["small.toml", "--draw", "--out", "x.format"], "x.format: cannot be written"),
        (["small.toml", "--std", "0.1", "--trust"], "--plugins, --set and --trust are only for --draw"),
        (["small.toml"], "--std is missing"),
    ):
        check_refused(hookdiff("ema", *words), message)
