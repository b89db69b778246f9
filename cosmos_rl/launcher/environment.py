"""What a configuration needs outside of itself, looked at before a run folder is made and before torch is loaded."""

from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config


def check_environment(config: Config, *, pairs: bool) -> None:
    """Raise `UserError` with all folders and files that are named and are not there.

    `pairs`: the data folders must hold captioned pictures; a script of the user's own may read anything.
    """
    problems = _model(config)
    if pairs:
        problems += _pairs("train.train_policy.dataset", config.train.train_policy.dataset.local_dir)
        if config.validation.enable:
            problems += _pairs("validation.dataset", config.validation.dataset.local_dir)
    if config.policy.lora is not None and config.policy.lora.lora_path:
        problems += _missing("policy.lora.lora_path", config.policy.lora.lora_path)
    if problems:
        raise UserError("\n".join(problems))


def with_absolute_paths(config: Config) -> Config:
    """The configuration with local paths made absolute: what is written beside a run must lead there from anywhere."""

    def absolute(value: str) -> str:
        path = Path(value).expanduser()
        return str(path.absolute()) if value and path.exists() else value

    policy, train, validation = config.policy, config.train, config.validation
    lora = policy.lora
    if lora is not None and lora.lora_path:
        lora = lora.model_copy(update={"lora_path": absolute(lora.lora_path)})
    name = absolute(policy.model_name_or_path)
    policy = policy.model_copy(update={"model_name_or_path": name, "lora": lora})
    job = train.train_policy
    data = job.dataset.model_copy(update={"local_dir": absolute(job.dataset.local_dir)})
    resume = absolute(train.resume) if isinstance(train.resume, str) else train.resume
    output = str(Path(train.output_dir).expanduser().absolute())
    job = job.model_copy(update={"dataset": data})
    train = train.model_copy(update={"output_dir": output, "resume": resume, "train_policy": job})
    held_out = validation.dataset.model_copy(update={"local_dir": absolute(validation.dataset.local_dir)})
    validation = validation.model_copy(update={"dataset": held_out})
    return config.model_copy(update={"policy": policy, "train": train, "validation": validation})


def _missing(key: str, value: str) -> list[str]:
    path = Path(value).expanduser()
    return [] if path.exists() else [f'{key} = "{value}": {path.absolute()} does not exist']


def _model(config: Config) -> list[str]:
    name = config.policy.model_name_or_path
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "model_index.json").is_file():
            return []
        hint = ""
        if "checkpoints" in path.absolute().parts:
            hint = "; this looks like trainer state, exported pipelines are under safetensors/step_<N>"
        return [f'policy.model_name_or_path = "{name}": the folder has no model_index.json{hint}']
    is_hub_name = name.count("/") <= 1 and not name.startswith((".", "/", "~"))
    return [] if is_hub_name else _missing("policy.model_name_or_path", name)


def _pairs(table: str, folder: str) -> list[str]:
    if not folder:
        return []  # a script may bring its own data
    key = f"{table}.local_dir"
    path = Path(folder).expanduser()
    problems = _missing(key, folder)
    if not problems and path.is_dir() and next(path.glob("*.json"), None) is None:
        kinds = sorted({entry.suffix or f"{entry.name}/" for entry in path.iterdir()})
        problems = [
            f'{key} = "{folder}": no captions there; expected pairs <name>.json ({{"prompt": "..."}}) and <name>.jpg, '
            f".jpeg, .png or .webp, found {', '.join(kinds) or 'nothing'}"
        ]
    return problems
