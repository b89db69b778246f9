"""Flow matching (Lipman et al. 2023, arXiv 2210.02747, eq. 14; rectified flow, Liu et al. 2022, arXiv 2209.03003)."""

from torch import Tensor

from cosmos_rl.diffusion.elements import element_mean


def flow_matching_loss(
    velocity: Tensor,
    clean: Tensor,
    noise: Tensor,
    *,
    element_mask: Tensor | None = None,
    weight_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over the batch of ``mean((velocity - (noise - clean))^2)``, and the weight to divide it by.

    The caller divides by the weight of the whole optimiser step, so that micro-batches, ranks and dropped samples never
    change the gradient.

    Args:
        velocity: ``[B, C, ...]`` predicted, any float dtype; the difference is taken in float32.
        clean, noise: ``[B, C, ...]``, the two ends of the path.
        element_mask: which elements count, broadcastable to ``velocity``.
        weight_B: factor on each sample's loss, 1 when not given.

    Returns:
        ``(sum, weight)``, two scalars; ``weight`` is the number of samples: a factor scales a sample's loss, it does
        not change what the mean is over.
    """
    per_sample_B = element_mean((velocity.float() - (noise.float() - clean.float())) ** 2, element_mask)
    count = per_sample_B.new_tensor(float(len(per_sample_B)))
    if weight_B is not None:
        per_sample_B = per_sample_B * weight_B
    return per_sample_B.sum(), count


def combine_weights(one_B: Tensor | None, other_B: Tensor | None) -> Tensor | None:
    """The product of two factors on each sample's loss; None is 1."""
    if one_B is None or other_B is None:
        return one_B if other_B is None else other_B
    return one_B * other_B
