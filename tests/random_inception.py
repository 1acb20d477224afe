"""Inception with random weights, as torchvision and the packages that compute FID load them, and pictures for it."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import inception


def random_network() -> inception.Inception3:
    """Return torchvision's network with random weights, whose activations neither vanish nor grow."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = inception.Inception3(num_classes=1008, aux_logits=False, init_weights=False)
        for module in made.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.8, 1.2)
                nn.init.normal_(module.bias, 0, 0.1)
                nn.init.normal_(module.running_mean, 0, 0.1)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
    return made.eval().requires_grad_(False)


def pictures(num: int, *shape: int, seed: int = 0) -> Tensor:
    """Return smooth pictures with some noise: n c h w, uint8."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(num, shape[0], 4, 4, generator=generator) * 255
    smooth = functional.interpolate(coarse, size=shape[1:], mode="bicubic", align_corners=False)
    return (smooth + 10 * torch.randn(num, *shape, generator=generator)).clamp(0, 255).to(torch.uint8)
