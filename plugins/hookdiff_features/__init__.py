"""Provides networks for features of images: Inception with the recipes of four packages, DINOv2, classifiers."""

from hookdiff_features.classifiers import Digits, FashionMNIST
from hookdiff_features.dinov2 import DINOv2
from hookdiff_features.spaces import Inception, TorchvisionInception

__all__ = ["DINOv2", "Digits", "FashionMNIST", "Inception", "TorchvisionInception"]
