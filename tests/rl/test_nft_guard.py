"""The guard of a DiffusionNFT run: what it measures, and what an alarm does."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.checkpoint import layout
from cosmos_rl.errors import TrainingStoppedError, UserError
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.trainer.rl.guard_probe import GuardProbe
from cosmos_rl.policy.trainer.rl.guard_rules import Measurement
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.nft_rewards import smooth
from tests.support.nft_runs import nft_toml, nft_train, nft_train_task, nft_trainer, prompt_file, recorded
from tests.support.states import assert_same_state, drop_steps_after, saved_state

ON = ("--train.train_policy.reward_hacking_guard.enable=true", "--train.train_policy.reward_hacking_guard.freq=1")
FEW = "--train.train_policy.reward_hacking_guard.samples=4"


def acting(action: str) -> str:
    return f"--train.train_policy.reward_hacking_guard.action={action}"


class ScaledProbe:
    """A probe that multiplies the held-out loss of its measurements, one after the other, by the given factors."""

    def __init__(self, probe: GuardProbe, factors: Sequence[float]) -> None:
        self._probe = probe
        self._factors = iter(factors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._probe, name)

    def measure(self, conditions: Any) -> Measurement:
        found = self._probe.measure(conditions)
        return replace(found, loss=found.loss * next(self._factors, 1.0))


def scripted(*factors: float) -> Callable[[OnlineTask], None]:
    """Gives the guard of a task a `ScaledProbe`."""

    def prepare(task: OnlineTask) -> None:
        task.guard.probe = ScaledProbe(task.guard.probe, factors)  # type: ignore[assignment]

    return prepare


def test_an_untouched_policy_has_ratios_of_one(tmp_path: Path, tiny_sd3: Path, image_folder: Path) -> None:
    for more in ((FEW,), (f"--train.train_policy.reward_hacking_guard.local_dir={image_folder}",)):
        trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), *ON, *more)
        metrics, alarm = trainer.guard.check(1, trainer._new_conditions())
        assert alarm is None
        assert (metrics.pop("guard/alarms"), metrics.pop("guard/rewinds")) == (0.0, 0.0)
        assert {"guard/loss_ratio", "guard/diversity_ratio", "guard/velocity_norm_ratio_p90/0.625"} < metrics.keys()
        assert set(metrics.values()) == {1.0}
    assert (
        len(trainer.guard.probe.held_out.prompts) == 12
    )  # all pairs, as there are fewer than reward_hacking_guard.samples


def test_stop_saves_what_there_is_and_says_what_was_measured(tmp_path: Path, tiny_sd3: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3)
    expected = r"(?s)step 3: the held-out .* is 4 times .*max_loss_ratio = 3\).*up to step 2. .* is step 2."
    with pytest.raises(TrainingStoppedError, match=expected) as stopped:
        nft_train_task(config, *ON, FEW, "--train.max_num_steps=5", prepare=scripted(1.0, 1.0, 4.0))
    assert stopped.value.exit_code == 1
    assert str(stopped.value).endswith('.action = "rewind" tries that by itself, "warn" continues')
    (run,) = (path for path in (tmp_path / "out").iterdir() if path.name.isdigit())
    assert layout.list_whole_steps(run / "checkpoints") == [1, 2, 3]
    assert [line["guard/alarms"] for line in read_metrics(run / "metrics.jsonl")] == [0, 0, 1]
    assert all(value.isfinite().all() for value in saved_state(run, 3).values())


def test_a_policy_that_leaves_what_the_model_knows_is_stopped(tmp_path: Path, tiny_sd3: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3, lora=False)
    with pytest.raises(
        TrainingStoppedError, match=r"step 1: the held-out .*: the policy is leaving what the model kno"
    ):
        nft_train(config, *ON, FEW, "--train.optm_lr=0.1")


def test_an_alarm_that_only_warns_does_not_end_the_run(tmp_path: Path, tiny_sd3: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3)
    run, _ = nft_train_task(config, *ON, FEW, acting("warn"), prepare=scripted(4.0, 1.0))
    assert [line["guard/alarms"] for line in read_metrics(run / "metrics.jsonl")] == [1, 0, 0]


@pytest.mark.slow
def test_rewind_goes_back_and_takes_another_way(tmp_path: Path, tiny_sd3: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3)
    options = (
        *ON,
        FEW,
        "--train.max_num_steps=5",
        "--train.ckpt.save_freq=2",
        "--train.train_policy.reward_hacking_guard.freq=3",
    )
    options += ("--validation.enable=true", "--validation.freq=4", "--validation.n_generation=1")
    options += (f"--validation.dataset.local_dir={prompt_file(tmp_path, ('a hat',), 'val.txt')}",)
    options += ("--train.ema_enable=true", "--train.train_policy.batch_size_per_optimize=8")
    with recorded() as calm_steps:
        calm = nft_train(config, *options, acting("warn"))
    # the looks are after steps 3 and 6: good, bad; again good, bad; then good
    options += ("--train.max_num_steps=7", acting("rewind"))
    with recorded() as steps:
        run, _ = nft_train_task(config, *options, prepare=scripted(1.0, 9.0, 1.0, 9.0))
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    # 6 steps, back to 2 (4 was saved after the last good look), 4 more, back to 2, 5 more
    assert len(steps) == 6 + 4 + 5
    assert [line["optim/learning_rate"] for line in lines] == pytest.approx([1e-3] * 2 + [2.5e-4] * 5)
    assert lines[5]["guard/rewinds"] == 2
    loss = {key: lines[4][f"train/{key}_mean"] for key in ("loss", "policy_loss", "kl_loss")}
    assert loss["loss"] == pytest.approx(loss["policy_loss"] + 4 * 1e-2 * loss["kl_loss"], rel=1e-6)
    noise = [list(step.noise.values()) for step in steps]
    assert noise[:2] == [list(step.noise.values()) for step in calm_steps[:2]]
    third = [noise[2], noise[6], noise[10]]  # the third step, three times
    assert all(set(one).isdisjoint(other) for one, other in zip(third, [*third[1:], third[0]], strict=True))
    assert layout.list_whole_steps(run / "checkpoints") == [2, 4, 6, 7]
    assert_same_state(saved_state(run, 2), saved_state(calm, 2))
    assert not torch.equal(
        torch.cat([v.flatten() for v in saved_state(run, 4).values()]),
        torch.cat([v.flatten() for v in saved_state(calm, 4).values()]),
    )
    end = saved_state(run, 7)
    drop_steps_after(run, 6)
    nft_train(config, *options, resume=(run, 6))
    assert_same_state(saved_state(run, 7), end)


@pytest.mark.slow
def test_a_start_that_a_checkpoint_does_not_know_is_measured_at_the_resume(
    tmp_path: Path, tiny_sd3: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Off, then on with own samples, with a folder, with fewer of it: each compares with the step of its resume."""
    config = nft_toml(tmp_path, tiny_sd3)
    # a policy that left where it began, so that a comparison with the true start would show
    run = nft_train(
        config,
        "--train.max_num_steps=1",
        "--train.optm_lr=0.03",
        "--train.train_policy.reward_hacking_guard.enable=false",
    )
    still = (*ON, FEW, "--train.optm_lr=1e-9", acting("warn"))
    folder = f"--train.train_policy.reward_hacking_guard.local_dir={image_folder}"
    fewer = "--train.train_policy.reward_hacking_guard.samples=8"
    held_out, diverse = "the held-out samples", "the samples whose diversity is measured"
    for step, options, new in (
        (1, still, f"{held_out} and {diverse}"),
        (2, (*still, folder), held_out),
        (3, (*still, folder), ""),
        (4, (*still, folder, fewer), held_out),
        (5, (*still, fewer), held_out),
    ):
        capsys.readouterr()
        nft_train(config, *options, f"--train.max_num_steps={step + 1}", resume=(run, step))
        message = (
            f"{new} are not those of the run that is resumed: the guard compares them with what they are at step {step}"
        )
        assert (message in capsys.readouterr().out) == bool(new)
        last = read_metrics(run / "metrics.jsonl")[-1]
        assert last["step"] == step + 1
        assert last["guard/loss_ratio"] == pytest.approx(1.0, abs=1e-4)
        assert last["guard/diversity_ratio"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
def test_a_validation_that_changed_is_compared_with_itself(
    tmp_path: Path, tiny_sd3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = nft_toml(tmp_path, tiny_sd3)
    options = (*ON, FEW, acting("warn"), "--validation.enable=true", "--validation.freq=1")
    options += (
        "--validation.n_generation=8",
        f"--validation.dataset.local_dir={prompt_file(tmp_path, ('a hat',), 'v.txt')}",
    )
    rewards = {"val_reward_fns": {"smooth": smooth, "side": lambda image: 1.0}}
    run = nft_train(config, *options, "--train.max_num_steps=1", **rewards)
    capsys.readouterr()
    rewards = {"val_reward_fns": {"smooth": smooth, "side": lambda image: 0.1 + 0.0}}
    nft_train(config, *options, resume=(run, 1), **rewards)
    assert "are compared with their scores of step 2" in capsys.readouterr().out
    assert [line["guard/alarms"] for line in read_metrics(run / "metrics.jsonl")] == [0, 0, 0]


@pytest.mark.slow
def test_rewinds_come_to_an_end_and_leave_no_link_to_what_is_gone(tmp_path: Path, tiny_sd3: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3)
    options = (
        *ON,
        FEW,
        acting("rewind"),
        "--train.train_policy.reward_hacking_guard.max_rewinds=2",
        "--train.max_num_steps=4",
    )
    options += ("--validation.enable=true", "--validation.freq=3", "--train.ckpt.save_freq=1")
    options += (f"--validation.dataset.local_dir={prompt_file(tmp_path, ('a hat',), 'val.txt')}",)
    options += ("--train.train_policy.reward_hacking_guard.freq=2",)
    looks = scripted(1.0, 9.0, 9.0, 9.0)  # after 2 good, after 4 bad, again bad, again bad
    best: list[bool] = []

    def note_best(metrics: dict[str, Any], step: int) -> None:
        (run,) = (path for path in (tmp_path / "out").iterdir() if path.name.isdigit())
        best.append((run / "best").exists() == (run / "best").is_symlink())

    with pytest.raises(TrainingStoppedError, match=r"went back 2 times already \(reward_hacking_guard.max_rewinds\)"):
        nft_train_task(config, *options, custom_logger_fns=[note_best], prepare=looks)
    assert len(best) == 4 + 2 + 2
    assert all(best)  # never a link that leads nowhere
    (run,) = (path for path in (tmp_path / "out").iterdir() if path.name.isdigit())
    assert layout.list_whole_steps(run / "checkpoints") == [1, 2, 3, 4]


def test_an_alarm_before_any_good_checkpoint_stops(tmp_path: Path, tiny_sd3: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3)
    expected = r"There is no checkpoint up to it to go back to \(train.ckpt.save_freq\). Step 1 is saved as it is"
    with pytest.raises(TrainingStoppedError, match=expected) as stopped:
        nft_train_task(config, *ON, FEW, acting("rewind"), prepare=scripted(9.0))
    assert str(stopped.value).endswith('; train.train_policy.reward_hacking_guard.action = "warn" continues')


@pytest.mark.slow
def test_a_fall_of_an_untrained_reward_leads_back_to_where_it_was_last_right(tmp_path: Path, tiny_sd3: Path) -> None:
    logged: list[int] = []

    def side(to_be_evaluated: np.ndarray) -> float:
        return 0.1 if len(logged) == 3 else 1.0  # while the first fourth step is validated

    config = nft_toml(tmp_path, tiny_sd3)
    options = (*ON, FEW, acting("rewind"), "--train.max_num_steps=6", "--validation.enable=true", "--validation.freq=2")
    options += (f"--validation.dataset.local_dir={prompt_file(tmp_path, ('a hat', 'a boat'), 'val.txt')}",)
    options += ("--validation.n_generation=4",)
    with recorded() as steps:
        run = nft_train(
            config,
            *options,
            val_reward_fns={"smooth": smooth, "side": side},
            custom_logger_fns=[lambda metrics, step: logged.append(step)],
        )
    assert logged == [1, 2, 3, 4, 5, 3, 4, 5, 6]  # noticed at 5, wrong since 4, last seen right at 2
    assert len(steps) == 9
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["val/reward/side_mean"] for line in lines if "val/reward/side_mean" in line] == [1.0, 1.0, 1.0]
    assert {"val/reward/mean", "val/reward/smooth_mean", "guard/untrained_reward/side"} <= lines[-1].keys()


@pytest.mark.slow
def test_real_samples_in_the_loss_keep_the_model_close_to_them(
    tmp_path: Path, tiny_sd3: Path, image_folder: Path
) -> None:
    config = nft_toml(tmp_path, tiny_sd3)
    options = (
        *ON,
        acting("warn"),
        f"--train.train_policy.reward_hacking_guard.local_dir={image_folder}",
        "--train.max_num_steps=6",
    )
    ratio = {}
    for beta in (0.0, 5.0):
        data = f'--train.train_policy.data_term={{beta = {beta}, local_dir = "{image_folder}", batch_size = 6}}'
        lines = read_metrics(nft_train(config, *options, data) / "metrics.jsonl")
        ratio[beta] = lines[-1]["guard/loss_ratio"]
        assert ("train/data_loss_mean" in lines[0]) == (beta > 0)
    assert ratio[5.0] < min(ratio[0.0], 1.0) - 1e-3


def test_micro_batches_of_real_samples_change_nothing(
    tmp_path: Path, tiny_sd3: Path, image_folder: Path, use_model: Callable[[type], type]
) -> None:
    data = f'--train.train_policy.data_term={{beta = 5.0, local_dir = "{image_folder}", batch_size = 6}}'
    sizes: list[int] = []

    @use_model
    class Counting(SD3Model):
        def training_sft_step(self, clean_latents: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            sizes.append(len(clean_latents))
            return super().training_sft_step(clean_latents, *args, **kwargs)

    found = []
    for size in (8, 4):
        options = (data, f"--train.train_policy.mini_batch={size}", "--train.max_num_steps=1")
        (line,) = read_metrics(nft_train(nft_toml(tmp_path, tiny_sd3), *options) / "metrics.jsonl")
        found.append([line["train/data_loss_mean"], line["optim/grad_norm"]])
    assert sizes == [6, 4, 2]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_more_real_samples_than_there_are_is_refused(tmp_path: Path, tiny_sd3: Path, image_folder: Path) -> None:
    data = f'--train.train_policy.data_term={{beta = 1.0, local_dir = "{image_folder}", batch_size = 13}}'
    with pytest.raises(UserError, match="data_term.batch_size: found 13; allowed: at most the 12 pairs in"):
        nft_train(nft_toml(tmp_path, tiny_sd3), data, "--train.max_num_steps=1")
