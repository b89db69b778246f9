"""What tests of kernels share: grids, the noisy solvers, seeded tensors."""

import pytest
import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import Kernel, build_kernel

QUARTERS = [1.0, 0.75, 0.5, 0.25, 0.0]
HARD = [1.0, 0.9, 0.5, 0.1, 0.0]
noisy = pytest.mark.parametrize("solver", ["flow", "flow_linear", "dance", "ddim", "cps"])


def noisy_kernel(solver: str, noise_level: float) -> Kernel:
    return build_kernel(solver, noise_level=noise_level, deterministic=False)


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
