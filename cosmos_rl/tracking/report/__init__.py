"""``report.html``: one self-contained page that shows what a run did, made from its folder alone. No torch.

The modules here choose and compute what is shown; ``page.html.jinja`` lays it out.
"""

import datetime
import functools
from pathlib import Path
from typing import Any

from cosmos_rl.storage import atomic
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.tracking.report import words
from cosmos_rl.tracking.report.curves import Charts
from cosmos_rl.tracking.report.images import choose_images
from cosmos_rl.tracking.report.inlined import Inliner, clean
from cosmos_rl.tracking.report.measures import list_set_scores, warnings
from cosmos_rl.tracking.report.record import Record, read_record
from cosmos_rl.tracking.report.svg import format_number

_HERE = Path(__file__).parent


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
    images, charts = choose_images(record), Charts([record])
    return (
        load_environment()
        .get_template("page.html.jinja")
        .render(
            record=record,
            now=now,
            title=words.find_title(record),
            training=words.describe_training(record),
            end=words.describe_end(record, now),
            tiles=words.choose_tiles(record, images.pairs),
            warnings=warnings(record),
            images=images,
            sources=Inliner(images.list_placed()).find_sources,
            numbers=words.list_key_numbers(record),
            set_scores=list_set_scores(record),
            sections=charts.sections(),
            others=charts.collect_others(),
            usage=words.describe_usage(record),
            provenance=words.describe_origin(record),
            config_text=words.mask_secrets(record.config_text),
        )
    )


@functools.cache
def load_environment() -> Any:
    """What renders the templates of this folder and of ``watch``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # other commands need none of it

    environment = Environment(
        loader=FileSystemLoader([_HERE, _HERE.parent / "watch"]),
        autoescape=True,
        finalize=clean,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"number": format_number, "clean": clean}
    return environment
