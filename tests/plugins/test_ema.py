import math

import pytest
import torch
from attrs import define, evolve
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from hookdiff import SampleRequest, UserError, hookimpl
from hookdiff.loop.saved import restore_state
from hookdiff.options.structure import Problems, arguments, resolved
from hookdiff.testing import CountTransfers, assert_same, toy_loop, toy_model, weights
from hookdiff_checkpoint import Checkpoint
from hookdiff_ema import EMA, NoWarmup, Power, Warmup
from hookdiff_ema.profiles import gamma_of
from tests.conftest import Logged, Restores, RollBackAt, Still, acting, added_transfers, toy_run, warnings
from tests.plugins.test_checkpoint_announced import fails


class Values:
    """Stands in for an optimizer: sets the only parameter to the next of a list of values."""

    def __init__(self, values):
        self.values = list(values)

    @hookimpl
    def optimizer_step(self, loop):
        with torch.no_grad():
            next(loop.model.parameters()).fill_(self.values[loop.progress.step])
        return True


class Scalar(nn.Module):
    def __init__(self, value=0.0, dtype=torch.float32):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value], dtype=dtype))

    def forward(self, x):
        return x * self.value.to(x.dtype)


def averaged(values, start=0.0, dtype=torch.float32, **options):
    """Return the shadow after the weights had each of `values` in turn."""
    ema = EMA(**options)
    toy_run({"values": Values(values), "ema": ema}, model=Scalar(start, dtype), steps=len(values))
    return ema.shadow["value"].item()


numbers = st.lists(st.floats(-10, 10), min_size=1, max_size=8)


@pytest.mark.parametrize("length", [{"decay": 0.9}, {"half_life": 6.578813478960585}])
def test_known_answer_of_a_ramp(length):
    assert averaged(range(1, 21), warmup="none", **length) == pytest.approx(12.0941898913, rel=1e-6)


def spoiled(loop, batch):
    return evolve(batch, inputs=batch.inputs * math.nan) if loop.progress.position % 2 else batch


@pytest.mark.parametrize(
    "hooks",
    [{"unscale": lambda loop: loop.progress.position % 2 == 0}, {"make_batch": spoiled, "on_nan": lambda: "skip"}],
    ids=["void", "skipped"],
)
def test_a_step_that_changes_no_weight_does_not_move_it(hooks):
    ema, seen, void = EMA(decay=0.5, warmup="none"), [], acting(**hooks)
    look = acting(before_step=lambda: seen.append((ema.num_updates, ema.shadow["0.weight"].clone())))
    toy_run({"void": void, "ema": ema, "look": look}, steps=3)
    assert [count for count, _ in seen] == [0, 1, 1, 2, 2]
    assert torch.equal(seen[1][1], seen[2][1])


def test_samples_use_it_and_leave_no_trace():
    ema = EMA(decay=0.9)
    loop = toy_run({"ema": ema})
    before, addresses = weights(loop), [p.data_ptr() for p in loop.model.parameters()]
    averaged, plain, named = (loop.sample(SampleRequest(3, weights=name)) for name in (None, "model", "ema"))
    assert_same(weights(loop), before)
    assert [p.data_ptr() for p in loop.model.parameters()] == addresses
    assert (averaged.weights, plain.weights, named.weights) == ("ema", "model", "ema")
    assert torch.equal(averaged.images, named.images)
    loop.model.load_state_dict(ema.shadow)
    assert torch.equal(loop.sample(SampleRequest(3, weights="model")).images, averaged.images)
    assert not torch.equal(averaged.images, plain.images)


def test_the_weights_come_back_when_sampling_fails():
    with toy_loop({"ema": EMA(), "broken": acting(sample=fails)}) as loop:
        next(loop.steps())
        before = weights(loop)
        with pytest.raises(RuntimeError, match="mine"):
            loop.sample(SampleRequest(1))
        assert_same(weights(loop), before)
        assert loop.weights.name == "model"


def test_the_average_of_another_model_is_refused():
    ema = EMA()
    with toy_loop({"ema": ema}) as loop, pytest.raises(ValueError, match="'other'"):
        ema.check_state(loop.model, {**ema.state_dict(), "other": torch.zeros(1)})


def look(seen):
    """Return a plugin that adds a copy of the weights to `seen` after each update."""
    return acting(after_optimizer_step=lambda loop: seen.append(weights(loop)))


@given(values=numbers, std=st.floats(0.02, 0.28))
def test_a_power_function_average_is_what_its_profile_says(values, std):
    n, exponent = len(values), gamma_of(std) + 1
    shares = [(k / n) ** exponent - ((k - 1) / n) ** exponent for k in range(1, n + 1)]
    expected = sum(share * value for share, value in zip(shares, values, strict=True))
    assert averaged(values, start=77.0, std=std) == pytest.approx(expected, rel=1e-6, abs=1e-5)


@given(value=st.floats(-10, 10), std=st.floats(0.02, 0.28), count=st.integers(1, 8))
def test_a_power_function_average_of_weights_that_stay_is_exact(value, std, count):
    assert averaged([value] * count, start=3.0, std=std) == torch.tensor(value).item()


def test_the_power_warm_up_is_used():
    values = [3.0, -1.0, 4.0, 1.0]
    expected = 0.5
    for n, value in enumerate(values):
        decay = min(0.6, 1 - (1 + n / 2) ** -0.9)
        expected = decay * expected + (1 - decay) * value
    assert averaged(values, start=0.5, decay=0.6, warmup=Power(2.0, 0.9)) == pytest.approx(expected, rel=1e-6)


@define(frozen=True)
class Late(Warmup):
    """A user-defined warm-up that copies the weights until some update."""

    begin: int

    def highest(self, num_updates):
        return float(num_updates >= self.begin)


def test_a_warm_up_may_be_user_defined():
    assert averaged([3.0, -1.0, 4.0, 1.0], decay=0.5, warmup=Late(3)) == 0.5 * 4.0 + 0.5 * 1.0


def test_a_config_chooses_the_warm_up():
    def read(warmup):
        problems = Problems()
        given = arguments(EMA, {"warmup": warmup}, "plugins.ema", problems)
        return given.get("warmup"), problems.found

    assert read("none") == (NoWarmup(), [])
    assert read({"use": "power", "inv_gamma": 2, "power": 0.9}) == (Power(2.0, 0.9), [])
    assert read({"use": f"{__name__}:Late", "begin": 7}) == (Late(7), [])
    for warmup, places in (
        ("ratioo", [".warmup: unknown 'ratioo'; did you mean 'ratio'?"]),
        ({"use": "ratio", "power": 0.7}, [".warmup.power: unknown key"]),
        ({"use": "power", "power": 0, "inv_gamma": "x"}, [".warmup.inv_gamma: ", ".warmup.power: "]),
    ):
        for line, place in zip(read(warmup)[1], places, strict=True):
            assert line.startswith(f"plugins.ema{place}")
    assert resolved(EMA, {"warmup": Power()})["warmup"] == {"use": "power", "inv_gamma": 1.0, "power": 0.75}


def test_it_equals_the_averaged_model_of_torch():
    ema, seen = EMA(decay=0.9, warmup="none"), []
    model = toy_model()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # the first update copies
    toy_loop({"ema": ema, "look": look(seen)}, model=model).run()
    stand_in = toy_model()
    for each in seen:
        stand_in.load_state_dict(each)
        theirs.update_parameters(stand_in)
    assert_same(ema.shadow, dict(theirs.module.named_parameters()))


def test_several_averages_equal_each_average_alone():
    several = EMA(decay=[0.9, 0.99], half_life=[20.0], std=[0.05, 0.1])
    toy_loop({"ema": several}).run()
    singles = [{"decay": 0.9}, {"decay": 0.99}, {"half_life": 20.0}, {"std": 0.05}, {"std": 0.1}]
    held = several.state_dict()
    labels = ["decay=0.9", "decay=0.99", "half_life=20", "std=0.05", "std=0.1"]
    assert held["ema"]["labels"] == labels
    assert list(held["ema"]["averages"]) == labels[1:]
    for label, options in zip(labels, singles, strict=True):
        alone = EMA(**options)
        toy_loop({"ema": alone}).run()
        values = several.shadow if label == "decay=0.9" else held["ema"]["averages"][label]
        assert_same(alone.shadow, values)


def test_a_number_is_the_first_of_the_averages():
    ema = EMA(std=0.1, decay=[0.9])
    with toy_loop({"ema": ema}):
        assert ema.state_dict()["ema"]["labels"] == ["std=0.1", "decay=0.9"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 0.9, "half_life": 10.0}, "decay and half_life both set the length of one average"),
        ({"decay": [0.9, 0.9]}, "decay=0.9 is given twice"),
        ({"snapshot_every": 10, "decay": 0.9}, "snapshot_every needs std"),
    ],
)
def test_contradictory_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EMA(**options)


def test_a_config_gives_one_or_several_averages():
    problems = Problems()
    given = arguments(EMA, {"decay": 1, "std": [0.05, "x"], "half_life": [5, 6]}, "plugins.ema", problems)
    assert given == {"decay": 1.0, "half_life": [5.0, 6.0]}
    assert problems.found == [
        "plugins.ema.std: expected a number or a list, got [0.05, 'x']",
        "plugins.ema.decay: must be < 1: 1.0",
    ]


def test_each_average_has_a_name_to_sample_with():
    ema = EMA(decay=0.5, std=[0.05])
    loop = toy_run({"ema": ema})
    first, named, other = (loop.sample(SampleRequest(2, weights=w)) for w in (None, "ema/decay=0.5", "ema/std=0.05"))
    assert (first.weights, named.weights, other.weights) == ("ema", "ema/decay=0.5", "ema/std=0.05")
    assert torch.equal(first.images, named.images)
    assert not torch.equal(first.images, other.images)
    with pytest.raises(UserError, match=r"no weights of this run are named 'ema/std=0\.1'"):
        loop.sample(SampleRequest(2, weights="ema/std=0.1"))
    with pytest.raises(UserError, match=r"did you mean 'ema/decay=0\.5'\?; known: ema/decay=0\.5, .*, model$"):
        loop.sample(SampleRequest(0, weights="decay=0.5"))


class Tied(nn.Module):
    """Uses one matrix twice, and has a buffer."""

    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.out(self.norm(self.into(x)))


def test_tied_weights_are_averaged_once_and_saved_under_each_name(tmp_path):
    torch.manual_seed(0)
    ema, seen = EMA(decay=[0.9], std=[0.1], warmup="none"), []
    plugins = {"ema": ema, "look": look(seen), "checkpoint": Checkpoint()}
    loop = toy_loop(plugins, model=Tied(), run_dir=tmp_path)
    start = loop.model.into.weight.detach().clone()
    loop.run()
    assert "out.weight" not in ema.shadow
    expected = start
    for each in seen:
        expected = torch.lerp(expected, each["into.weight"], 1 - 0.9)
    assert torch.equal(ema.shadow["into.weight"], expected)

    folder = tmp_path / "checkpoints" / "step-00000020"
    others = load_file(folder / "ema-00001-of-00001.safetensors")
    other = {key.removeprefix("ema/averages/std=0.1/"): value for key, value in others.items()}
    for average in (load_file(folder / "ema.safetensors"), other):
        fresh = Tied()
        assert fresh.load_state_dict(average) == ([], [])  # strict: every key, and no other
        assert torch.equal(fresh.out.weight, average["into.weight"])
        assert torch.equal(fresh.norm.running_mean, loop.model.norm.running_mean)
        assert fresh.norm.num_batches_tracked == 20


def test_the_file_of_one_average_has_the_models_keys_alone(tmp_path):
    loop = toy_run({"ema": EMA(), "checkpoint": Checkpoint()}, model=Tied(), run_dir=tmp_path)
    saved = load_file(tmp_path / "checkpoints" / "step-00000020" / "ema.safetensors")
    assert saved.keys() == loop.model.state_dict().keys()


def test_weights_in_half_precision_are_averaged_as_float32():
    model, seen = toy_model().to(torch.bfloat16), []
    ema = EMA(decay=[0.99], std=[0.1], warmup="none")
    expected = {name: value.detach().float() for name, value in model.named_parameters()}
    toy_run({"ema": ema, "look": look(seen)}, model=model, objective=lambda net, batch: net(batch.inputs.bfloat16()))
    for each in seen:
        expected = {name: torch.lerp(value, each[name].float(), 1 - 0.99) for name, value in expected.items()}
    assert_same(ema.shadow, expected)
    assert {value.dtype for value in ema.shadow.values()} == {torch.float32}


def test_double_precision_is_kept():
    assert averaged([1.0] * 3, dtype=torch.float64, decay=0.9, warmup="none") == pytest.approx(1 - 0.9**3, rel=1e-15)


def test_averages_on_the_cpu_of_a_model_there_are_the_same():
    loops = [toy_run({"ema": EMA(device=device)}) for device in ("cpu", "model")]
    assert_same(*(loop.plugins["ema"].shadow for loop in loops))


@pytest.mark.cuda  # the copies are made beside the step
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_on_the_cpu_of_a_model_on_a_gpu_are_the_same(dtype):
    shadows = []
    for device in ("model", "cpu"):
        ema = EMA(decay=[0.9], std=[0.1], device=device)
        model = toy_model().to("cuda", dtype)
        loop = toy_run({"ema": ema}, model=model, objective=lambda net, batch: net(batch.inputs.to(dtype)))
        assert ema.shadow["0.weight"].device.type == ("cpu" if device == "cpu" else "cuda")
        loop.sample(SampleRequest(0))
        shadows.append({name: value.cpu() for name, value in ema.shadow.items()})
        assert ema.num_updates == 20
    for name, value in shadows[0].items():
        torch.testing.assert_close(shadows[1][name], value)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "first"), [(torch.float32, []), (torch.bfloat16, ["_foreach_copy_"])])
def test_an_update_is_one_call_per_average(dtype, first):
    ema = EMA(decay=[0.9], std=[0.05, 0.1])
    loop = toy_loop({"ema": ema}, model=toy_model().to(dtype))
    ema.on_start(loop)
    loop.progress.step = 1
    with Operations() as operations, CountTransfers() as transfers:
        ema.after_optimizer_step(loop)
    assert operations.names == [*first, *["_foreach_lerp_"] * 3]
    assert transfers.count == 0


def test_training_steps_need_no_transfer():
    assert added_transfers({"ema": EMA(decay=[0.9], std=[0.1])}) == 4  # on log steps what it logs: one each


def test_an_average_that_does_not_move_is_reported(caplog):
    toy_loop({"still": Still(), "ema": EMA()}, steps=450, log_every=50).run()
    (text,) = warnings(caplog)
    assert text.startswith("step 250: ema: the average std=0.1 ")
    assert "for 200 updates" in text
    assert "learning rate above 0" in text


def test_the_average_that_does_not_move_because_of_its_decay_is_named(caplog):
    values = [1 + n / 1000 for n in range(300)]
    ema = EMA(decay=[0.9, 1 - 1e-12], warmup="none", max_distance=9)
    toy_loop({"values": Values(values), "ema": ema}, model=Scalar(1.0), steps=300).run()
    (text,) = warnings(caplog)
    assert "the average decay=0.999999999999 " in text
    assert "for 200 updates" in text
    assert "a lower decay" in text


def test_an_average_that_moves_is_not_reported(caplog):
    toy_loop({"ema": EMA(decay=[0.9], std=[0.05, 0.1])}, steps=300, log_every=10).run()
    assert warnings(caplog) == []


class Replace:
    def __init__(self, how):
        self.how = how

    @hookimpl(trylast=True)
    def before_step(self, loop):
        if loop.progress.step == 7:
            if self.how == "parameter":
                loop.model[0].weight = nn.Parameter(loop.model[0].weight.detach().clone())
            else:
                loop.model[0].weight.data = loop.model[0].weight.data.clone()


@pytest.mark.parametrize("how", ["parameter", "storage"])
def test_replaced_parameters_are_reported(how, caplog):
    toy_loop({"ema": EMA(), "replace": Replace(how)}).run()
    (text,) = warnings(caplog)
    first = text.splitlines()[0]
    assert first.startswith("step 10: ema: ")
    assert first.endswith(": 0.weight")


def test_each_loss_of_the_weights_is_reported_once(caplog):
    far, near = [100.0] * 20, [1.0] * 40
    values = [*near, *far, *near, *far]
    ema = EMA(decay=[0.8], warmup="none", max_distance=0.3)
    toy_loop({"values": Values(values), "ema": ema}, model=Scalar(1.0), steps=len(values), log_every=2).run()
    texts = warnings(caplog)
    assert len(texts) == 3  # away, back and away again
    assert texts[0].startswith("step 42: ema: the average decay=0.8 ")
    assert "distance 0.63\n" in texts[0]


def test_a_resumed_run_does_not_report_it_again(caplog):
    first, again = EMA(), EMA()
    toy_loop({"still": Still(), "ema": first}, steps=300, log_every=50).run()
    with toy_loop({"still": Still(), "ema": again}, steps=300, log_every=50) as loop:
        restore_state(again, first.state_dict())
        for _ in loop.steps():
            pass
    assert len(warnings(caplog)) == 1


def test_each_average_is_logged():
    toy_loop({"ema": EMA(decay=0.9, std=[0.1]), "logged": (logged := Logged())}).run()
    values = dict(logged.calls)[20]
    assert {"ema/decay", "ema/distance", "ema/still", "ema/std=0.1/decay", "ema/std=0.1/distance"} <= values.keys()
    assert 0 < values["ema/distance"] < 1
    assert values["ema/std=0.1/decay"] == pytest.approx((1 - 1 / 20) ** (gamma_of(0.1) + 1), rel=1e-6)


def test_a_resumed_run_goes_on_counting_updates_without_a_change():
    def run(steps, state=None):
        logged, restores = Logged(), Restores(state, at=12)
        plugins = {"still": Still(), "ema": EMA(decay=[0.9, 0.99], std=[0.1]), "logged": logged, "restores": restores}
        toy_loop(plugins, steps=steps).run()
        return [(step, values["ema/still"]) for step, values in logged.calls], restores.state

    seen, state = run(12)
    assert seen + run(30, state)[0] == run(30)[0] == [(step, step - 5) for step in range(5, 31, 5)]


def loaded(saved, **options):
    """Load a state that another average saved into one with `options`."""
    ema = EMA(**options)
    with toy_loop({"ema": ema}) as loop:
        ema.check_state(loop.model, saved)
        restore_state(ema, saved)
        return ema.num_updates


def test_a_saved_average_of_another_kind_is_refused():
    saved = toy_run({"ema": EMA(decay=[0.9], std=[0.1])}).plugins["ema"].state_dict()
    assert loaded(saved, decay=[0.99], std=[0.1]) == 20  # a decay may change
    for options in ({"decay": [0.9]}, {"decay": [0.9], "std": [0.05]}, {"decay": [0.9, 0.99]}, {"std": [0.1, 0.05]}):
        with pytest.raises(ValueError, match=r"averages are decay=0\.9, std=0\.1, those of the run "):
            loaded(saved, **options)


def test_a_rollback_restores_the_averages():
    ema, kept, seen = EMA(decay=[0.9], std=[0.1]), Restores(at=5), []
    look = acting(before_step=lambda: seen.append((ema.num_updates, ema.shadow["0.weight"].clone())))
    toy_run({"ema": ema, "kept": kept, "bad": RollBackAt(8), "look": look})
    num_updates, average = seen[9]
    assert torch.equal(average, kept.state["plugins"]["ema"]["0.weight"])
    assert (num_updates, ema.num_updates) == (5, 20)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64, torch.complex128])
def test_weights_of_any_kind_can_be_averaged(dtype):
    model = nn.ParameterDict({"scalar": torch.ones((), dtype=dtype), "matrix": torch.ones(2, 2, dtype=dtype).T})
    ema, loop = EMA(decay=0.5, warmup="none"), toy_loop(model=model)
    ema.on_start(loop)
    with torch.no_grad():
        model["scalar"].fill_(3)
    for step in (5, 10):  # both are logged
        loop.progress.step = step
        ema.after_optimizer_step(loop)
    assert ema.shadow["scalar"] == 2.5
    assert ema.shadow["scalar"].dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(ema.shadow["matrix"], torch.ones(2, 2, dtype=ema.shadow["matrix"].dtype))


@pytest.mark.wide
def test_float32_reaches_where_half_precision_stops():
    ema, loop = EMA(decay=0.9999, warmup="none"), toy_loop(model=Scalar())
    ema.on_start(loop)
    loop.progress.step = 1  # at which nothing is logged
    with torch.no_grad():
        loop.model.value.fill_(1)
    for _ in range(100_000):
        ema.after_optimizer_step(loop)
    assert ema.shadow["value"].item() == pytest.approx(0.999701976776, abs=1e-9)  # 0.999954622766 in exact numbers
