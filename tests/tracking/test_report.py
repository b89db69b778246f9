"""The report of a run: its numbers are the metrics', its images the galleries', and nothing in it can do harm."""

import base64
import html
import io
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape
from PIL import Image

from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.config.load import dump_toml
from cosmos_rl.storage import atomic
from cosmos_rl.tracking.media import Shown, save_gallery
from cosmos_rl.tracking.metrics import MetricsFile, read_metrics
from cosmos_rl.tracking.report import write_report
from cosmos_rl.tracking.report.inlined import clean
from cosmos_rl.tracking.report.svg import format_number
from tests.support import patience
from tests.support.made_up_run import PROMPTS, digit, write_nft_run, write_sft_run
from tests.support.pages import Element, parse
from tests.support.trainer_runs import train

MAX_PAGE_BYTES = 5_000_000


def report(root: Path) -> Element:
    return parse(write_report(root).read_text())


def decoded(image: Element) -> np.ndarray:
    kind, _, data = image.attributes["src"].partition(";base64,")
    assert kind in ("data:image/png", "data:image/jpeg")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


@pytest.fixture(scope="module")
def nft_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nft_run(tmp_path_factory.mktemp("nft") / "20261127234936")


@pytest.fixture(scope="module")
def page(nft_run: Path) -> Element:
    return report(nft_run)


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_it_begins_with_what_was_trained_and_how_it_ended(nft_run: Path, page: Element) -> None:
    (header,) = page.all("header")
    assert [child.text for child in header.children if isinstance(child, Element)][:2] == [
        "Legible digits",
        "Reinforcement learning (DiffusionNFT) of a LoRA adapter (rank 16) for tiny_sd3, with the prompts of "
        "digits.txt, rewarded by legible and ink.",
    ]
    rows = read_metrics(nft_run / "metrics.jsonl")
    minutes, seconds = divmod(round(sum(r.get("time/iteration", 0) + r.get("time/validation", 0) for r in rows)), 60)
    assert header.of_class("state")[0].text == f"Finished: 300 steps in {minutes}m{seconds:02d}s."


def test_the_key_numbers_are_the_first_and_the_last_of_the_metrics(nft_run: Path, page: Element) -> None:
    rows = read_metrics(nft_run / "metrics.jsonl")
    table = {row.attributes["data-key"]: row for row in page.by_id("numbers").all("tr") if "data-key" in row.attributes}
    assert {"val/reward/mean", "val/reward/ink_mean", "reward/ink_mean", "guard/loss_ratio"} <= set(table)
    assert {"train/loss_mean", "train/kl_loss_mean", "optim/grad_norm", "train/nfe"} <= set(table)
    for key, row in table.items():
        known = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
        first, last, change = row.all("td")
        unit = " s" if key.startswith("time/") else ""
        assert first.text == f"{format_number(known[0][1])}{unit} step {known[0][0]}"
        assert last.text == f"{format_number(known[-1][1])}{unit} step {known[-1][0]}"
        difference = known[-1][1] - known[0][1]
        assert change.text == f"{'+' if difference >= 0 else ''}{format_number(difference)}"
    assert table["val/reward/mean"].all("td")[2].attributes["class"] == "good"
    assert table["train/loss_mean"].all("td")[2].attributes["class"] == ""


def test_before_and_after_are_the_first_and_the_last_validation_pixel_by_pixel(nft_run: Path, page: Element) -> None:
    section = page.by_id("before-after")
    assert section.all("h2")[0].text == "Before and after"
    pairs = section.of_class("pair")
    assert [pair.all("bdi")[0].text for pair in pairs] == list(PROMPTS[:6])
    for i, pair in enumerate(pairs):
        for image, label, step in zip(pair.all("img"), pair.of_class("under"), (0, 300), strict=True):
            (file,) = (nft_run / f"media/validation/step_{step}").glob(f"{i:03d}_*.png")
            assert np.array_equal(decoded(image), np.asarray(Image.open(file)))
            assert f"step {step}" in label.text
    totals = []
    for step in (0, 300):
        index = json.loads((nft_run / f"media/validation/step_{step}/index.json").read_text())
        totals.append(sum(row["scores"]["total"] for row in index) / len(index))
    assert [b.text for b in section.all("p")[0].of_class("score")] == [format_number(total, 3) for total in totals]


def test_rows_over_time_have_the_same_sample_in_every_column(nft_run: Path, page: Element) -> None:
    rows = page.by_id("over-time").of_class("row")
    assert [row.all("bdi")[0].text for row in rows] == list(PROMPTS[:6])
    for i, row in enumerate(rows):
        steps = [int(re.findall(r"step (\d+)", label.text)[0]) for label in row.of_class("under")]
        assert steps[0] == 0
        assert steps[-1] == 300
        assert steps == sorted(set(steps))
        for step, image in zip(steps, row.all("img"), strict=True):
            (file,) = (nft_run / f"media/validation/step_{step}").glob(f"{i:03d}_*.png")
            assert np.array_equal(decoded(image), np.asarray(Image.open(file)))


def test_best_and_worst_are_of_the_newest_rollouts_with_every_score(nft_run: Path, page: Element) -> None:
    index = json.loads((nft_run / "media/rollout/step_300/index.json").read_text())
    for group in ("best", "worst"):
        rows = [row for row in index if row["group"] == group]
        cards = page.by_id(group).of_class("card")
        assert len(cards) == len(rows) == 4
        for card, row in zip(cards, rows, strict=True):
            assert np.array_equal(
                decoded(card.all("img")[0]), np.asarray(Image.open(nft_run / "media/rollout/step_300" / row["file"]))
            )
            scores = {name: "missing" if s is None else format_number(s, 3) for name, s in row["scores"].items()}
            assert card.of_class("score")[0].text == scores.pop("total")
            assert {r.all("td")[0].text: r.all("td")[1].text for r in card.all("tr")} == scores
    assert "missing" in page.by_id("worst").text


def test_a_curve_has_a_gap_where_a_value_is_null_and_ends_at_the_last_value(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, loss in enumerate([0.0, 2.0, math.nan, 4.0, math.inf, 6.0, 10.0], start=1):
        metrics.log(step, {"train/loss_mean": loss})
    page = report(tmp_path)
    (figure,) = page.of_class("chart")
    assert figure.of_class("gaps")[0].text == "2 values missing"
    assert figure.of_class("last")[0].text == "10"
    pieces = [line.attributes["points"].split() for line in figure.all("polyline")]
    assert [len(piece) for piece in pieces] == [2, 1, 2]
    (dot,) = figure.all("circle")  # a value between two gaps would be invisible as a line
    assert f"{dot.attributes['cx']},{dot.attributes['cy']}" == pieces[1][0]
    points = np.array([[float(v) for v in point.split(",")] for piece in pieces for point in piece])
    steps, values = np.array([1, 2, 4, 6, 7]), np.array([0, 2, 4, 6, 10])
    for place, truth in ((points[:, 0], steps), (points[:, 1], values)):
        slope, offset = np.polyfit(truth, place, 1)
        assert np.abs(slope * truth + offset - place).max() < 0.11  # coordinates have one decimal
    assert page.by_id("warnings").text.count("steps 3, 5") == 1


def test_the_reward_has_a_band_of_one_standard_deviation(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        metrics.log(step, {"reward/mean": 0.5, "reward/std": 0.5})
    (band,) = report(tmp_path).all("polygon")
    heights = [float(point.split(",")[1]) for point in band.attributes["points"].split()]
    (line,) = report(tmp_path).all("polyline")
    middle = float(line.attributes["points"].split()[0].split(",")[1])
    assert heights[0] == heights[1] < middle < heights[2] == heights[3]
    assert middle - heights[0] == pytest.approx(heights[2] - middle, abs=0.11)


def test_every_metric_is_drawn_somewhere(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    keys = ["train/loss_mean", "adv/max", "guard/untrained_reward", "somebody's <own>"]
    for step in (1, 2):
        metrics.log(step, dict.fromkeys(keys, step) | {"note": "no number"})
    page = report(tmp_path)
    assert len(page.all("svg")) == len(keys)
    shown = " ".join(figure.text for figure in page.of_class("chart"))
    assert all(key in shown for key in keys)


def test_the_shares_of_the_sampling_steps_are_in_one_figure_in_the_order_of_the_steps(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.log(1, {f"train/gradient_share/{step}": 0.5 for step in (3, 10)})
    metrics.log(2, {f"train/gradient_share/{step}": 0.5 for step in (2, 3)})
    (figure,) = report(tmp_path).of_class("chart")
    assert "Share of each sampling step in the gradient" in figure.text
    places = [figure.text.index(f"train/gradient_share/{step}") for step in (2, 3, 10)]
    assert places == sorted(places)


def test_several_validation_sets_have_curves_a_table_and_labelled_images(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    values = {"text": [0.1, 0.9, 0.5, 0.6], "parti-2": [3.0, None, 2.0, 2.5]}
    for step in range(4):
        row = {"reward/mean": 1.0} if step else {}
        for label, scores in values.items():
            if (score := scores[step]) is not None:
                row |= {f"val/{label}/reward/{name}": score for name in ("mean", "std", "max", "min", "ocr_mean")}
                row |= {f"val/{label}/samples": 4}
        metrics.log(step, row)
        shown = [Shown(digit(i, 1.0, i), "a cup", 0, "fixed", of_set=label) for i, label in enumerate(values)]
        save_gallery(tmp_path / "media" / "validation" / f"step_{step}", shown)
    page = report(tmp_path)
    rows = {row.attributes["data-key"]: row for row in page.by_id("validation-sets").all("tr")[1:]}
    assert list(rows) == [f"val/{label}/reward/{name}" for label in values for name in ("mean", "ocr_mean")]
    read = [[cell.text for cell in row.all("td")] for row in rows.values()]
    assert read[0] == read[1] == ["0.1 step 0", "0.9 step 1", "0.6 step 3"]
    assert read[2] == read[3] == ["3 step 0", "3 step 0", "2.5 step 3"]
    assert [cell.text for cell in rows["val/parti-2/reward/ocr_mean"].all("th")] == ["parti-2", "ocr"]
    figures = {title: f for f in page.of_class("chart") for title in values if f"Rewards on “{title}”" in f.text}
    assert list(figures) == list(values)
    (line, same) = figures["text"].all("polyline")
    assert len(line.attributes["points"].split()) == len(same.attributes["points"].split()) == 4
    assert len(figures["parti-2"].all("polyline")[0].attributes["points"].split()) == 3
    captions = [caption.text for caption in page.by_id("over-time").all("figcaption")]
    assert captions == ["text: a cup", "parti-2: a cup"]


def test_limits_that_were_crossed_and_alarms_stand_at_the_top(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, diversity in enumerate([1.0, 0.7, 0.45, 0.4], start=1):
        row = {"guard/diversity_ratio": diversity, "guard/diversity_ratio_limit": 0.5, "guard/alarm": int(step == 4)}
        metrics.log(step, row | {"guard/loss_ratio": 1 + step, "guard/loss_ratio_limit": 9.0})
    page = report(tmp_path)
    assert [item.text for item in page.by_id("warnings").all("li")] == [
        "Alarm guard/alarm at step 4.",
        "Diversity of the samples, relative to the start: below its limit 0.5 at steps 3, 4; the last value is 0.4.",
    ]
    assert len(page.all("text", lambda e: e.attributes.get("class") == "limit")) == 2


def test_rewards_that_taught_nothing_stand_at_the_top(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, share in enumerate([1.0, 0.5, 1.0], start=1):
        metrics.log(step, {"adv/zero_std_ratio": share, "reward/mean": 1.0})
    (warning,) = [item.text for item in report(tmp_path).by_id("warnings").all("li")]
    assert warning.startswith("At steps 1, 3 the samples of each prompt all had the same reward: nothing was learnt")


# ---- runs of every kind and state ------------------------------------------------------------------------------------


def test_a_fine_tuning_run_shows_losses_and_images_without_scores(tmp_path: Path) -> None:
    page = report(write_sft_run(tmp_path / "run"))
    (header,) = page.all("header")
    assert "Fine-tuning of all weights of tiny_sd3 on the captioned images of digits." in header.text
    assert "Loss on held-out data" in header.of_class("tiles")[0].text
    section = page.by_id("before-after")
    assert section.all("h2")[0].text == "First and last"  # the first validation was at step 40
    assert "val_before_train" in section.text
    assert section.of_class("score") == []
    assert "step 40" in section.text
    assert "step 200" in section.text


@pytest.mark.parametrize(
    ("age_s", "state"),
    [(5, "In progress: 30 of 300 steps"), (4000, "Not finished, and nothing was written for a while: 30 of 300 steps")],
)
def test_a_run_that_is_not_at_its_end_says_so(tmp_path: Path, age_s: float, state: str) -> None:
    root = write_nft_run(tmp_path / "run", steps=30, wanted=300)
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "train/lo')  # being written
    os.utime(root / "metrics.jsonl", (time.time() - age_s, time.time() - age_s))
    page = report(root)
    assert page.of_class("state")[0].text.startswith(state)
    assert page.by_id("before-after").all("h2")[0].text == "Before and now"


def test_runs_with_nothing_or_little_to_show_give_a_page(tmp_path: Path) -> None:
    empty = report(tmp_path)
    assert "this run has not begun" in empty.text
    assert "No step is done yet" in empty.text
    MetricsFile(tmp_path / "metrics.jsonl").log(1, {"train/loss_mean": 0.5})
    assert report(tmp_path).all("img") == []
    save_gallery(tmp_path / "media/validation/step_1", [Shown(digit(3, 1.0, 0), "a three", 0, "fixed")])
    one = report(tmp_path)
    assert len(one.all("img")) == 1
    assert "nothing to compare it with" in one.text
    save_gallery(tmp_path / "media/validation/step_2", [Shown(digit(4, 1.0, 0), "a four", 0, "fixed")])
    assert "no prompt and noise in common" in report(tmp_path).text
    next((tmp_path / "media/validation/step_2").glob("*.png")).unlink()
    save_gallery(tmp_path / "media/validation/step_3", [Shown(digit(4, 1.0, 0), "a three", 0, "fixed")])
    next((tmp_path / "media/validation/step_1").glob("*.png")).unlink()
    assert report(tmp_path).by_id("before-after").of_class("missing")[0].text == "image missing"


def test_without_validation_the_fixed_images_of_the_rollouts_are_compared(tmp_path: Path) -> None:
    for step in (1, 9):
        shown = [Shown(digit(step, 1.0, 0), "a digit", 5, "fixed"), Shown(digit(0, 1.0, 0), "a zero", step, "best")]
        save_gallery(tmp_path / f"media/rollout/step_{step}", shown)
    before, after = (decoded(image) for image in report(tmp_path).by_id("before-after").all("img"))
    assert np.array_equal(before, digit(1, 1.0, 0).numpy())
    assert np.array_equal(after, digit(9, 1.0, 0).numpy())


def test_a_training_run_leaves_a_report_whose_snippet_loads_the_result(
    write_toml: Callable[..., Path], image_folder: Path, tiny_sd3: Path
) -> None:
    validation = f'[validation]\nenable = true\nfreq = 2\nval_before_train = true\ndataset.local_dir = "{image_folder}"'
    config = write_toml(validation)
    run = train(config, "--train.max_num_steps=2")
    page = parse((run / "report.html").read_text())
    (run / "config.toml").write_text(dump_toml(load_config(config, ["--train.max_num_steps=2"])))  # by the launcher
    assert len(page.by_id("before-after").all("img")) == 8  # four prompts
    page = report(run)
    assert page.of_class("state")[0].text.startswith("Finished: 2 steps")
    use = page.by_id("use")
    export = run / "safetensors/step_2/lora"
    assert str(export) in use.all("code")[0].text
    command, code = (block.text for block in use.all("pre"))
    assert command == f'cosmos-rl sample "{export.parent}" "a prompt" --out samples'
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["pipe"].get_active_adapters() == ["default"]


def test_a_report_that_fails_does_not_fail_the_run(
    write_toml: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def block_the_report(metrics: dict[str, Any], step: int) -> None:
        (run,) = (path for path in (tmp_path / "out").iterdir() if path.name.isdigit())
        (run / "report.html" / "a file").mkdir(parents=True)

    run = train(write_toml(), "--train.max_num_steps=1", custom_logger_fns=[block_the_report])
    printed = capsys.readouterr().out
    assert "the report could not be made" in printed
    assert "IsADirectoryError: " in printed
    assert (run / "safetensors/step_1/lora").is_dir()


# ---- safe, whole, small ----------------------------------------------------------------------------------------------

NASTY = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)> '&amp;",
    "</figure></main></body></html><style>*{display:none}</style>",
    "🦊 emoji 👩‍🚀 and a lone surrogate \ud83d",
    "قطة حمراء صغيرة \u202e evil",
    "NUL \0 and escape \x1b[31m",
    "long " * 2000,
]


def test_no_prompt_reaches_the_page_as_anything_but_text(tmp_path: Path) -> None:
    scores = {"<b>bold</b>": 0.5, "other": 0.25, "total": 0.5}
    for step in (0, 5, 9):
        shown = [Shown(digit(i, 1.0, i), prompt, i, "fixed", scores) for i, prompt in enumerate(NASTY)]
        save_gallery(tmp_path / f"media/validation/step_{step}", shown)
        extremes = [Shown(digit(i, 1.0, i), p, i, ("best", "worst")[i % 2], scores) for i, p in enumerate(NASTY)]
        save_gallery(tmp_path / f"media/rollout/step_{step}", extremes)
    (tmp_path / "config.toml").write_text('[logging]\nexperiment_name = "</title><script>x</script>"\n')
    raw = write_report(tmp_path).read_bytes()
    page = parse(raw.decode())  # strict: no lone surrogates; the parser below: every element is closed in order
    assert page.all("script") == []
    assert len(page.all("style")) == 1
    assert all(set(image.attributes) <= {"src", "alt", "class"} for image in page.all("img"))
    assert all(image.attributes["src"].startswith("data:image/") for image in page.all("img"))
    assert all(not name.startswith("on") for element in page.walk() for name in element.attributes)
    shown = [bdi.text for bdi in page.by_id("before-after").all("bdi")]
    assert shown[:3] == NASTY[:3]
    assert shown[3] == "🦊 emoji 👩‍🚀 and a lone surrogate \ufffd"
    assert shown[4] == "قطة حمراء صغيرة  evil"
    assert shown[5] == "NUL \ufffd and escape \ufffd[31m"
    assert all(len(bdi.text) <= 161 for bdi in page.all("bdi"))
    assert all(bdi.attributes["dir"] == "auto" for bdi in page.all("bdi"))
    assert "<b>bold</b>" in page.by_id("best").text


@given(st.text(st.characters(codec=None), max_size=40))
@settings(derandomize=True, max_examples=200)
def test_escaped_text_reads_back_without_what_no_page_may_hold(text: str) -> None:
    safe = str(escape(clean(text)))
    assert not set(safe) & set("<>\"'")
    back = html.unescape(safe)
    back.encode()
    assert len(back) <= len(text)
    if text.isprintable():
        assert back == text


def test_the_page_needs_nothing_from_elsewhere(nft_run: Path, page: Element) -> None:
    fetching = {"src", "href", "srcset", "data", "poster", "background", "action", "xlink:href"}
    found = {value[:11] for e in page.walk() for name, value in e.attributes.items() if name in fetching}
    assert found == {"data:image/"}
    assert page.all("link") == page.all("script") == page.all("iframe") == []
    assert not re.search(r"url\(|@import", page.all("style")[0].text)
    (policy,) = page.all("meta", lambda e: e.attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_a_page_of_many_large_images_and_long_curves_stays_below_its_size(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)  # noise is the worst for every codec
    noise = [torch.randint(0, 256, (216, 324, 3), generator=generator, dtype=torch.uint8) for _ in range(3)]
    for step in range(0, 90, 10):
        shown = [Shown(noise[i % 3], f"prompt {i} " + "x" * 300, i, "fixed", {"total": 0.5}) for i in range(6)]
        save_gallery(tmp_path / f"media/validation/step_{step}", shown)
    save_gallery(tmp_path / "media/rollout/step_80", [Shown(noise[0], "p", i, "best") for i in range(6)])
    keys = ["train/loss_mean", "reward/mean", *(f"rollout/x{i}" for i in range(8))]
    lines = (json.dumps({"step": s, **{key: math.sin(s * 0.37) for key in keys}}) for s in range(1, 5001))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    target = write_report(tmp_path)
    assert 1_000_000 < target.stat().st_size < MAX_PAGE_BYTES
    page = parse(target.read_text())
    assert len(page.all("img")) == 12 + 6 * 8 + 6
    pair = decoded(page.by_id("before-after").all("img")[0])
    assert max(pair.shape[:2]) == 320
    assert pair.shape[1] / pair.shape[0] == pytest.approx(1.5, abs=0.02)


def test_a_page_that_would_be_too_large_gets_smaller_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_nft_run(tmp_path / "run", steps=30, side=120)
    whole = len(write_report(root).read_bytes())
    limit = 60_000
    monkeypatch.setattr("cosmos_rl.tracking.report.inlined.MAX_BYTES", limit)
    images = report(root).all("img")
    assert sum(len(image.attributes["src"]) for image in images) <= limit < whole
    assert len(images) == 12 + 6 * 8 + 8


def test_an_interrupted_write_leaves_the_older_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_sft_run(tmp_path / "run", steps=10)
    before = write_report(root).read_bytes()
    names = sorted(p.name for p in root.iterdir())
    MetricsFile(root / "metrics.jsonl").log(11, {"train/loss_mean": 0.125})

    def cut(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(atomic.os, "replace", cut)
        write_report(root)
    assert (root / "report.html").read_bytes() == before
    assert sorted(p.name for p in root.iterdir()) == names
    assert "0.125" in report(root).by_id("numbers").text


def test_secrets_stay_out_of_the_page(nft_run: Path, page: Element) -> None:
    assert "hunter2" in (nft_run / "config.toml").read_text()
    assert "hunter2" not in write_report(nft_run).read_text()
    made = page.by_id("made").text
    (command,) = (row.all("td")[0].text for row in page.by_id("made").all("tr") if row.all("th")[0].text == "Command")
    wanted = ["cosmos-rl", "--config", "digits.toml", "--custom.password=***", "--hub-token", "***", "a b"]
    assert shlex.split(command) == wanted
    assert "max_num_steps = 300" in made
    assert "torch 2.11.0" in made


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_takes_a_run_or_the_newest_of_an_output_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("20260101000000", "20260102000000"):
        root = write_sft_run(tmp_path / "out" / name, steps=5)
        (root / "checkpoints").mkdir()  # made when training begins
    older, newest = tmp_path / "out/20260101000000", tmp_path / "out/20260102000000"
    for argument, root in ((older, older), (tmp_path / "out", newest)):
        assert main(["report", str(argument)]) == 0
        assert capsys.readouterr().out.strip() == str(root / "report.html")
        assert (root / "report.html").is_file()
    for argument, why in ((tmp_path, "holds no run"), (tmp_path / "nowhere", "does not exist")):
        assert main(["report", str(argument)]) == 2
        assert f"{argument} {why}: give <output_dir>/<timestamp>" in capsys.readouterr().err


@pytest.mark.process
def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    write_sft_run(tmp_path / "run", steps=5)
    code = "import sys; from cosmos_rl.launcher.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    done = patience.run([sys.executable, "-c", code, "report", str(tmp_path / "run")])
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
