"""Randomness that depends on what is drawn, not on who draws it or what was drawn before.

Every draw is keyed by (run seed, purpose, step, sample id). So any number of ranks, any micro-batch size and a resumed
run draw the same numbers, and no generator state has to be saved.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def key(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit hash of the run seed, a purpose and any number of ids (step, sample id, ...)."""
    text = "/".join([str(seed), purpose, *map(str, ids)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def torch_seed(seed: int, purpose: str, *ids: int) -> int:
    """What to seed a torch generator with: a 32-bit hash of all but the last id, plus the last one.

    torch's CPU generator uses 32 bits of a seed and no more. So two keys that differ in the last id alone (samples of
    one step, ranks) never have the same numbers while these ids lie within a range of 2^32. Any two other keys have the
    same ones with probability 2^-32; two steps whose hashes lie that close share those of many samples.
    """
    *others, last = ids or (0,)
    return (key(seed, purpose, *others) + last) % 2**32


def generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """A CPU generator for one key, see ``torch_seed``; CPU, so that the numbers are the same on every device."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, *ids))


def normal(shape: Sequence[int], seed: int, purpose: str, step: int, sample_ids: Sequence[int]) -> Tensor:
    """Standard normal ``[len(sample_ids), *shape]`` float32 on the CPU, one key per sample."""
    return torch.stack([torch.randn(tuple(shape), generator=generator(seed, purpose, step, i)) for i in sample_ids])


def uniform(seed: int, purpose: str, step: int, sample_ids: Sequence[int]) -> Tensor:
    """Uniform in (0, 1), ``[len(sample_ids)]`` float64 on the CPU, one key per sample: the key itself, scaled.

    Hash values are uniform already, and seeding a generator for one number costs more than the hash.
    """
    keys = [key(seed, purpose, step, i) for i in sample_ids]
    return (torch.tensor(keys, dtype=torch.float64) + 0.5) / 2.0**63


def scalar_normal(seed: int, purpose: str, step: int, sample_ids: Sequence[int]) -> Tensor:
    """One standard normal per sample, ``[len(sample_ids)]`` float64 on the CPU: ``uniform`` inverted."""
    return torch.special.ndtri(uniform(seed, purpose, step, sample_ids))
