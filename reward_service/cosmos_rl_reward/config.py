"""``rewards.toml``: the configuration. Unknown keys are rejected with the nearest known one."""

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cosmos_rl_reward.errors import UserError
from cosmos_rl_reward.text_files import read_text

PACKAGED = Path(__file__).parent / "configs" / "rewards.toml"
STORE_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9._/-]*))?")
RESTARTS_VARIABLE = "COSMOS_RL_REWARD_RESTARTS"
"""Environment variable: how often a process was started again by its supervisor."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WorkerArgs(_Table):
    """How worker processes are run."""

    venv_python: str = "python"
    """Interpreter of their environment; ``python`` means the service's own."""
    device: str = "auto"
    """``auto``: a GPU when the environment's torch sees one, else the CPU."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Worker processes."""
    environment: dict[str, str] = {}
    """Extra environment variables, such as ``CUDA_VISIBLE_DEVICES``."""
    deadline_s: float = Field(default=300.0, gt=0)
    """A call that takes longer is stopped: the worker is killed and the job counts one attempt."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Loading the model may take this long."""


class RewardArgs(WorkerArgs):
    """One ``[[reward_args]]`` table: a reward and how it is run."""

    reward_type: str = Field(default="cosmos_reason1", pattern=r"^[A-Za-z0-9.-][A-Za-z0-9_.-]{0,63}$")
    """Name that clients use in ``reward_fn``."""
    reward_class: str = ""
    """``module:Class`` of a third-party handler, importable in that environment."""
    function: str = ""
    """``module:function``, called for each sample, or for each request when it begins with ``images, metadata``."""
    model_path: str = ""
    """Weights: hub name or local path."""
    download_path: str = "/workspace"
    """Folder that ``prepare`` downloads to."""
    setup_script: str = ""
    """Script that ``prepare`` runs instead of installing requirements: ``script <download_path> <venv folder>``."""
    dtype: str = "float16"
    endpoint_url: str = ""
    """OpenAI-compatible server of rewards that ask one."""
    endpoint_api_key: str = Field(default="", repr=False)
    endpoint_api_key_env: str = ""
    """Name of an environment variable with the key; better than the key itself in a file."""
    work_dir: str = ""
    """Accepted from older files, without effect."""
    tmp_dir: str = ""
    """Accepted from older files, without effect."""
    enable: bool = True
    options: dict[str, Any] = {}
    """The reward's own options."""
    video_frames: int = Field(default=0, ge=0)
    """Frames of a video that a reward of images scores, evenly spaced, for their mean; 0: all."""
    max_batch: int = Field(default=0, ge=0)
    """Most samples of several jobs in one call; 0 leaves it to the reward."""
    max_wait_ms: float = Field(default=2.0, ge=0)
    """How long a batch waits for more jobs."""
    required: bool = True
    """``/readyz`` waits for it."""
    self_test: bool = True
    """Score two probes before the first job."""

    @model_validator(mode="after")
    def _one_source(self) -> "RewardArgs":
        if self.reward_class and self.function:
            raise ValueError("give reward_class or function, not both")
        for key in ("reward_class", "function"):
            value = getattr(self, key)
            if value and value.count(":") != 1:
                raise ValueError(f"{key} must look like 'module:name', got {value!r}")
        return self


class DecodeArgs(WorkerArgs):
    """``[decode_args]``: the VAE that turns latents into pixels; its environment needs torch and diffusers."""

    model_path: str = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    """AutoencoderKLWan for 16 channels: a diffusers folder (or hub name), or a .pth or .safetensors file."""
    wan2pt2_model_path: str = ""
    """The same for 48 channels (Wan 2.2); empty: latents with 48 channels are refused."""
    wan2pt2_credential_path: str = ""
    """Accepted from older files, without effect."""
    dtype: str = "bfloat16"
    chunk_duration: int = 81
    """Accepted from older files, without effect: latents are decoded whole."""
    temporal_window: int = 16
    """Accepted from older files, without effect."""
    load_mean_std: bool = False
    """Accepted from older files, without effect: the VAE's own statistics are used."""
    deadline_s: float = Field(default=600.0, gt=0)


class ServiceConfig(_Table):
    """The whole file."""

    host: str = "localhost"
    """Address to listen on. Anything but this machine needs a token."""
    port: int = Field(default=8080, ge=0, le=65535)
    redis_host: str = "localhost"
    """Another host: a Redis or Valkey server there is used (see ``broker_url``)."""
    redis_port: int = 6379
    """Port of that server."""
    no_latent_decoder: bool = False
    """Refuse latents."""
    reward_args: tuple[RewardArgs, ...] = ()
    decode_args: DecodeArgs = DecodeArgs()
    state_dir: str = ""
    """Jobs, results and the broker's socket; default ``$XDG_STATE_HOME/cosmos_rl_reward``."""
    broker_url: str = Field(default="", repr=False)
    """``redis://``, ``rediss://`` or ``unix://``; empty starts a private broker. May also come from
    COSMOS_RL_REWARD_BROKER_URL."""
    blob_store: str = ""
    """Folder of jobs and results that all machines share, or ``s3://bucket/prefix``; default inside ``state_dir``."""
    token_file: str = ""
    """File with one ``token [scope,scope]`` a line; scopes are submit, read, admin. Re-read when it changes."""
    tls_cert: str = ""
    tls_key: str = ""
    max_body_bytes: int = Field(default=256 << 20, gt=0)
    max_items: int = Field(default=1024, gt=0)
    """Samples per job."""
    max_pixels: int = Field(default=256_000_000, gt=0)
    """Pixels of one sample (all frames)."""
    max_decoded_bytes: int = Field(default=4 << 30, gt=0)
    """Bytes of a whole job as uint8 pixels, latents after decoding."""
    max_connections: int = Field(default=4096, ge=16)
    """Connections at a time. Half of them may wait for results, an eighth may send jobs; when there are more, those
    without a whole request are closed, the oldest first."""
    max_queued_jobs: int = Field(default=1000, gt=0)
    """Per reward; more are refused with 429."""
    max_spool_bytes: int = Field(default=20 << 30, gt=0)
    min_free_bytes: int = Field(default=256 << 20, ge=0)
    """Jobs are refused with 507 when the disk has less left."""
    receive_timeout_s: float = Field(default=60.0, gt=0)
    """Longest pause inside a body."""
    job_ttl_s: float = Field(default=3600.0, gt=0)
    """A job without a result after this long has expired."""
    result_ttl_s: float = Field(default=86400.0, gt=0)
    max_finished_jobs: int = Field(default=200_000, gt=0)
    max_attempts: int = Field(default=3, ge=1)
    """Tries of a job before it fails."""
    fail_after_s: float = Field(default=15.0, ge=0)
    """Jobs of a reward that cannot start fail after this long."""
    no_worker_after_s: float = Field(default=600.0, ge=0)
    """Jobs of a reward without a worker fail after this long."""
    drain_s: float = Field(default=30.0, ge=0)
    """Time for running jobs after SIGTERM."""
    log_interval_s: float = Field(default=60.0, gt=0)
    """Without a terminal the log has a line of progress so often, when something happened."""

    @field_validator("reward_args")
    @classmethod
    def _distinct(cls, value: tuple[RewardArgs, ...]) -> tuple[RewardArgs, ...]:
        names = [args.reward_type for args in value if args.enable]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"reward_type {name!r} is enabled twice; use replicas = 2 for two workers")
        return value

    @property
    def enabled(self) -> tuple[RewardArgs, ...]:
        """Rewards that are served."""
        return tuple(args for args in self.reward_args if args.enable)

    @property
    def state(self) -> Path:
        """The state folder."""
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(self.state_dir or Path(base) / "cosmos_rl_reward").absolute()  # the broker has a folder of its own

    @property
    def spool_dir(self) -> Path:
        """Folder of jobs and results, when they lie in a folder."""
        return Path(self.blob_store or self.state / "spool")

    @property
    def external_broker(self) -> str:
        """URL of a broker that runs elsewhere, or an empty string."""
        url = os.environ.get("COSMOS_RL_REWARD_BROKER_URL") or self.broker_url
        if not url and self.redis_host not in LOOPBACK and self.redis_port > 0:
            url = f"redis://{self.redis_host}:{self.redis_port}"
        return url


def load(path: Path | None, **overrides: Any) -> ServiceConfig:
    """Read a configuration file (the packaged one when ``path`` is None); ``overrides`` replace top-level keys.

    Raises:
        UserError: the file is missing, is not TOML, or a key is unknown or wrong.
    """
    path = path or PACKAGED
    try:
        data = tomllib.loads(read_text(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the path of a rewards.toml with --config") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    return build({**data, **overrides}, str(path))


def build(data: dict[str, Any], source: str) -> ServiceConfig:
    """Check a configuration table; environment variables of the service are applied.

    Raises:
        UserError: names the key, the problem and the nearest known key.
    """
    pending = os.environ.get("COSMOS_RL_REWARD_MAX_PENDING_TASKS")
    if pending and "max_queued_jobs" not in data:
        data = {**data, "max_queued_jobs": pending}
    if not data.get("state_dir") and (state := os.environ.get("COSMOS_RL_REWARD_STATE_DIR")):
        data = {**data, "state_dir": state}
    try:
        config = ServiceConfig.model_validate(data)
    except ValidationError as error:
        raise UserError("\n".join(f"{source}: {_explain(e)}" for e in error.errors(include_input=False))) from None
    if "://" in config.blob_store and not STORE_URL.fullmatch(config.blob_store):
        raise UserError(
            f"{source}: blob_store: is not a folder and does not look like s3://bucket/prefix; mount other stores and "
            "give the path. Credentials and the endpoint of a store come from the AWS environment variables"
        )
    return config


def _explain(error: Any) -> str:
    location, table = error["loc"], ServiceConfig
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if error["type"] != "extra_forbidden":
        return f"{key}: {error['msg'].removeprefix('Value error, ')}"
    if location[0] == "reward_args":
        table = RewardArgs
    elif location[0] == "decode_args":
        table = DecodeArgs
    name = str(location[-1])
    close = difflib.get_close_matches(name, table.model_fields, 1)
    if not close and table is RewardArgs:
        return f"{key}: unknown key; a reward's own settings go into [reward_args.options]"
    if close:
        return f"{key}: unknown key; did you mean {close[0]!r}?"
    return f"{key}: unknown key"


def for_rewards(names: list[str], **overrides: Any) -> ServiceConfig:
    """A configuration without a file: the named rewards with their defaults, on the CPU.

    Raises:
        UserError: a name is wrong.
    """
    args = [{"reward_type": name, "device": "cpu"} for name in names]
    return build({"reward_args": args, **overrides}, "--rewards")
