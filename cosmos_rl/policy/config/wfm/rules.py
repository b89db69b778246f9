"""Which keys of the older configuration are which of the present one, and which have no counterpart."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

JOB, SAMPLE, RANKS = "train.train_policy", "policy.diffusers.sample", "policy.parallelism"
RL, REWARDS, REMOTE = "model.rl", "model.rl.reward_config", "model.rl.reward_config.remote_reward"


class Rule(NamedTuple):
    """A key whose value decides one key of the present form by itself."""

    old: str
    new: str
    change: Callable[[Any], object] = lambda value: value
    text: str = ""


FOR_ALL = (
    Rule("model.fsdp_shard_size", f"{RANKS}.dp_shard_size"),
    Rule("model_parallel.tensor_model_parallel_size", f"{RANKS}.tp_size"),
    Rule("model_parallel.pipeline_model_parallel_size", f"{RANKS}.pp_size"),
    Rule("model.precision", "train.param_dtype", text="optimiser and gradients are in float32"),
    Rule("model.net.sac_config.mode", "policy.model_gradient_checkpointing", lambda mode: mode != "none"),
    Rule("model.ema.enabled", "train.ema_enable", text="with a decay that rises to train.ema_decay"),
    Rule("optimizer.optim_type", "train.optm_name", lambda _: "AdamW"),
    Rule("optimizer.weight_decay", "train.optm_weight_decay"),
    Rule("optimizer.betas", "train.optm_betas", list),
    Rule("trainer.seed", "train.seed"),
    Rule("trainer.max_iter", "train.max_num_steps"),
    Rule("trainer.logging_iter", "logging.log_interval"),
    Rule("job.project", "logging.project_name"),
    Rule("job.group", "logging.group_name"),
    Rule("job.name", "logging.experiment_name"),
    Rule("checkpoint.save_iter", "train.ckpt.save_freq"),
    Rule("checkpoint.dcp_async_mode_enabled", "train.ckpt.save_mode", {True: "async", False: "sync"}.get),
)
FOR_RL = (
    Rule(f"{RL}.num_rollout", "rollout.n_generation"),
    Rule(f"{RL}.on_policy", f"{JOB}.on_policy"),
    Rule(f"{RL}.sample_steps", f"{SAMPLE}.num_steps", lambda steps: steps + 1, "the last one makes the sample clean"),
    Rule(f"{RL}.solver_option", f"{SAMPLE}.solver"),
    Rule(f"{RL}.s_churn", f"{SAMPLE}.noise_level"),
    Rule(f"{RL}.s_noise", f"{SAMPLE}.noise_scale"),
    Rule(f"{RL}.s_t_min", f"{SAMPLE}.noise_above"),
    Rule(f"{RL}.guidance", f"{SAMPLE}.guidance_scale", lambda weight: 1.0 + weight, "1 is no guidance"),
    Rule(f"{RL}.use_same_seed", f"{SAMPLE}.same_initial_noise"),
    Rule(f"{RL}.clip_ratio", f"{JOB}.epsilon_low"),
    Rule(f"{RL}.kl_beta", f"{JOB}.kl_beta"),
    Rule(f"{RL}.data_beta", f"{JOB}.data_term.beta"),
    Rule(f"{RL}.exp_reward", f"{JOB}.advantage_transform", {True: "exp_reward", False: "identity"}.get),
    Rule(f"{REWARDS}.adv_clip_min", f"{JOB}.advantage_low"),
    Rule(f"{REWARDS}.adv_clip_max", f"{JOB}.advantage_high"),
    Rule(f"{REMOTE}.enabled", f"{JOB}.use_remote_reward"),
    Rule(f"{REMOTE}.scale", f"{JOB}.remote_reward.scale"),
    Rule(f"{REMOTE}.reward_clip_min", f"{JOB}.remote_reward.reward_clip_min"),
    Rule(f"{REMOTE}.reward_clip_max", f"{JOB}.remote_reward.reward_clip_max"),
)

EXPECTED: Mapping[str, str] = {
    "ask the reward service for it in train.train_policy.remote_reward.reward_fns": f"{REWARDS}.aesthetic.enabled "
    f"{REWARDS}.image_reward.enabled",
    "sampling has the pipeline's own levels, Karras from 200 to 0.01": "model.sde.sigma_max model.sde.sigma_min",
    "the pipeline's model is a flow": "model.scaling",
    "losses are means over the elements": "model.loss_reduce",
    "the transformer is not compiled": "model.use_torch_compile",
    "set [validation]": "trainer.run_validation",
    "for replicas alone set policy.parallelism.dp_shard_size = 1": "trainer.distributed_parallelism",
    "checkpoints and logs are in train.output_dir; S3 is not supported yet": "trainer.use_s3 "
    "checkpoint.save_to_object_store.enabled",
    "a checkpoint of the older trainer cannot be read": "checkpoint.load_from_object_store.enabled "
    "checkpoint.load_training_state checkpoint.only_load_scheduler_state",
}
"""Keys whose default is what happens here anyway; the effect of any other value is lost, for the reason."""

IGNORED: Mapping[str, str] = {
    "the pipeline has its own": "model.net model.tokenizer model.text_encoder_class model.text_encoder_config "
    "model.conditioner.fps model.conditioner.padding_mask model.conditioner.use_video_condition model.state_ch "
    "model.sigma_conditional model.use_rf_ckpts model.rectified_flow_loss_weight_uniform model.resize_online "
    "model.sigma_data model.rectified_flow_t_scaling_factor model.conditioning_strategy "
    "model.denoise_replace_gt_frames",
    "the decay rises to train.ema_decay": "model.ema",
    "the data sets the size": "model.resolution",
    "the data has fixed names": "model.input_data_key model.input_image_key model.input_caption_key",
    "training levels have no extra draws at the ends": "model.high_sigma_strategy model.high_sigma_ratio "
    "model.low_sigma_ratio",
    "read only with model.rl.data_beta or in fine-tuning": "model.sde model.adjust_video_noise model.conditioner.text "
    f"{RL}.use_rl_sigma_and_noise {RL}.data_on_first_only",
    "read only in fine-tuning": "model.min_num_conditional_frames model.max_num_conditional_frames",
    "no reference is kept, or it stays": f"{RL}.update_ref_every_iter",
    "the noise has no upper bound": f"{RL}.s_t_max",
    "not set": f"{REWARDS} trainer.validation_iter job.timestamp model.context_parallel_size",
    "the trainer has no need of it, or does so anyway": "optimizer.master_weights optimizer.capturable "
    "scheduler.verbosity_interval trainer.ddp trainer.cudnn trainer.grad_scaler_args trainer.max_val_iter "
    "trainer.timeout_period trainer.memory_format trainer.straggler_detection trainer.callbacks.low_prec "
    "trainer.callbacks.heart_beat trainer.callbacks.manual_gc trainer.callbacks.compile_tokenizer "
    "trainer.callbacks.verify_data_batch_keys checkpoint",
    "metrics.jsonl and report.html have it": "trainer.callbacks",
    "[profiler] takes its place": "trainer.profiling",
    "the data has one loader": "dataloader_train dataloader_val",
    "it had no effect": "model_parallel",
}
"""Why keys have no counterpart, and their beginnings; the first that fits counts."""
