"""The sampling steps that FlowGRPO and DDRL keep in host memory: their bytes, and whether they are allowed."""

from dataclasses import dataclass

from cosmos_rl.policy.config.plan import STEP_TRAINERS, keeps_velocity, plan_online, samples_with_old
from cosmos_rl.policy.config.ranks import data_ranks
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.train_policy import GrpoPolicyConfig


@dataclass(frozen=True)
class RecordedSteps:
    """What a rank keeps. In float32: the ratio of a policy to itself has to be exactly 1, so nothing is rounded."""

    samples: int
    steps: int
    """Of each sample."""
    tensors: tuple[str, ...]
    """Of each step."""
    latent: int
    """Bytes of one of them."""
    times: int
    """How often all of it is there at the height of a training step: as the rollout left it, and as the rows of an
    optimiser step; where shuffled batches move samples to other ranks, also what each pass needs."""

    @property
    def kept(self) -> int:
        """Bytes that the rollout leaves: next to the tensors four numbers for each step."""
        return self.samples * self.steps * (len(self.tensors) * self.latent + 32)

    @property
    def height(self) -> int:
        """Bytes at the height of a training step."""
        return self.times * self.kept


def recorded_steps(config: Config, elements: int) -> RecordedSteps | None:
    """Of latents of so many elements; None: the trainer learns from finished samples."""
    job = config.train.train_policy
    if not isinstance(job, GrpoPolicyConfig) or job.trainer_type not in STEP_TRAINERS:
        return None
    plan, moved, tensors = plan_online(config), 1, ("state", "noise")
    if plan.optimizer_steps > job.mu_iterations:  # in shuffled batches
        moved = min(job.mu_iterations, data_ranks(config.policy.parallelism))
    if keeps_velocity(config):
        tensors = (*tensors, "velocity")
    return RecordedSteps(plan.samples, plan.sigmas, tensors, 4 * elements, 1 + moved)


def recorded_problem(config: Config, elements: int) -> str | None:
    """That the recorded steps of latents of so many elements take more than the configuration allows."""
    job, recorded = config.train.train_policy, recorded_steps(config, elements)
    if recorded is None or not isinstance(job, GrpoPolicyConfig) or recorded.height <= job.steps.max_gb * 1e9:
        return None
    tensors, size = recorded.tensors, f"{recorded.height / 1e9:.3g} GB per rank"
    return (
        f"train.train_policy.steps.max_gb: found {job.steps.max_gb:g}; recorded steps take {recorded.samples} samples "
        f"of a rank x {recorded.steps} trained steps x {len(tensors)} tensors ({', '.join(tensors)}) of "
        f"{recorded.latent} bytes, held {recorded.times} times while it learns = {size}; allowed: more than that, or "
        f"{', '.join(_ways_to_record_less(config, recorded))}"
    )


def _ways_to_record_less(config: Config, recorded: RecordedSteps) -> list[str]:
    job, batch, steps = (
        config.train.train_policy,
        "train.train_batch_per_replica",
        "policy.diffusers.timesteps_fraction",
    )
    assert isinstance(job, GrpoPolicyConfig)
    if config.train.global_batch_size is not None:
        batch = "train.global_batch_size"
    if job.steps.choose in ("list", "window"):
        steps = {"list": "train.train_policy.steps.indices", "window": "train.train_policy.steps.size"}[
            job.steps.choose
        ]
    ways = [f"fewer trained steps ({steps})", f"fewer samples ({batch})", "more ranks"]
    if "velocity" in recorded.tensors and not samples_with_old(config):
        ways.append(
            "one optimiser step, without velocities (train.train_policy.batch_size_per_optimize, mu_iterations)"
        )
    return ways
