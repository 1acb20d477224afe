"""What a config leaves to the machine is settled by rules, recorded, and kept by a resumed run."""

import pytest
import tomli
import tomli_w
import torch
from diffusers import UNet2DModel

import hookdiff.experiment.machine_choices as settle_module
from hookdiff import build_loop, load_config
from hookdiff.experiment.machine_choices import prepare_process, recorded, settle
from hookdiff.testing.compare import assert_same, weights
from tests.conftest import check_facts, finish, output, ran

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def set_bf16(monkeypatch, is_native):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": is_native})


def formed(config, device=CPU, before=None):
    """Return precision, channels_last and whether the threads are a number, as they are settled."""
    settled = settle(config, device, before or {})
    precision = settled.plugins["amp"].arguments["precision"] if "amp" in settled.plugins else None
    return precision, settled.run.channels_last, isinstance(settled.run.threads, int)


def test_precision_and_memory_format_are_chosen_together(load_small, monkeypatch):
    config = load_small(plugins=["amp"])
    set_bf16(monkeypatch, True)
    assert (formed(config), formed(load_small())) == (("bf16", False, True), (None, True, True))
    set_bf16(monkeypatch, False)
    assert formed(config) == ("off", True, True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert formed(config, CUDA) == ("bf16", False, False)


def test_what_the_config_says_comes_first(load_small, monkeypatch):
    set_bf16(monkeypatch, True)
    explicit = load_small("run.channels_last=true", "plugins.amp.precision=off", "run.threads=3", plugins=["amp"])
    settled = settle(explicit, CPU, {"run": {"channels_last": False, "threads": 1}})
    assert (settled.run.channels_last, settled.run.threads) == (True, 3)
    assert settled.plugins["amp"].arguments["precision"] == "off"
    assert formed(load_small("plugins.amp.precision=bf16", plugins=["amp"]))[1] is False


def of_diffusers() -> torch.nn.Module:
    blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
    return UNet2DModel(8, 1, 1, block_out_channels=[8], norm_num_groups=2, **blocks)


def test_a_network_of_diffusers_and_a_gpu_keep_the_usual_memory_format(load_small, tmp_path):
    model = {"use": "diffusers:UNet2DModel", "block_out_channels": [8], "norm_num_groups": 2}
    blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}
    config = load_small(model={**model, **blocks})
    assert settle(config, CPU, {}).run.channels_last is False
    by_function = {"use": f"{__name__}:of_diffusers"}
    assert build_loop(load_small(model=by_function), tmp_path / "run").hparams["run"]["channels_last"] is False
    assert [settle(load_small(), one, {}).run.channels_last for one in (CPU, CUDA)] == [True, False]


def test_a_resumed_run_takes_the_choices_of_before(load_small, monkeypatch):
    config = load_small(plugins=["amp"])
    set_bf16(monkeypatch, True)
    before = settle(config, CPU, {}).resolved()
    set_bf16(monkeypatch, False)
    assert formed(config, CPU, before) == ("bf16", False, True)
    # On a device of another kind they would be slow, and bits differ in any case.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    exact = settle(config, CPU, {}).resolved()
    assert formed(config, CUDA, exact) == ("fp16", False, False)


def test_choices_are_recorded_and_kept_by_a_run(load_small, tmp_path, start, monkeypatch):
    set_bf16(monkeypatch, True)
    path = load_small(run={"steps": 4, "plugins": ["amp", "checkpoint"]}).path
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    build_loop(load_config(path), whole).run()
    build_loop(load_config(path, settings=["run.steps=2"]), halves).run()
    table = tomli.loads((halves / "config.toml").read_text())
    assert table["plugins"]["amp"]["precision"] == "bf16"
    assert table["run"]["channels_last"] is False
    assert (table["run"]["threads"], table["run"]["attention"]) == (torch.get_num_threads(), "by_layer")
    set_bf16(monkeypatch, False)  # as on another machine
    loop = ran(build_loop(load_config(path), halves, resume=True))
    assert loop.progress.step == 4
    with build_loop(load_config(path, settings=["plugins.amp.precision=bf16"]), whole, resume=True) as expected:
        assert_same(weights(loop), weights(expected))


def test_threads_are_those_of_before_if_they_are_there(load_small, monkeypatch, caplog):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(settle_module, "usual_threads", lambda: 2)
    monkeypatch.setattr(settle_module, "num_cpus", lambda: 4)

    def threads(before):
        return settle(load_small(), CPU, {"run": {"threads": before}}).run.threads

    assert (threads(3), threads(2)) == (3, 2)
    assert not caplog.records
    assert threads(8) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # such as by torchrun: more threads would stand in each other's way
    assert threads(3) == 2
    for message, before in zip(caplog.messages, (8, 3), strict=True):
        check_facts(message, "run.threads", 2, before, "bit for bit")


def test_a_resumed_run_keeps_the_meaning_that_its_config_does_not_set(load_small, caplog):
    old = {"diffusion": {"process": {"use": "vp", "schedule": {"use": "cosine"}}, "prediction": "epsilon"}}
    old |= {"sampling": {"clipping": "none", "steps": 7, "spacing": "leading"}}
    caplog.set_level("INFO")
    settled = settle(load_small("sampling.steps=9"), CPU, old)
    diffusion, sampling = settled.resolved()["diffusion"], settled.resolved()["sampling"]
    assert diffusion["prediction"]["use"] == "epsilon"
    assert diffusion["process"]["schedule"]["use"] == "cosine"
    assert (sampling["clipping"]["use"], sampling["spacing"]["use"], sampling["steps"]) == ("none", "leading", 9)
    told = " ".join(caplog.messages)
    check_facts(told, "diffusion.prediction", "epsilon", "sampling.spacing", "leading")
    assert "sampling.steps" not in told


def test_nothing_is_kept_for_another_process(load_small, caplog):
    old = settle(load_small(diffusion={"process": "flow"}), CPU, {}).resolved()
    assert old["sampling"]["spacing"]["use"] == "shifted"
    caplog.set_level("INFO")
    settled = settle(load_small(diffusion={"process": "ddpm"}), CPU, old).resolved()
    assert settled["sampling"]["spacing"]["use"] != "shifted"
    assert not caplog.records


def test_what_the_data_decides_is_not_said_to_be_kept(load_small, caplog):
    old = settle(load_small(), CPU, {}).resolved()
    old["diffusion"]["conditional"] = False
    caplog.set_level("INFO")
    settle(load_small(), CPU, old)
    assert not caplog.records


@pytest.mark.parametrize(("threads", "is_warned"), [(1, False), (1024, True)])
def test_more_threads_than_cpus_are_warned_of(load_small, monkeypatch, caplog, threads, is_warned):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    prepare_process(load_small(f"run.threads={threads}"), CPU)
    assert ["run.threads: 1024" in message for message in caplog.messages] == [True] * is_warned


def test_a_choice_of_a_resumed_run_need_not_fit_the_default_process(load_small):
    old = {"diffusion": {"process": {"use": "ddpm"}, "prediction": {"use": "epsilon"}, "label_dropout": 0.3}}
    settled = settle(load_small(diffusion={"process": "ddpm"}), CPU, old).resolved()["diffusion"]
    assert (settled["prediction"]["use"], settled["label_dropout"]) == ("epsilon", 0.3)


def test_a_run_says_what_was_chosen(load_small, monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    set_bf16(monkeypatch, True)
    build_loop(load_small("run.threads=1", plugins=["amp"]), tmp_path / "run")
    assert caplog.messages == ['chosen for this cpu: run.channels_last = false, plugins.amp.precision = "bf16"']
    caplog.clear()
    explicit = ("run.threads=1", "run.channels_last=true", "plugins.amp.precision=bf16")
    build_loop(load_small(*explicit, plugins=["amp"]), tmp_path / "explicit")
    build_loop(load_small(plugins=["amp"]), tmp_path / "sampling", hooks=("sample",))
    assert not caplog.records


def test_a_damaged_record_is_written_anew(load_small, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("not TOML")
    assert recorded(tmp_path / "run", True) == {}
    (tmp_path / "run" / "config.toml").write_text(tomli_w.dumps({"plugins": 3, "run": {"threads": 5}}))
    assert recorded(tmp_path / "run", False) == {}
    assert recorded(tmp_path, tmp_path / "run") == {"run": {"threads": 5}}


@pytest.mark.parametrize(
    "damaged",
    [
        {"run": {"threads": -3, "channels_last": "often"}, "plugins": {"amp": {"precision": "int3"}}},
        {"run": {"threads": True}, "plugins": {"amp": 4}, "diffusion": {"prediction": "psi"}},
    ],
)
def test_recorded_values_that_do_not_fit_are_chosen_anew(load_small, monkeypatch, damaged):
    set_bf16(monkeypatch, True)
    config = load_small(plugins=["amp"])
    assert formed(config, CPU, damaged) == ("bf16", False, True)
    assert settle(config, CPU, damaged).resolved()["diffusion"] == config.resolved()["diffusion"]


@pytest.mark.wide
def test_the_command_sets_the_threads(write_config, start, tmp_path):
    write_config("small.toml", run={"steps": 1})
    output(finish(start(tmp_path, "run", "small.toml", "--set", "run.threads=2", "--out", "run")))
    assert '"threads": 2' in (tmp_path / "run" / "events.jsonl").read_text()
