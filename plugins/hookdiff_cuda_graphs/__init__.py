"""Records a step as CUDA graphs and replays it, so that the host need not start each kernel."""

from hookdiff_cuda_graphs.plugin import CudaGraphs

__all__ = ["CudaGraphs"]
