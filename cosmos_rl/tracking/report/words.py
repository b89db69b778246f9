"""The words of the page: what was trained, how it ended, key numbers, configuration, how to use the result."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_rl.tracking.console import format_duration
from cosmos_rl.tracking.report.images import Pairs
from cosmos_rl.tracking.report.inlined import escape
from cosmos_rl.tracking.report.measures import format_change, list_main_keys, list_reward_names, measure, read_limit
from cosmos_rl.tracking.report.record import Record
from cosmos_rl.tracking.report.svg import format_number

_ALGORITHMS = {"diffusion_nft": "DiffusionNFT", "grpo": "FlowGRPO", "flow_grpo": "FlowGRPO", "ddrl": "DDRL"}
_DIRECTION = {1: " (more is better)", 0: "", -1: " (less is better)"}
_SECRET = r"[\w.-]*(?:password|passwd|secret|token|api_?key|credential)[\w.-]*"


def find_title(record: Record) -> str:
    """The name of the experiment, else of the folder that holds the runs."""
    named = record.setting("logging.experiment_name")
    return str(named or Path(record.setting("train.output_dir") or record.root.parent).name)


def describe_training(record: Record) -> str:
    """One plain sentence: which algorithm trained what of which model on which data."""
    if not record.config:
        return "No configuration yet: this run has not begun."
    model = _last_name(record.setting("policy.model_name_or_path")) or "a model"
    rank = record.setting("policy.lora.r")
    part = "all weights of"
    if rank:
        part = f"a LoRA adapter (rank {rank}) for"
    data = _data(record)
    kind = record.setting("train.train_policy.type")
    if kind == "sft":
        on = ""
        if data:
            on = f" on the captioned images of <b>{escape(data)}</b>"
        return f"Fine-tuning of {part} <b>{escape(model)}</b>{on}."
    trainer = str(record.setting("train.train_policy.trainer_type") or kind or "")
    how = _ALGORITHMS.get(trainer, trainer)
    on = goal = ""
    if data:
        on = f", with the prompts of <b>{escape(data)}</b>"
    names = [f"<b>{escape(name)}</b>" for name in list_reward_names(record)]
    if names:
        goal = f", rewarded by {_join_names(names)}"
    return f"Reinforcement learning ({escape(how)}) of {part} <b>{escape(model)}</b>{on}{goal}."


def describe_end(record: Record, now: str) -> str:
    """One plain sentence: steps done and time, and whether that is the end."""
    wanted, time = record.wanted_steps, format_duration(record.seconds)
    if record.steps == 0:
        return f"No step is done yet (as of {escape(now)})."
    of = ""
    if wanted is not None:
        of = f" of {wanted}"
    if record.finished:
        return f"Finished: {record.steps} steps in {time}."
    state = "Not finished, and nothing was written for a while"
    if record.in_progress:
        state = "In progress"
    return f"{state}: {record.steps}{of} steps in {time} (as of {escape(now)})."


def render_tiles(record: Record, pairs: Pairs | None) -> str:
    """The two or three numbers that sum up the outcome, first → last."""
    rewards = [key for key in ("val/reward/mean", "reward/mean") if _several(record, key)]
    losses = [key for key in ("val/loss_mean", "train/loss_mean") if _several(record, key)]
    keys = rewards[:1] or losses[:1]
    keys += [key for key in record.keys if re.fullmatch(r"guard/\w+_ratio", key) and record.series(key).ends]
    found = [_tile(record, key) for key in keys[:3]]
    if pairs and pairs.means and not rewards:
        found.insert(0, _change_tile("Mean score of the images", *pairs.means, 1))
    if not found:
        return ""
    return f'<div class="tiles">{"".join(found)}</div>'


def render_key_numbers(record: Record) -> str:
    """Table: first and last value of everything that matters."""
    rows = []
    for key in list_main_keys(record):
        ends, about = record.series(key).ends, measure(key)
        if ends is None:
            continue
        (first_step, first), (last_step, last) = ends
        unit = f" {about.unit}".rstrip()
        limit = read_limit(record, key)
        note = change = ""
        if limit is not None:
            note = f" (limit {format_number(limit)})"
        if first_step != last_step:
            change = format_change(first, last)
        rows.append(
            f'<tr data-key="{escape(key)}"><th>{escape(about.title)}{note} <code>{escape(key)}</code></th>'
            f"<td>{format_number(first)}{unit} <small>step {first_step}</small></td>"
            f"<td>{format_number(last)}{unit} <small>step {last_step}</small></td>"
            f'<td class="{_change_class(last - first, about.better)}">{change}</td></tr>'
        )
    if not rows:
        return ""
    head = "<tr><th></th><td>first</td><td>last</td><td>change</td></tr>"
    return (
        f'<section id="numbers"><h2>Key numbers</h2><div class="wide"><table><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def render_usage(record: Record) -> str:
    """Where the exported model is and how it is loaded."""
    export = record.export
    if export is None:
        return "<section><h2>Use the result</h2><p>Nothing is exported yet.</p></section>"
    step, folder = export
    location = str(folder.absolute())
    root = folder
    if folder.name == "lora":
        root = folder.parent
    command = f'cosmos-rl sample "{root.absolute()}" "a prompt" --out samples'
    code = _read_card_snippet(folder / "README.md")
    code = code.replace("path/to/this/folder", location)
    code = code.replace("path/to/the/base", record.setting("policy.model_name_or_path") or "path/to/the/base")
    snippet = ""
    if code:
        snippet = f"<p>In Python:</p><pre>{escape(code)}</pre>"
    return (
        f'<section id="use"><h2>Use the result</h2><p>The model after step {step}: <code>{escape(location)}</code></p>'
        f"<pre>{escape(command)}</pre>{snippet}</section>"
    )


def render_provenance(record: Record) -> str:
    """Seed, versions, command and configuration, folded."""
    about = record.started
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    rows = {
        "Run": record.root.name,
        "Started": about.get("started"),
        "Seed": about.get("seed", record.setting("train.seed")),
        "Command": shlex.join(_mask_arguments(about.get("argv", []))) or None,
        "Resumed from": about.get("resumed_from"),
        "Earlier commands on this run": len(about.get("earlier", [])) or None,
        "Commit": about.get("git_commit"),
        "Versions": versions or None,
    }
    body = "".join(f"<tr><th>{name}</th><td>{escape(v)}</td></tr>" for name, v in rows.items() if v is not None)
    toml = ""
    if record.config_text:
        text = escape(mask_secrets(record.config_text))
        toml = f"<details><summary>Configuration</summary><pre>{text}</pre></details>"
    return (
        f'<section id="made"><h2>How it was made</h2><div class="wide"><table class="plain">{body}</table></div>'
        f"{toml}</section>"
    )


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


def _tile(record: Record, key: str) -> str:
    ends, about = record.series(key).ends, measure(key)
    assert ends is not None, f"{key} has no value"
    return _change_tile(about.title, ends[0][1], ends[1][1], about.better)


def _several(record: Record, key: str) -> bool:
    """Whether ``key`` has more than one value."""
    ends = record.series(key).ends
    return ends is not None and ends[0][0] < ends[1][0]


def _change_tile(label: str, first: float, last: float, better: int) -> str:
    change = f'<em class="{_change_class(last - first, better)}">{format_number(last, 3)}</em>'
    return (
        f'<div class="tile"><span>{escape(label)}{_DIRECTION[better]}</span>'
        f"<b>{format_number(first, 3)} → {change}</b></div>"
    )


def _change_class(change: float, better: int) -> str:
    gain = change * better
    if gain == 0 or gain != gain:
        return ""
    if gain > 0:
        return "good"
    return "bad"


def _data(record: Record) -> str:
    table = record.setting("train.train_policy.dataset") or {}
    return _last_name(table.get("local_dir") or table.get("name"))


def _last_name(path: Any) -> str:
    """The last name of a local path; a hub name as it is."""
    text = str(path or "").rstrip("/")
    return Path(text).name if text.startswith(("/", ".", "~")) else text


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _read_card_snippet(card: Path) -> str:
    """The Python of the card that the export was published with; empty without one."""
    found = re.search(r"```python\n(.*?)```", card.read_text(encoding="utf-8"), re.DOTALL) if card.is_file() else None
    return found[1].strip() if found else ""
