"""A model that cannot be trained is refused in one message by each command, and one that can be trained is not."""

import pytest
import torch
from torch import nn

from hookdiff import UserError
from hookdiff.testing.toy import toy_loop, toy_model
from tests.conftest import check_facts, mostly_wide, output, refused

NETS = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x, t):
        return self.conv(x)

class NoGrad(Plain):
    @torch.no_grad()
    def forward(self, x, t):
        return self.conv(x)

class Detached(Plain):
    def forward(self, x, t):
        return self.conv(x).detach()

class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)

class OnlyInTraining(Plain):
    def forward(self, x, t):
        return self.conv(x) if self.training else self.conv(x).detach()

class Fourier(Plain):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 1, 8, 5, dtype=torch.complex64))

    def forward(self, x, t):
        return torch.fft.irfft2(torch.fft.rfft2(self.conv(x)) * self.scale, s=x.shape[-2:])

class Video(nn.Module):
    def __init__(self):
        super().__init__()
        self.frames, self.norm = nn.Conv3d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 1)

    def forward(self, x, t):
        return self.frames(x) + self.norm(x.flatten(1, 2).flatten(0, 1)[:, None]).reshape(x.shape)

class Clips(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.linspace(-1, 1, 128).reshape(1, 2, 8, 8) * (index % 3 - 1)
"""


@pytest.fixture
def write(user_module, write_config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    user_module("hd_nets", NETS)
    return lambda name, **tables: write_config(run={"steps": 2}, model={"use": f"hd_nets:{name}"}, **tables)


@pytest.mark.parametrize(
    ("name", "facts"),
    mostly_wide(
        1,
        [
            ("NoGrad", ["hd_nets:NoGrad", "gradient", "no_grad"]),
            ("Detached", ["hd_nets:Detached", "gradient", "detach"]),
            ("Frozen", ["gradient", "optimizer"]),
            ("Fourier", ["model", "scale", "complex64"]),
        ],
    ),
)
def test_it_is_one_message_of_each_command(write, hookdiff, tmp_path, name, facts):
    config = write(name)
    for words in (["run", config, "--out", "out"], ["check", config], ["doctor", config, "--steps", 2]):
        code, out, err = hookdiff(*words)
        assert (code, out, err.count("hookdiff: ")) == (2, "", 1), words
        check_facts(err, *facts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "data", "channels_last"),
    [
        ("OnlyInTraining", "digits", "auto"),
        *mostly_wide(1, [("Video", "hd_nets:Clips", form) for form in ("auto", "true", "false")]),
    ],
)
def test_others_train(write, hookdiff, tmp_path, name, data, channels_last):
    config = write(name, data={"source": data})
    assert hookdiff("check", config)[0] == 0
    output(hookdiff("run", config, "--out", "out", "--set", f"run.channels_last={channels_last}"))


def test_a_script_gets_the_same_messages():
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = toy_model()

        def forward(self, x):
            return self.inner(x).detach()

    class Complex(Held):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    with refused(UserError, "gradient", "detach"):
        toy_loop(model=Held()).run()
    with refused(UserError, "phase", "complex64", "(4, 2)"):
        toy_loop(model=Complex()).run()


def test_a_frozen_complex_weight_is_no_obstacle():
    model = toy_model()
    model.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=False)
    assert toy_loop(model=model).run() == "done"
