"""``report.html``: one self-contained page that shows what a run did, made from its folder alone. No torch."""

import datetime
import importlib.resources
from pathlib import Path

from cosmos_rl.storage import atomic
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.tracking.report import words
from cosmos_rl.tracking.report.curves import Charts
from cosmos_rl.tracking.report.images import (
    choose_images,
    render_extremes,
    render_only_gallery,
    render_pairs,
    render_strip,
)
from cosmos_rl.tracking.report.inlined import Inliner, escape
from cosmos_rl.tracking.report.measures import warnings
from cosmos_rl.tracking.report.record import Record, read_record

# the browser itself refuses everything from elsewhere and every script, whatever a prompt may hold
_POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"


def write_report(run_root: Path) -> Path:
    """Write ``<run_root>/report.html`` from what the folder holds by now; the path. An older one is replaced whole.

    The page needs no network and no other file and stays below 5 MB; it works for runs of every kind, also for one
    that is in progress or has not begun.
    """
    run = RunFolder(Path(run_root))
    atomic.write_text(run.report, page(read_record(run.root)))
    return run.report


def page(record: Record) -> str:
    """The whole document."""
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    images = choose_images(record)
    inliner = Inliner(images.list_placed())
    name = escape(words.find_title(record))
    parts = [
        f"<header><h1>{name}</h1><p>{words.describe_training(record)}</p>"
        f'<p class="state">{words.describe_end(record, now)}</p>{words.render_tiles(record, images.pairs)}</header>',
        _warnings(record),
        render_pairs(images.pairs, inliner, finished=record.finished) if images.pairs else "",
        render_only_gallery(*images.only, inliner) if images.only else "",
        words.render_key_numbers(record),
        Charts(record).sections(),
        render_strip(images, inliner),
        render_extremes(images, inliner),
        words.render_usage(record),
        words.render_provenance(record),
        f"<footer>Made by cosmos-rl on {escape(now)} from {escape(record.root.name)}.</footer>",
    ]
    style = importlib.resources.files("cosmos_rl.tracking.report").joinpath("style.css").read_text(encoding="utf-8")
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{name}</title>'
        f"<style>{style}</style>"
    )
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def _warnings(record: Record) -> str:
    found = "".join(f"<li>{escape(text)}</li>" for text in warnings(record))
    if not found:
        return ""
    return f'<section id="warnings" role="alert"><h2>Warnings</h2><ul>{found}</ul></section>'
