"""What a user is told when memory runs out: where, what needs how much, and what to change. No torch."""

from collections.abc import Iterator

from cosmos_rl.launcher.check import Report
from cosmos_rl.policy.config import Config, rollout_chunk


def told(config: Config, phase: str, *, on_cpu: bool) -> str:
    """The message for a run of ``config`` whose memory ran out in ``phase``, a name that ``memory_phase`` gave."""
    report = Report(config, on_cpu, own_data=True)
    lines = [f"out of memory on {'the CPU' if on_cpu else 'a GPU'} while {phase}", "estimate for each rank:"]
    lines += [f"  {line}" for line in report.memory()]
    lines += ["what needs less memory, in the order in which to try:"]
    return "\n".join([*lines, *(f"  {line}" for line in _remedies(config, phase, on_cpu=on_cpu))])


def _remedies(config: Config, phase: str, *, on_cpu: bool) -> Iterator[str]:
    policy, train, job = config.policy, config.train, config.train.train_policy
    at_once = config.validation.batch_size or job.mini_batch
    if phase == "validating" and at_once > 1:
        yield f"validation.batch_size = 1, now {at_once}"
    rollout, chunk = config.rollout, rollout_chunk(config)
    if phase == "sampling" and chunk > 1:
        less = min(rollout.n_generation, max(chunk // 2, 1))
        yield f"rollout.n_generation_mini_batch = {less}; now {chunk} samples are made at once"
    if phase == "saving" and train.ckpt.save_mode == "async":
        yield 'train.ckpt.save_mode = "sync": no copy of the state is kept'
    if job.mini_batch > 1:
        yield f"train.train_policy.mini_batch = 1, now {job.mini_batch}; the samples of a step stay as they are"
    if not on_cpu and not (job.cached_latents or job.cached_text):
        yield "train.train_policy.enable_dataset_cache = true: the encoders leave the GPU"
    if not on_cpu and not policy.diffusers.offload:
        yield "policy.diffusers.offload = true: the encoders leave the GPU while they are not used"
    if not policy.model_gradient_checkpointing:
        yield "policy.model_gradient_checkpointing = true"
    if policy.diffusers.dtype == "float32":
        yield 'policy.diffusers.dtype = "bfloat16" for the text encoders'
    if train.param_dtype == "float32":
        yield 'train.param_dtype = "bfloat16" for what is computed'
    if policy.lora is None:
        yield "[policy.lora] in place of all weights"
    yield f"a smaller policy.diffusers.inference_size, now {list(policy.diffusers.inference_size)}"
    if not train.optm_name.endswith("8bit"):
        yield f'train.optm_name = "{train.optm_name}8bit"'
    if train.ema_enable:
        yield "train.ema_enable = false"
    if not on_cpu:
        yield f"more GPUs: policy.parallelism.dp_shard_size, now {policy.parallelism.dp_shard_size}"
