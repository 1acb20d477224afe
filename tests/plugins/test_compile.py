"""The plugin `compile` with torch's "eager" backend, which does all but compile; the slow tests compile, too."""

import sys

import numpy
import pytest
import torch
from torch import nn

from hookdiff import ConfigError, Feed, SampleRequest, UserError, load_config
from hookdiff.experiment.probe import try_config
from hookdiff.models.compiler import compiled
from hookdiff.testing import assert_resumes, assert_same, toy_loop, toy_model, weights
from hookdiff_checkpoint import Checkpoint
from hookdiff_compile import Compile
from hookdiff_ema import EMA
from tests.conftest import check_facts, finish, refused, toy_run, wide
from tests.data.test_shape_order import Shaped
from tests.forked import python


@pytest.fixture(autouse=True)
def _forget():
    torch.compiler.reset()  # the models of all tests share their code, which torch compiles for so many of them only
    yield
    torch.compiler.reset()


class Counter:
    """A backend that compiles nothing and counts what it is given."""

    def __init__(self, fails_from=None):
        self.graphs, self.fails_from = 0, fails_from

    def __call__(self, graph, inputs):
        self.graphs += 1
        if self.fails_from is not None and self.graphs >= self.fails_from:
            raise RuntimeError("the kernel is out of popcorn\nand of salt")
        return graph.forward


def registered(backend):
    torch._dynamo.register_backend(backend, f"hd_{id(backend)}")
    return f"hd_{id(backend)}"


class Net(nn.Sequential):
    """The toy net as a class of its own: the compiler of torch 2.11 skips torch's own containers."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class Image(nn.Module):
    """A net for images of any size."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.inner(x)


def net(**options):
    return Net(*toy_model(**options))


def ran(plugins, steps=6, **options):
    loop = toy_run(plugins, steps=steps, **{"model": net(), "micro_batch": 3, **options})
    return loop


def test_compiled_training_gives_the_same_weights_and_names():
    counter = Counter()
    compiled, plain = ran({"compile": Compile(backend=registered(counter)), "ema": EMA()}), ran({"ema": EMA()})
    assert counter.graphs >= 2  # the probe, the net; and the net again for the smaller last part
    assert list(compiled.model.state_dict()) == list(toy_model().state_dict())
    assert_same(weights(compiled), weights(plain))
    assert type(compiled.model) is Net


@pytest.mark.parametrize(("dynamic", "most"), [(False, 12), (None, 4)])
def test_each_shape_of_samples_is_compiled_at_most_once(dynamic, most):
    counter, shapes = Counter(), set()

    def objective(net, batch):
        shapes.add(batch.inputs.shape[1:])
        return net(batch.inputs).square().mean()

    options = {"model": Image(), "objective": objective, "data": Feed(Shaped([8] * 12)), "epochs": 3}
    toy_run({"compile": Compile(backend=registered(counter), dynamic=dynamic)}, **options)
    assert len(shapes) == 12
    assert 1 < counter.graphs - 1 <= most  # without the trial of the backend
    assert torch._dynamo.config.recompile_limit == 8  # as before


def test_sampling_with_an_average_leaves_the_compiled_model_as_it_was():
    loops = [toy_loop({**given, "ema": EMA(decay=0.5)}) for given in ({"compile": Compile(backend="eager")}, {})]
    images = []
    for loop in loops:
        with loop:
            for step in loop.steps():
                if step.step == 7:
                    images.append(loop.sample(SampleRequest(5)))
    assert [made.weights for made in images] == ["ema", "ema"]
    assert torch.equal(images[0].images, images[1].images)
    assert_same(weights(loops[0]), weights(loops[1]))


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_run_may_resume_with_or_without_the_compiler(tmp_path, before, after):
    def plugins(is_compiled):
        return {**({"compile": Compile(backend="eager")} if is_compiled else {}), "checkpoint": Checkpoint(every=3)}

    ran(plugins(before), steps=3, run_dir=tmp_path, model=net(dropout=0.3))
    resumed = ran(plugins(after), run_dir=tmp_path, resume=True, model=net(seed=1, dropout=0.3))
    assert_same(weights(resumed), weights(ran({}, model=net(dropout=0.3))))


def test_an_unknown_backend_is_refused_with_the_nearest():
    with refused(UserError, "plugins.compile.backend", "inductr", "inductor"):
        toy_loop({"compile": Compile(backend="inductr")}).run()


@pytest.mark.parametrize("fails_from", [1, 2])
def test_a_compiler_that_fails_is_one_message(fails_from):
    compile_ = Compile(backend=registered(Counter(fails_from)))
    facts = ("plugins.compile", compile_.backend, "RuntimeError", "the kernel is out of popcorn")
    with refused(UserError, *facts, "--plugins no:compile") as caught:
        toy_loop({"compile": compile_}, model=net()).run()
    assert "salt" not in str(caught.value)  # the first line says it


def test_an_error_of_the_model_is_raised_unchanged():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        toy_loop({"compile": Compile(backend="eager")}, model=Wrong()).run()


@pytest.fixture
def config(write_config):
    return write_config(
        run={"steps": 4, "batch_size": 10, "micro_batch": 4, "log_every": 1, "plugins": ["ema", "compile", "samples"]},
        model={"use": "dit", "patch_size": 4, "hidden_size": 16, "depth": 1},
        plugins={"samples": {"num": 4}},
    )


def test_a_mode_is_one_of_torch_s_own_compiler(config):
    settings = ["plugins.compile.mode=max-autotune", "plugins.compile.backend=eager"]
    with refused(ConfigError, "plugins.compile", "mode", "max-autotune", "inductor"):
        try_config(load_config(config, settings=settings))


def without_compiler(folder, *words):
    """Run a command of hookdiff in a process where torch finds no compiler: exit code and stderr."""
    # As the variable CXX has it in a new process; this one is forked from one that has imported torch.
    setting = "import torch._inductor.config as config; config.cpp.cxx = (None, '/nothing')"
    command = f"{setting}\nfrom hookdiff.cli import main; main()"
    code, _, err = python(command, *words, folder=folder, TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"))
    return code, err[-2000:]


NAMED_COMPILER = pytest.mark.skipif(sys.platform != "linux", reason="torch finds its compiler by this only there")
OF_SAMPLING = ("sampling.compile", "InvalidCxxCompiler", "sampling.compile = false")


@NAMED_COMPILER
@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ((), ("plugins.compile", "inductor", "InvalidCxxCompiler", "--plugins no:compile")),
        *wide((("--plugins", "no:compile", "--set", "sampling.compile=true"), OF_SAMPLING)),
    ],
)
def test_a_run_on_a_machine_without_a_compiler_is_refused_before_it_starts(words, facts, config, tmp_path):
    code, err = without_compiler(tmp_path, "run", config, "--out", "run", *words)
    assert code == 2, err
    check_facts(err, *facts)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *({"mode": mode} for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
        *({"dynamic": dynamic} for dynamic in (True, False)),
    ],
    ids=str,
)
def test_the_compiler_changes_only_rounding(options):
    compiled, plain = ran({"compile": Compile(**options), "ema": EMA()}, steps=20), ran({"ema": EMA()}, steps=20)
    for name, value in weights(plain).items():
        torch.testing.assert_close(compiled.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_run_resumes_to_the_bit():
    assert_resumes(Compile, at=[3], others={"ema": EMA}, model=net(dropout=0.3), steps=6, micro_batch=3)


@pytest.mark.slow
def test_a_run_from_a_config_trains_and_makes_images(start, config, tmp_path):
    settings = ("--set", "run.micro_batch=none", "--set", "plugins.compile.dynamic=false")
    cache = str(tmp_path / "cache")
    words = ("run", config, "--out", "run", *settings)
    code, _, err = finish(start(tmp_path, *words, fresh=True, TORCHINDUCTOR_CACHE_DIR=cache))
    assert code == 0, err[-2000:]
    assert (tmp_path / "run" / "samples" / "step-00000004.png").exists()


TO_SAMPLE = "no:compile,no:samples,checkpoint"


@NAMED_COMPILER
@pytest.mark.wide
def test_sampling_without_a_compiler_is_one_message(start, config, tmp_path):
    assert finish(start(tmp_path, "run", config, "--out", "run", "--plugins", TO_SAMPLE))[0] == 0
    code, err = without_compiler(tmp_path, "sample", "run", "--num", "2", "--compile")
    assert code == 2, err
    check_facts(err, *OF_SAMPLING)
    assert not (tmp_path / "run" / "samples").exists()


@pytest.mark.slow
def test_a_compiled_network_samples_the_same_images_and_trains_on_as_it_was(start, config, tmp_path):
    assert finish(start(tmp_path, "run", config, "--out", "run", "--plugins", TO_SAMPLE))[0] == 0
    images = []
    for extra in ((), ("--compile",)):
        out = tmp_path / f"{len(images)}.npz"
        code, _, err = finish(start(tmp_path, "sample", "run", "--num", "5", "--batch-size", "3", "--out", out, *extra))
        assert code == 0, err[-2000:]
        images.append(numpy.load(out)["arr_0"].astype(int))
    assert numpy.abs(images[0] - images[1]).max() <= 1
    loops = [toy_loop({}, model=net()) for _ in range(2)]
    with loops[0] as loop:
        list(loop.steps())
        compiled(loop.model)(torch.zeros(2, 4))
        assert loop.model._compiled_call_impl is None
    loops[1].run()
    assert_same(weights(loops[0]), weights(loops[1]))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at the inputs of a block
def test_blocks_are_compiled_on_their_own_and_equal_ones_once():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Net(nn.Linear(4, 4), nn.SiLU()) for _ in range(5))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    whole, parts = Counter(), Counter()
    runs = []
    for counter, blocks in ((whole, ()), (parts, ("blocks.*",))):
        torch.manual_seed(0)
        runs.append(ran({"compile": Compile(backend=registered(counter), blocks=blocks)}, model=Deep(), micro_batch=8))
    assert_same(weights(runs[0]), weights(runs[1]))
    assert 0 < parts.graphs < 5
    assert runs[1].model._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in runs[1].model.blocks)
    with refused(UserError, "plugins.compile.blocks", "'block.*'", "did you mean"):
        ran({"compile": Compile(backend="eager", blocks=("block.*",))}, model=Deep())
