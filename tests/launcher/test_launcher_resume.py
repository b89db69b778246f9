"""Run folders, and the decision where a command starts."""

import os
from pathlib import Path

import pytest

from cosmos_rl.checkpoint.layout import COMMIT_MARKER, build_marker_text, policy_dir
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.resume import ResumePlan, plan_resume, resume_from
from cosmos_rl.policy.config import Config
from cosmos_rl.storage.run_folder import RunFolder, claim_folder_by_time, create_run, find_newest_run, list_runs

OLD, NEW = "20250101000000", "20250102000000"


def config_for(output_dir: Path, resume: bool | str = True, timestamp: str = "") -> Config:
    return Config.from_dict({"train": {"output_dir": str(output_dir), "resume": resume, "timestamp": timestamp}})


def save(run: RunFolder, step: int) -> Path:
    policy = policy_dir(run.checkpoints, step)
    policy.mkdir(parents=True)
    (policy / "state").write_text("x" * step)
    (policy / COMMIT_MARKER).write_text(build_marker_text(policy))
    return policy


def break_it(policy: Path) -> Path:
    (policy / "state").write_text("")
    return policy


def test_a_new_run_is_created_whatever_is_there_unless_resume_is_set(tmp_path: Path) -> None:
    save(create_run(tmp_path, OLD), 5)
    assert plan_resume(config_for(tmp_path, resume=False)) == ResumePlan(None, None, "")


def test_the_newest_whole_step_of_the_newest_run_is_continued(tmp_path: Path) -> None:
    save(create_run(tmp_path, OLD), 50)
    run = create_run(tmp_path, NEW)
    save(run, 9)
    policy = save(run, 10)
    plan = plan_resume(config_for(tmp_path))
    assert (plan.run, plan.step_path) == (run, policy)
    assert "from step 10" in plan.message


def test_a_broken_newest_step_is_passed_over_and_named(tmp_path: Path) -> None:
    run = create_run(tmp_path, NEW)
    policy = save(run, 10)
    break_it(save(run, 20))
    plan = plan_resume(config_for(tmp_path))
    assert plan.step_path == policy
    assert "step 20 is broken" in plan.message


def test_a_staging_folder_is_no_checkpoint(tmp_path: Path) -> None:
    run = create_run(tmp_path, NEW)
    (run.checkpoints / ".step_10.tmp").mkdir()
    plan = plan_resume(config_for(tmp_path))
    assert (plan.run, plan.step_path) == (run, None)
    assert "from step 0" in plan.message


def test_only_broken_steps_are_an_error_never_a_fresh_start(tmp_path: Path) -> None:
    policy = break_it(save(create_run(tmp_path, NEW), 10))
    with pytest.raises(UserError, match=r"no whole checkpoint") as caught:
        plan_resume(config_for(tmp_path))
    assert str(policy) in str(caught.value)


def test_a_whole_step_of_an_older_run_is_an_error_that_says_how_to_take_it(tmp_path: Path) -> None:
    policy = save(create_run(tmp_path, OLD), 10)
    create_run(tmp_path, NEW)
    with pytest.raises(UserError) as caught:
        plan_resume(config_for(tmp_path))
    assert f"--train.resume={policy}" in str(caught.value)


def test_without_any_run_a_new_one_is_started_with_a_clear_line(tmp_path: Path) -> None:
    plan = plan_resume(config_for(tmp_path / "none"))
    assert (plan.run, plan.step_path) == (None, None)
    assert "holds no run" in plan.message


def test_a_timestamp_names_the_run_to_continue(tmp_path: Path) -> None:
    old = create_run(tmp_path, OLD)
    policy = save(old, 10)
    save(create_run(tmp_path, NEW), 5)
    plan = plan_resume(config_for(tmp_path, timestamp=OLD))
    assert (plan.run, plan.step_path) == (old, policy)
    plan = plan_resume(config_for(tmp_path, timestamp="20250101120000"))
    assert plan.run is None


@pytest.mark.parametrize("of_step", ["{policy}", "{policy}/", "{step}", "{run}", "{output}", "{output}/checkpoints"])
def test_a_path_may_name_the_step_its_policy_folder_or_a_run(tmp_path: Path, of_step: str) -> None:
    run = create_run(tmp_path, NEW)
    save(run, 9)
    policy = save(run, 10)
    path = of_step.format(policy=policy, step=policy.parent, run=run.root, output=tmp_path)
    plan = plan_resume(config_for(tmp_path, resume=path))
    assert plan.run is None
    assert plan.step_path
    assert plan.step_path.resolve() == policy


def test_a_relative_path_is_taken_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = save(create_run(tmp_path, NEW), 10)
    monkeypatch.chdir(tmp_path)
    found = plan_resume(config_for(tmp_path, resume="checkpoints/step_10")).step_path
    assert found is not None
    assert found.resolve() == policy


def test_a_path_that_is_not_whole_is_an_error(tmp_path: Path) -> None:
    run = create_run(tmp_path, NEW)
    policy = break_it(save(run, 10))
    for path in (policy, policy.parent, run.root):
        with pytest.raises(UserError, match="bytes"):
            plan_resume(config_for(tmp_path, resume=str(path)))
    with pytest.raises(UserError, match="does not exist"):
        plan_resume(config_for(tmp_path, resume=str(tmp_path / "gone")))


def test_a_worker_starts_where_the_plan_says_and_after_a_restart_from_its_own_newest_step(tmp_path: Path) -> None:
    other = save(create_run(tmp_path, OLD), 3)
    run = create_run(tmp_path, NEW)
    by_path, fresh = config_for(tmp_path, resume=str(other)), config_for(tmp_path, resume=False)
    assert resume_from(by_path, run, 0) == other
    assert resume_from(by_path, run, 1) == other  # nothing saved yet: the same start again
    assert resume_from(fresh, run, 1) is None
    policy = save(run, 10)
    break_it(save(run, 20))
    assert resume_from(by_path, run, 0) == other
    assert resume_from(by_path, run, 1) == policy
    assert resume_from(fresh, run, 1) == policy
    assert resume_from(fresh, run, 0) is None
    assert resume_from(config_for(tmp_path), run, 0) == policy


def test_the_documented_paths_lead_to_the_newest_run(tmp_path: Path) -> None:
    create_run(tmp_path, OLD)
    run = create_run(tmp_path, NEW)
    save(run, 10)
    assert (tmp_path / "checkpoints" / "step_10" / "policy").is_dir()
    assert os.readlink(tmp_path / "safetensors") == f"{NEW}/safetensors"
    assert find_newest_run(tmp_path) == run


def test_runs_in_the_same_second_do_not_share_a_folder(tmp_path: Path) -> None:
    made = {create_run(tmp_path).root for _ in range(4)}
    assert len(made) == 4
    assert [run.root for run in list_runs(tmp_path)] == sorted(made)


def test_folders_with_other_names_are_no_runs(tmp_path: Path) -> None:
    for name in ("wandb", "2025", "x20250101000000"):
        (tmp_path / name).mkdir()
    (tmp_path / OLD).write_text("a file")
    assert find_newest_run(tmp_path) is None
    assert find_newest_run(tmp_path / "none") is None


def test_a_real_folder_where_a_link_should_be_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="move it away"):
        create_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_named_run_is_not_overwritten(tmp_path: Path) -> None:
    create_run(tmp_path, NEW)
    with pytest.raises(UserError, match="exists"):
        create_run(tmp_path, NEW)


def test_a_file_where_the_output_folder_should_be_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="out"):
        create_run(tmp_path / "out")


def test_claimed_folders_are_named_by_time(tmp_path: Path) -> None:
    names = [claim_folder_by_time(tmp_path, "logs_%Y%m%d-%H%M%S").name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(len(name) == len("logs_20250101-000000") for name in names)


def test_a_run_folder_knows_its_parts() -> None:
    run = RunFolder(Path("/o") / NEW)
    assert run.name == NEW
    assert run.metrics.name == "metrics.jsonl"
    assert run.config.name == "config.toml"
    assert {run.checkpoints.parent, run.safetensors.parent, run.media.parent} == {run.root}
