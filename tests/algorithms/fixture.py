"""The two rows and the transition that the golden numbers of the online objectives were computed on."""

import numpy as np
import torch
from torch import Tensor

CLEAN = np.array([[0.5, -1.0, 0.25, 2.0], [1.5, 0.0, -0.75, -0.5]])
NOISE = np.array([[-0.2, 0.4, 1.0, -1.2], [0.8, -0.6, 0.3, 1.1]])
SIGMA = np.array([0.6, 0.3])
NOISED = (1 - SIGMA[:, None]) * CLEAN + SIGMA[:, None] * NOISE
TARGET = NOISE - CLEAN
NEW = TARGET + np.array([[0.02, -0.15, 0.25, -0.05], [0.3, 0.1, -0.2, 0.1]])
OLD = TARGET + np.array([[0.05, -0.1, 0.2, 0.1], [0.1, 0.2, -0.2, 0.3]])
REFERENCE = TARGET + np.array([[0.1, -0.2, 0.3, 0.0], [0.2, 0.1, -0.1, 0.4]])
ADVANTAGE = np.array([0.8, -0.5])
XI = np.array([[0.3, -1.1, 0.7, 0.2]])
"""Noise of the first row's step from 0.6 to 0.5."""


def doubles(values: np.ndarray | list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)
