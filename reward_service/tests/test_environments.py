"""Rewards in environments of their own, plug-ins, and ``cosmos-rl-reward-prepare``."""

import contextlib
import os
import pty
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import numpy as np
import pytest

from cosmos_rl_reward import cli
from cosmos_rl_reward.prepare import list_requirements
from cosmos_rl_reward.rewards.weights import write_atomically
from tests.service import MOODY, Service, image, toml

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def other_venv(tmp_path_factory):
    """An environment without the service's packages, whose numpy says that it is another version."""
    folder = tmp_path_factory.mktemp("venv")
    venv.EnvBuilder(with_pip=False).create(folder)
    site = next((folder / "lib").glob("python*/site-packages"))
    ours = Path(np.__file__).parent
    (site / "numpy").mkdir()
    for entry in ours.iterdir():
        if entry.name not in ("version.py", "__pycache__"):
            os.symlink(entry, site / "numpy" / entry.name)
    (site / "numpy" / "version.py").write_text((ours / "version.py").read_text().replace(np.__version__, "1.26.4"))
    if (ours.parent / "numpy.libs").exists():
        os.symlink(ours.parent / "numpy.libs", site / "numpy.libs")
    plugin = site / "thirdparty.py"
    plugin.write_text(
        textwrap.dedent(
            """
            import importlib.util
            import numpy, sys
            from cosmos_rl_reward.handler import BaseRewardHandler

            class Version(BaseRewardHandler):
                reward_name = "version"
                array_type = "numpy"

                def calculate_reward(self, images, metadata):
                    fastapi = importlib.util.find_spec("fastapi") is not None
                    return {"scores": {"version": [numpy.__version__ + str(fastapi)] * len(images)}}
            """
        )
    )
    info = site / "thirdparty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[cosmos_rl_reward.rewards]\noffered = thirdparty:Version\n")
    return folder / "bin" / "python"


def test_third_party_rewards_in_another_environment(tmp_path, other_venv):
    """By class, by entry point and by function; nothing of the service is installed there."""
    rewards = [
        {"reward_type": "by_class", "reward_class": "thirdparty:Version", "venv_python": str(other_venv)},
        {"reward_type": "offered", "venv_python": str(other_venv)},
        {"reward_type": "counts", "function": "numpy:count_nonzero", "venv_python": str(other_venv)},
        MOODY,
    ]
    with Service(tmp_path, {"reward_args": rewards}) as service:
        for name in ("by_class", "offered"):
            result = service.result(service.submit(image(3, 2), name), name)
            assert result["scores"]["version"] == ["1.26.4False"] * 2
        result = service.result(service.submit(image(3, 1), "counts"), "counts")
        assert result["scores"] == {"counts": [8.0 * 8 * 3]}
        assert service.result(service.submit(image(5)))["scores"]["mean"] == [5.0]


def run_prepare(tmp_path, monkeypatch, rewards, *arguments):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    path = tmp_path / "rewards.toml"
    path.write_text(toml({"reward_args": rewards}))
    return cli.prepare_main(["--config", str(path), *arguments])


def test_check_tells_what_cannot_start(tmp_path, monkeypatch, capfd):
    good = [MOODY, {"reward_type": "constant", "reward_class": "moody_reward:Constant"}]
    assert run_prepare(tmp_path, monkeypatch, good, "--check") == 0
    shown = capfd.readouterr().out
    assert "moody: ok\n" in shown
    assert "constant: ok (self-test: both probes got the same scores" in shown
    bad = [
        MOODY,
        {**MOODY, "reward_type": "unready", "options": {"start": "not ready"}},
        {**MOODY, "reward_type": "off", "enable": False},
    ]
    assert run_prepare(tmp_path, monkeypatch, bad, "--check") == 1
    shown = capfd.readouterr().out
    assert "unready: failed: weights missing" in shown
    assert "off" not in shown
    assert run_prepare(tmp_path, monkeypatch, bad, "--check", "--reward", "moody") == 0
    assert run_prepare(tmp_path, monkeypatch, bad, "--check", "--reward", "off") == 2


def test_a_terminal_shows_which_reward_is_being_prepared_and_a_pipe_only_how_it_ended(tmp_path):
    path = tmp_path / "rewards.toml"
    path.write_text(toml({"reward_args": [{"reward_type": "mock"}]}))
    command = [
        sys.executable,
        "-c",
        "from cosmos_rl_reward import cli; cli.prepare_main()",
        "--config",
        str(path),
        "--check",
    ]
    place = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COSMOS_PROGRESS")}
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**place, "TERM": "xterm"}) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # all who had it open have ended
            while piece := os.read(ours, 2**16):
                shown += piece
    os.close(ours)
    assert process.returncode == 0
    assert b"[1/1] mock: starting" in shown
    assert b"mock: ok\r\n" in shown
    piped = subprocess.run(command, stdout=subprocess.PIPE, env=place, timeout=120, check=True)
    assert piped.stdout == b"mock: ok\n"


def wheel(folder):
    """A wheel with nothing in it, for pip to install without a network."""
    import zipfile

    folder.mkdir()
    info = "own_scorer-1.0.dist-info"
    with zipfile.ZipFile(folder / "own_scorer-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("own_scorer.py", "def score(to_be_evaluated):\n    return 1.5\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: own-scorer\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_prepare_builds_an_environment_from_a_lock_file_offline(tmp_path, monkeypatch, capfd):
    python, wheels, locks = tmp_path / "env" / "bin" / "python", tmp_path / "wheels", tmp_path / "locks"
    wheel(wheels)
    locks.mkdir()
    (locks / "own.txt").write_text("own-scorer==1.0\n")
    rewards = [{"reward_type": "own", "function": "own_scorer:score", "venv_python": str(python)}]
    arguments = ("--offline", "--wheels", str(wheels), "--locks", str(locks))
    # installed; but the environment has no numpy, and that is said and not passed over
    assert run_prepare(tmp_path, monkeypatch, rewards, *arguments) == 1
    assert "own: failed: every reward's environment needs numpy" in capfd.readouterr().out
    code = "import own_scorer; print(own_scorer.score(0))"
    assert subprocess.run([python, "-c", code], capture_output=True, text=True).stdout == "1.5\n"
    (locks / "own.txt").write_text("own-scorer==2.0\n")
    assert run_prepare(tmp_path, monkeypatch, rewards, *arguments) == 1
    assert "own: failed: pip ended with code 1" in capfd.readouterr().out


def test_a_setup_script_that_fails_is_a_failure(tmp_path, monkeypatch, capfd):
    script = tmp_path / "setup.sh"
    rewards = [{**MOODY, "setup_script": str(script), "download_path": "/weights; touch oops"}]
    script.write_text('echo "cannot reach $1" >&2; exit 7\n')
    assert run_prepare(tmp_path, monkeypatch, rewards) == 1
    assert "moody: failed: setup_script ended with code 7: cannot reach /weights; touch oops" in capfd.readouterr().out
    script.write_text(f'echo "$1 $2" > {tmp_path}/seen\n')
    assert run_prepare(tmp_path, monkeypatch, rewards) == 0
    assert (tmp_path / "seen").read_text().strip() == f"/weights; touch oops {Path(sys.executable).parents[1]}"


def test_an_environment_that_was_left_without_pip_is_made_whole(tmp_path, monkeypatch, capfd):
    folder, script = tmp_path / "env", tmp_path / "setup.sh"
    venv.EnvBuilder(with_pip=False).create(folder)  # as a kill leaves it
    script.write_text('"$2/bin/python" -m pip --version\n')
    rewards = [{**MOODY, "setup_script": str(script), "venv_python": str(folder / "bin" / "python")}]
    assert run_prepare(tmp_path, monkeypatch, rewards) == 1
    assert "moody: failed: every reward's environment needs numpy" in (shown := capfd.readouterr().out)
    assert "No module named pip" not in shown
    assert "run cosmos-rl-reward-prepare" in shown


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    lock = tmp_path / "reward.txt"
    lock.write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        write_atomically(lock, b"new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("reward.txt", "old")]


def test_requirements_come_from_the_extra_of_the_reward():
    assert list_requirements("mock") == ["numpy", "pillow"]
    assert "torch" in list_requirements("pickscore")
    assert not any(r.startswith("fastapi") for r in list_requirements("pickscore"))
