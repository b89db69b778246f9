"""The live page: what it shows is what the folders hold, and the server gives nothing else to nobody else."""

import contextlib
import http.client
import json
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.watching import open_server
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.tracking.media import Shown, save_gallery
from cosmos_rl.tracking.metrics import MetricsFile
from cosmos_rl.tracking.report.curves import Charts
from cosmos_rl.tracking.report.measures import warnings
from cosmos_rl.tracking.report.record import read_record
from cosmos_rl.tracking.watch import feed as feeds
from cosmos_rl.tracking.watch.columns import Columns
from cosmos_rl.tracking.watch.feed import RunFeed, describe_end, read_state
from cosmos_rl.tracking.watch.page import Watch
from cosmos_rl.tracking.watch.server import WatchServer
from tests.support.made_up_run import PROMPTS, write_nft_run, write_sft_run
from tests.support.pages import parse

LOSS, TIME = "train/loss_mean", "time/iteration"


def read_whole(run: Path) -> RunFeed:
    feed = RunFeed(RunFolder(run))
    while feed.read():
        pass
    return feed


# ---- what is read ---------------------------------------------------------------------------------------------------


def test_charts_and_warnings_are_those_of_the_report_however_the_file_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_nft_run(tmp_path / "run", prompts=PROMPTS[:2])
    monkeypatch.setattr(feeds, "_AT_ONCE", 5000)  # in many pieces, which end within lines
    live, whole = read_whole(run).make_record(), read_record(run)
    drawn, wanted = Charts([live]), Charts([whole])
    assert drawn.sections() == wanted.sections()
    assert drawn.collect_others() == wanted.collect_others()
    assert warnings(live) == warnings(whole)
    assert (live.steps, live.wanted_steps, live.finished) == (300, 300, True)
    assert live.seconds == pytest.approx(whole.seconds)  # another order of summing


def test_a_long_run_is_thinned_to_means_and_loses_no_number_that_is_summed_or_named() -> None:
    rng, steps = np.random.default_rng(0), 5000
    norms, columns = rng.normal(size=steps), Columns()
    for i in range(steps):
        value: float | None = None if i in (7, 4321) else float(norms[i])
        columns.add({"step": i + 1, "optim/grad_norm": value, LOSS: value, TIME: 0.5})
    series = columns.read()
    thin, width = series["optim/grad_norm"], 16  # 5000 / 16 are at most 600 points, 5000 / 8 are more
    known = np.where(np.isin(np.arange(steps), (7, 4321)), np.nan, norms)
    wanted = [np.nanmean(known[i : i + width]) for i in range(0, steps, width)]
    np.testing.assert_allclose(np.array(thin.values, float), wanted, rtol=1e-12)
    assert list(thin.steps) == [min(i + width, steps) for i in range(0, steps, width)]
    assert thin.missing == 2
    assert [step for step, value in zip(series[LOSS].steps, series[LOSS].values, strict=True) if value is None] == [
        8,
        4322,
    ]
    assert (columns.last_step, columns.seconds) == (steps, 0.5 * steps)


def test_a_line_that_is_half_written_waits_and_a_file_that_was_cut_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    feed = RunFeed(RunFolder(tmp_path))
    assert not feed.read()

    def losses() -> list[tuple[int, float]]:
        return feed.make_record().series(LOSS).known

    def write(rows: Sequence[tuple[int, float]], mode: str = "a", end: str = "") -> None:
        lines = "".join(json.dumps({"step": step, LOSS: loss}) + "\n" for step, loss in rows)
        with path.open(mode) as file:
            file.write(lines + end)

    write([(1, 0.5), (2, 0.25)], end='{"step": 3, "train/lo')
    assert feed.read()
    assert losses() == [(1, 0.5), (2, 0.25)]
    assert not feed.read()
    with path.open("a") as file:
        file.write('ss_mean": 0.125}\n')
    assert feed.read()
    assert losses() == [(1, 0.5), (2, 0.25), (3, 0.125)]
    write([(1, 0.5), (2, 0.75), (3, 0.875), (4, 1.0)], "w")  # a resume, which is further by now
    assert feed.read()
    assert losses() == [(1, 0.5), (2, 0.75), (3, 0.875), (4, 1.0)]
    write([(1, 0.5)], "w")
    assert feed.read()
    assert losses() == [(1, 0.5)]
    path.unlink()
    assert feed.read()
    assert losses() == []


# ---- how a run is ---------------------------------------------------------------------------------------------------


def state_of(run: Path) -> str:
    feed = read_whole(run)
    return read_state(feed.run, feed.make_record()).text


def work_on(run: Path, pid: int, host: str) -> None:
    (run / ".lock").write_text(str(pid))
    (run / "run.json").write_text(json.dumps({"host": host}))


def test_the_state_of_a_run_is_that_of_its_folder_its_process_and_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert state_of(run) == "nothing is there yet"
    (run / "checkpoints").mkdir()
    assert state_of(run) == "no step is done yet"
    (run / "config.toml").write_text("[train]\nmax_num_steps = 9\n")
    MetricsFile(run / "metrics.jsonl").log(1, {TIME: 1.0})
    assert state_of(run) == "running"
    work_on(run, os.getpid(), platform.node())
    old = time.time() - 100
    os.utime(run / "metrics.jsonl", (old, old))
    assert state_of(run) == "no news for 100s"
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    work_on(run, child, "another machine")
    assert state_of(run) == "no news for 100s"
    work_on(run, child, platform.node())
    assert state_of(run) == "ended before its last step: no process works on it any more"
    (run / "ended.json").write_text(json.dumps({"code": 1, "reason": "the worker of rank 0 ended with exit code 3"}))
    assert state_of(run) == "failed: the worker of rank 0 ended with exit code 3"
    (run / "ended.json").unlink()
    MetricsFile(run / "metrics.jsonl").log(9, {TIME: 1.0})
    assert state_of(run) == "finished"


@pytest.mark.parametrize(
    ("code", "reason", "kind", "text"),
    [
        (0, "", "finished", "finished"),
        (75, "", "stopped", "stopped and saved; --train.resume=true continues it"),
        (130, "", "stopped", "stopped and saved; --train.resume=true continues it"),
        (1, "", "failed", "failed with exit code 1"),
        (2, "no images", "failed", "failed: no images"),
    ],
)
def test_the_end_of_a_command_is_the_state_of_its_run(code: int, reason: str, kind: str, text: str) -> None:
    state = describe_end(code, reason)
    assert (state.kind, state.text) == (kind, text)


# ---- the page -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmos_rl.tracking.watch.page._AT_MOST_EVERY_S", 0.0)


def test_a_poll_has_only_what_has_changed_since_the_version_that_is_known(tmp_path: Path) -> None:
    run = write_sft_run(tmp_path / "run", steps=20)
    watch = Watch([RunFolder(run)])
    first = watch.poll(0)
    assert {"runs", "section2", "galleries", "numbers", "others"} <= set(first["parts"])
    assert watch.poll(first["version"])["parts"] == {}
    MetricsFile(run / "metrics.jsonl").log(21, {LOSS: 0.125})
    news = watch.poll(first["version"])
    assert set(news["parts"]) == {"runs", "section2", "numbers"}
    assert "<b>21</b>" in news["parts"]["runs"]
    assert ">0.125</text>" in news["parts"]["section2"]
    assert set(watch.poll(0)["parts"]) == set(first["parts"])  # another page


def test_several_runs_share_charts_in_which_each_has_its_colour_and_each_metric_its_dashes(tmp_path: Path) -> None:
    first = write_nft_run(tmp_path / "a", steps=30, wanted=60, prompts=PROMPTS[:2])
    second = write_nft_run(tmp_path / "b", steps=20, wanted=60, prompts=PROMPTS[:2])
    records = [read_whole(run).make_record() for run in (first, second)]
    reward = Charts(records).sections()[0].figures[0]
    assert [(label.text, label.style) for label in reward.labels] == [("reward/mean", "d0"), ("val/reward/mean", "d1")]
    assert reward.drawing is not None
    assert {(line.colour, line.dash) for line in reward.drawing.lines} == {(0, 0), (1, 0), (0, 1), (1, 1)}
    wanted = sorted(record.series(key).known[-1][1] for record in records for key in ("reward/mean", "val/reward/mean"))
    assert sorted(value for _, _, value in reward.drawing.ends) == wanted
    parts = Watch([RunFolder(first), RunFolder(second)]).poll(0)["parts"]
    names = [name.text for name in parse(parts["runs"]).all("bdi")]
    assert names == ["Legible digits, a", "Legible digits, b"]


def test_what_the_runs_hold_is_text_on_the_page_and_galleries_are_newest_first(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(f"[logging]\nexperiment_name = '{evil}'\n")
    (run / "ended.json").write_text(json.dumps({"code": 1, "reason": evil}))
    MetricsFile(run / "metrics.jsonl").log(1, {f"train/{evil}": 1.0})
    pixels = torch.zeros(8, 8, 3, dtype=torch.uint8)
    for step in (2, 10):
        save_gallery(run / f"media/rollout/step_{step}", [Shown(pixels, evil, 0, "best", {evil: 0.5, "total": 0.5})])
    parts = Watch([RunFolder(run)]).poll(0)["parts"]
    html = "".join(parts.values())
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 5  # name, reason, metric, prompts, reward
    steps = [title.text.split(",")[0] for title in parse(parts["galleries"]).all("h3")]
    assert steps == ["Step 10", "Step 2"]


def break_file(run: Path, name: str) -> None:
    file = run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('{"half')


@pytest.mark.parametrize("name", ["config.toml", "run.json", "ended.json", "media/rollout/step_9/index.json"])
def test_a_file_that_cannot_be_read_is_said_of_its_run_and_hides_nothing_else(tmp_path: Path, name: str) -> None:
    broken, other = tmp_path / "a", tmp_path / "b"
    for run in (broken, other):
        MetricsFile(run / "metrics.jsonl").log(1, {LOSS: 0.5})
        (run / "config.toml").write_text("")
    watch = Watch([RunFolder(broken), RunFolder(other)])
    watch.poll(0)
    break_file(broken, name)
    for run in (broken, other):
        MetricsFile(run / "metrics.jsonl").log(2, {LOSS: 0.25})
    for _ in range(2):
        parts = watch.poll(0)["parts"]
        states = [article.text for article in parse(parts["runs"]).all("article")]
        what = rf"cannot be read at the moment \(.*{name.split('/')[0]}.*: (JSONDecodeError|not valid TOML): "
        assert re.search(what, states[0])
        assert "running" in states[1]
        assert all("Step 2" in state for state in states)
        assert parts["numbers"].count("0.25") == 2
    (broken / name).unlink()
    assert "cannot be read" not in watch.poll(0)["parts"]["runs"]


def test_what_was_read_and_could_not_be_drawn_is_drawn_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_sft_run(tmp_path / "run", steps=20)
    watch = Watch([RunFolder(run)])
    known = watch.poll(0)["version"]
    MetricsFile(run / "metrics.jsonl").log(21, {LOSS: 0.125})
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr("cosmos_rl.tracking.watch.page._draw_metrics", lambda shown: (_ for _ in ()).throw(MemoryError))
        watch.poll(known)
    assert "0.125" in watch.poll(known)["parts"]["numbers"]


# ---- the server -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serve(*runs: Path) -> Iterator[WatchServer]:
    server = open_server(runs, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(server: WatchServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer to exactly this path."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


@pytest.fixture
def run_with_image(tmp_path: Path) -> Path:
    run = tmp_path / "out" / "20260101000000"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("[custom]\npassword = 'hunter2'\n")
    save_gallery(run / "media/validation/step_0", [Shown(torch.zeros(8, 8, 3, dtype=torch.uint8), "a cat", 0)])
    (run / "checkpoints").mkdir()
    return run


def test_the_server_gives_the_page_its_news_and_its_images_and_listens_here_alone(run_with_image: Path) -> None:
    with serve(run_with_image.parent) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        status, headers, page = ask(server, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        sources = parse(page.decode()).all("script")
        assert [source.attributes.get("src") for source in sources] == ["/watch.js"]
        for path in ("/watch.js", "/watch.css", "/report.css"):
            assert ask(server, path)[0] == 200
        news = json.loads(ask(server, "/poll?known=0")[2])
        (image,) = parse(news["parts"]["galleries"]).all("img")
        status, headers, body = ask(server, f"/{image.attributes['src']}", Host=f"localhost:{server.server_port}")
        assert (status, headers["Content-Type"]) == (200, "image/png")
        assert body == next(run_with_image.rglob("*.png")).read_bytes()
        assert ask(server, "/poll?known=x")[0] == 400


def test_another_host_and_every_other_path_are_refused(run_with_image: Path) -> None:
    media = run_with_image / "media/validation/step_0"
    (media / "link.png").symlink_to(run_with_image / "config.toml")
    name = next(media.glob("*.png")).name
    (media / "notes.txt").write_text("x")
    with serve(run_with_image) as server:
        for host in (
            "evil.example",
            f"evil.example:{server.server_port}",
            "127.0.0.1",
            "",
            f"127.0.0.1:{server.server_port}x",
        ):
            assert ask(server, "/", Host=host)[0] == 421
            assert ask(server, f"/runs/0/media/validation/step_0/{name}", Host=host)[0] == 421
        image = f"/runs/0/media/validation/step_0/{name}"
        assert ask(server, image)[0] == 200
        for path in (
            "/runs/0/config.toml",
            "/runs/0/media/validation/step_0/../../../config.toml",
            "/runs/0/media/validation/step_0/..%2f..%2f..%2fconfig.toml",
            "/runs/0/media/validation/../../config.toml",
            "/runs/0/media/validation/step_0/index.json",
            "/runs/0/media/validation/step_0/notes.txt",
            "/runs/0/media/validation/step_0/link.png",
            "/runs/0/media/validation/step_0/",
            "/runs/1/media/validation/step_0/" + name,
            "/runs/-1/media/validation/step_0/" + name,
            "//etc/passwd",
            "/etc/passwd",
            str(run_with_image / "config.toml"),
            "/favicon.ico",
        ):
            status, _, body = ask(server, path)
            assert (status, b"hunter2" in body) == (404, False), path
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, image, method)[0] == 501


def test_an_image_that_vanishes_before_it_is_read_is_named_in_one_line(
    run_with_image: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (image,) = run_with_image.rglob("*.png")
    read = Path.read_bytes

    def read_too_late(path: Path) -> bytes:
        image.unlink()
        return read(path)

    with serve(run_with_image) as server:
        monkeypatch.setattr(Path, "read_bytes", read_too_late)
        assert ask(server, f"/runs/0/{image.relative_to(run_with_image)}")[0] == 404
        monkeypatch.undo()
        assert ask(server, "/")[0] == 200
    assert caplog.messages == [f"{image}: cannot be sent (No such file or directory)"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_browser_that_leaves_gives_no_traceback_and_an_error_of_ours_does(
    run_with_image: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve(run_with_image) as server:
        for error in (BrokenPipeError(), ConnectionResetError(), RuntimeError("ours")):
            try:
                raise error
            except Exception:
                server.handle_error(None, ("127.0.0.1", 9))
    printed = capfd.readouterr().err
    assert "RuntimeError: ours" in printed
    assert "BrokenPipe" not in printed
    assert "ConnectionReset" not in printed


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_run_without_anything_in_it_yet_can_be_watched(tmp_path: Path) -> None:
    run = tmp_path / "20260101000000"
    run.mkdir()
    with serve(run, run) as server:  # twice: it is one
        news = json.loads(ask(server, "/poll?known=0")[2])
    (state,) = parse(news["parts"]["runs"]).all("article")
    assert "nothing is there yet" in state.text


def test_a_wrong_place_and_a_port_in_use_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for place, why in ((tmp_path / "nowhere", "does not exist"), (tmp_path / "empty", "holds no run")):
        assert main(["watch", str(place)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {place} {why}: give <output_dir>/<timestamp>")
        assert "looked for config.toml" in error
    run = tmp_path / "20260101000000"
    run.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["watch", str(run), "--port", str(port)]) == 2
    assert f"error: --port {port}: Address already in use" in capsys.readouterr().err
    many = [tmp_path / f"2026010100{i:04d}" for i in range(9)]
    for one in many:
        one.mkdir(exist_ok=True)
    assert main(["watch", *map(str, many)]) == 2
    assert "9 runs: give at most 8" in capsys.readouterr().err
