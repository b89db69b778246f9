"""What several checks of a model measure."""

import math
from collections.abc import Iterator

from torch import Tensor

from cosmos_rl.launcher.doctor.finding import WARN, Finding, choose_mark
from cosmos_rl.policy.model.diffusers import PipelineModel


def check_gradients(model: PipelineModel, weight: float) -> Iterator[Finding]:
    """Whether the trained weights have gradients, of which norm; these are of a sum of losses of ``weight``."""
    grads = {name: p.grad for name, p in model.trainable_parameters().items()}
    without = [name for name, grad in grads.items() if grad is None]
    norm = math.sqrt(sum(float(grad.float().square().sum()) for grad in grads.values() if grad is not None))
    sound = math.isfinite(norm) and norm > 0
    yield Finding(choose_mark(sound), "backward", f"gradient norm {norm / weight:.4g}")
    if without:
        yield Finding(WARN, "gradients", f"{len(without)} of {len(grads)} trained tensors get none, as {without[0]}")


def relative_distance(one: Tensor, other: Tensor) -> float:
    """Root mean square of the difference over that of `other`; not a number counts as infinitely far."""
    ratio = float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-12))
    if not math.isfinite(ratio):
        return math.inf
    return ratio
