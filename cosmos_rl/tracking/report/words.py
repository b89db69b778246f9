"""What the page says: what was trained, how it ended, key numbers, how to use the result, how it was made."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl.tracking.durations import format_duration
from cosmos_rl.tracking.report.images import Pairs
from cosmos_rl.tracking.report.measures import (
    format_change,
    list_main_keys,
    list_reward_names,
    list_set_labels,
    measure,
    read_limit,
)
from cosmos_rl.tracking.report.record import Record

_ALGORITHMS = {
    "diffusion_nft": "DiffusionNFT",
    "grpo": "FlowGRPO",
    "flow_grpo": "FlowGRPO",
    "ddrl": "DDRL",
    "epg": "EPG",
    "pepg": "PEPG",
    "par": "PAR",
    "awm": "AWM",
    "online_dpo": "online DPO",
}
_SECRET = r"[\w.-]*(?:password|passwd|secret|token|api_?key|credential)[\w.-]*"


@dataclass(frozen=True)
class Training:
    """Which algorithm trained what of which model on which data."""

    how: str
    part: str
    model: str
    from_data: str
    """What leads to the name of the data."""
    data: str
    rewards: Sequence[str] = ()


@dataclass(frozen=True)
class Change:
    """The first and the last value of a number."""

    title: str
    first: float
    last: float
    better: int
    """+1: more is better, -1: less is better, 0: neither."""
    unit: str = ""
    first_step: int = 0
    last_step: int = 0

    @property
    def kind(self) -> str:
        """ "good" or "bad"; empty where it is neither."""
        gain = (self.last - self.first) * self.better
        if gain > 0:
            return "good"
        if gain < 0:
            return "bad"
        return ""

    @property
    def difference(self) -> str:
        """With its sign."""
        return format_change(self.first, self.last)


@dataclass(frozen=True)
class Usage:
    """Where the exported model is and how it is loaded."""

    step: int
    folder: Path
    command: str
    python: str
    """Empty: the export has no card."""


def find_title(record: Record) -> str:
    """The name of the experiment, else of the folder that holds the runs."""
    named = record.setting("logging.experiment_name")
    return str(named or Path(record.setting("train.output_dir") or record.root.parent).name)


def describe_training(record: Record) -> Training:
    """What was trained, as far as the configuration says it."""
    model = _last_name(record.setting("policy.model_name_or_path")) or "a model"
    rank = record.setting("policy.lora.r")
    part = "all weights of"
    if rank:
        part = f"a LoRA adapter (rank {rank}) for"
    data = record.setting("train.train_policy.dataset") or {}
    places = [one.get("label") or one.get("local_dir") or one.get("name") for one in data.get("sets") or [data]]
    name = " and ".join(_last_name(place) for place in places)
    kind = record.setting("train.train_policy.type")
    if kind == "sft":
        return Training("Fine-tuning", part, model, " on the captioned images of ", name)
    if kind == "dpo":
        return Training("Preference optimisation (DPO)", part, model, " on the preferences of ", name)
    trainer = str(record.setting("train.train_policy.trainer_type") or kind or "")
    how = f"Reinforcement learning ({_ALGORITHMS.get(trainer, trainer)})"
    return Training(how, part, model, ", with the prompts of ", name, list_reward_names(record))


def describe_end(record: Record, now: str) -> str:
    """One plain sentence: steps done and time, and whether that is the end."""
    wanted, time = record.wanted_steps, format_duration(record.seconds)
    if record.steps == 0:
        return f"No step is done yet (as of {now})."
    of = ""
    if wanted is not None:
        of = f" of {wanted}"
    if record.finished:
        return f"Finished: {record.steps} steps in {time}."
    state = "Not finished, and nothing was written for a while"
    if record.in_progress:
        state = "In progress"
    return f"{state}: {record.steps}{of} steps in {time} (as of {now})."


def choose_tiles(record: Record, pairs: Pairs | None) -> list[Change]:
    """The two or three numbers that sum up the outcome, first → last."""
    first = list_set_labels(record.keys)[:1]
    rewards = ["val/reward/mean", *(f"val/{label}/reward/mean" for label in first), "reward/mean"]
    losses = ["val/loss_mean", *(f"val/{label}/loss_mean" for label in first), "train/loss_mean"]
    rewards, losses = ([key for key in keys if _has_several(record, key)] for keys in (rewards, losses))
    keys = rewards[:1] or losses[:1]
    keys += [key for key in record.keys if re.fullmatch(r"guard/\w+_ratio", key) and record.series(key).ends]
    found = [change for change in (_measure_change(record, key) for key in keys[:3]) if change]
    if pairs and pairs.means and not rewards:
        found.insert(0, Change("Mean score of the images", *pairs.means, better=1))
    return found


def list_key_numbers(record: Record) -> list[tuple[str, float | None, Change]]:
    """(metric, its limit, its first and last value) of everything that matters."""
    rows = ((key, read_limit(record, key), _measure_change(record, key)) for key in list_main_keys(record))
    return [(key, limit, change) for key, limit, change in rows if change]


def describe_usage(record: Record) -> Usage | None:
    """Where the exported model is and how it is loaded; None without an export."""
    if record.export is None:
        return None
    step, folder = record.export
    folder = folder.absolute()
    root = folder
    if folder.name == "lora":
        root = folder.parent
    code = _read_card_snippet(folder / "README.md").replace("path/to/this/folder", str(folder))
    code = code.replace("path/to/the/base", record.setting("policy.model_name_or_path") or "path/to/the/base")
    return Usage(step, folder, f'cosmos-rl sample "{root}" "a prompt" --out samples', code)


def describe_origin(record: Record) -> dict[str, Any]:
    """Seed, versions and command; None for what is not known."""
    about = record.started
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    return {
        "Run": record.root.name,
        "Started": about.get("started"),
        "Seed": about.get("seed", record.setting("train.seed")),
        "Command": shlex.join(_mask_arguments(about.get("argv", []))) or None,
        "Resumed from": about.get("resumed_from"),
        "Earlier commands on this run": len(about.get("earlier", [])) or None,
        "Commit": about.get("git_commit"),
        "Versions": versions or None,
    }


def mask_secrets(text: str) -> str:
    """TOML without the values of keys that sound secret and without the passwords of URLs."""
    text = re.sub(rf'(?i)({_SECRET}"?\s*=\s*)("(?:\\.|[^"\\\n])*"|\'[^\'\n]*\')', r'\1"***"', text)
    return re.sub(r"://[^/\s\"'@]+@", "://***@", text)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _mask_arguments(argv: Sequence[str]) -> list[str]:
    """A command line without what follows options that sound secret: ``--key=value`` or ``--key value``."""
    shown, secret = [], False
    for argument in argv:
        masked = "***"
        if not secret:
            masked = re.sub(rf"(?is)^(--{_SECRET}=).*", r"\1***", mask_secrets(argument))
        shown.append(masked)
        secret = re.fullmatch(rf"(?i)--{_SECRET}", argument) is not None
    return shown


def _measure_change(record: Record, key: str) -> Change | None:
    ends, about = record.series(key).ends, measure(key)
    if ends is None:
        return None
    (first_step, first), (last_step, last) = ends
    return Change(about.title, first, last, about.better, f" {about.unit}".rstrip(), first_step, last_step)


def _has_several(record: Record, key: str) -> bool:
    """Whether ``key`` has more than one value."""
    change = _measure_change(record, key)
    return change is not None and change.first_step < change.last_step


def _last_name(path: Any) -> str:
    """The last name of a local path; a hub name as it is."""
    text = str(path or "").rstrip("/")
    return Path(text).name if text.startswith(("/", ".", "~")) else text


def _read_card_snippet(card: Path) -> str:
    """The Python of the card that the export was published with; empty without one."""
    found = re.search(r"```python\n(.*?)```", card.read_text(encoding="utf-8"), re.DOTALL) if card.is_file() else None
    return found[1].strip() if found else ""
