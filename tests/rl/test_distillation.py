"""On-policy distillation: the reference is a teacher, and the policy's velocities come to be the teacher's."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import cross_check
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.exports import export_policy
from tests.support.nft_runs import moved_away, nft_toml, nft_train, nft_trainer
from tests.support.states import assert_same_state, drop_steps_after, saved_state
from tests.support.toy_models import FOUR_MODES, PlaneModel, TiltedModel
from tests.support.toy_tasks import POINT, mmd2, plane_samples, toy_config, toy_trainer

JOB = "train.train_policy."
TABLES = {
    "train.train_batch_per_replica": 64,
    "rollout.n_generation": 32,
    "train.max_num_steps": 25,
    "train.optm_lr": 2e-2,
    "train.optm_decay_type": "linear",
    "policy.diffusers.timesteps_fraction": 0.4,
    JOB + "bypass_reward": True,
    JOB + "kl_beta": 1.0,
    JOB + "teacher": "given by the test",
    JOB + "mini_batch": 64,
}
STEPS = {
    JOB + "trainer_type": "flow_grpo",
    JOB + "on_policy": True,
    "policy.diffusers.sample": {"num_steps": 10, "guidance_scale": 1.0, "solver": "flow", "noise_level": 0.7},
}
"""The KL divergence of sampling steps in place of that of velocities on the forward process."""


@pytest.mark.parametrize("more", [{}, STEPS], ids=["velocities", "steps"])
def test_the_policy_becomes_the_teacher(more: dict[str, object]) -> None:
    """Without a reward the loss is the distance alone, whose floor is 0."""
    task = toy_trainer(toy_config({**TABLES, **more}), PlaneModel(), [POINT] * 2)
    network = task.model.transformer
    teacher = {name: value.detach().clone() for name, value in network.state_dict().items()}
    teacher["residual.4.weight"] += 0.3 * torch.randn(2, 64, generator=torch.Generator().manual_seed(5))
    teacher["residual.4.bias"] += torch.tensor([0.5, -0.5])
    start = {name: value.detach().clone() for name, value in task.params.items()}
    task.policies.load_reference(lambda: network.load_state_dict(teacher))
    assert all(torch.equal(value, start[name]) for name, value in task.params.items())
    distances = [task.train_step(step).metrics["train/kl_loss_mean"] for step in range(task.total_steps)]
    assert distances[0] > 0.01
    assert distances[-1] < 0.05 * distances[0]
    kept = task.extra_tensors()["reference"]
    assert all(torch.equal(kept[name], teacher[name]) for name in task.params)


@pytest.mark.zoo
def test_a_student_of_the_exact_tilt_samples_the_tilt() -> None:
    """The teacher is the velocity of the four modes times ``exp(x / 2)``: of a linear reward at temperature 2."""
    tables = {
        **TABLES,
        "train.train_batch_per_replica": 512,
        "rollout.n_generation": 256,
        "train.max_num_steps": 80,
        "train.optm_lr": 3e-3,
        JOB + "mini_batch": 128,
        JOB + "batch_size_per_optimize": 128,
    }
    model = TiltedModel([POINT.prompt])
    task = toy_trainer(toy_config(tables), model, [POINT] * 2)
    slope, tilt = torch.tensor([0.5, 0.0]), model.transformer.tilt
    task.policies.load_reference(lambda: tilt.data.copy_(slope))
    assert not tilt.any()
    exact = FOUR_MODES.tilted(slope).draw(2000, torch.Generator().manual_seed(3))
    assert float(exact[:, 0].mean()) == pytest.approx(0.986, abs=0.08)  # the closed form; 2000 draws
    assert mmd2(plane_samples(model, 2000), exact) > 0.1
    distances = [task.train_step(step).metrics["train/kl_loss_mean"] for step in range(task.total_steps)]
    assert distances[-1] < 0.06 * distances[0]  # the floor is 0
    samples = plane_samples(model, 2000)
    assert mmd2(samples, exact) <= 0.01
    assert float((samples[:, 0] > 0).float().mean()) == pytest.approx(0.804, abs=0.05)
    assert not tilt.any()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({JOB + "kl_beta": 0.0}, JOB + "kl_beta"),
        ({JOB + "reference_reset_interval": 3}, JOB + "reference_reset_interval"),
        ({JOB + "trainer_type": "online_dpo"}, JOB + "teacher"),
        ({"policy.trainable_pattern": ["a"]}, JOB + "teacher"),
    ],
)
def test_a_teacher_that_could_not_act_is_refused(change: dict[str, object], key: str) -> None:
    assert [line for line in cross_check(toy_config(TABLES)) if "teacher" in line] == []
    assert any(line.startswith(key) for line in cross_check(toy_config({**TABLES, **change})))


@pytest.fixture(scope="module")
def exports(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """An adapter, and a pipeline with other weights."""
    found = {}
    for lora in (True, False):
        folder = tmp_path_factory.mktemp("teacher")
        teacher = moved_away(nft_trainer(nft_toml(folder, tiny_sd3, lora=lora), start=False))
        found[lora] = folder / "export"
        export_policy(teacher, found[lora])
    found[True] /= "lora"
    return found


@pytest.mark.zoo
@pytest.mark.parametrize("lora", [True, False])
def test_a_pipeline_learns_from_an_exported_teacher_and_resumes(
    tmp_path: Path, tiny_sd3: Path, exports: dict[bool, Path], lora: bool
) -> None:
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    options = (
        f"--train.train_policy.teacher={exports[lora]}",
        "--train.train_policy.bypass_reward=true",
        "--train.train_policy.kl_beta=1.0",
        "--policy.diffusers.weight_copy_decay_type=0",
        "--train.max_num_steps=5",
        "--train.optm_lr=1e-3",
    )
    run = nft_train(config, *options)
    distances = [line["train/kl_loss_mean"] for line in read_metrics(run / "metrics.jsonl")]
    assert distances[-1] < 0.7 * distances[0]
    state = saved_state(run, 5)
    drop_steps_after(run, 3)
    nft_train(config, *options, resume=(run, 3))
    assert_same_state(saved_state(run, 5), state)


@pytest.mark.zoo
def test_the_reference_has_the_velocities_of_the_teacher(
    tmp_path: Path, tiny_sd3: Path, exports: dict[bool, Path]
) -> None:
    teacher = f"--train.train_policy.teacher={exports[True]}"
    task = nft_trainer(nft_toml(tmp_path, tiny_sd3), teacher)
    other = nft_trainer(nft_toml(tmp_path, tiny_sd3), f"--policy.lora.lora_path={exports[True]}")
    cond, level = task.model.encode_prompts(["a hat"]), task.model.training_level(torch.tensor([0.5]))
    noise = torch.randn(1, *task.model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def velocity(of: object, name: str) -> Tensor:
        with of.policies.using(name), of.model.eval_mode():  # type: ignore[attr-defined]
            return of.model.velocity(noise, level, cond)  # type: ignore[attr-defined]

    torch.testing.assert_close(velocity(task, "reference"), velocity(other, "default"), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(velocity(task, "default"), velocity(task, "reference"))
    with pytest.raises(UserError, match=r"train.train_policy.teacher.*does not fit policy.lora"):
        nft_trainer(nft_toml(tmp_path, tiny_sd3), teacher, "--policy.lora.r=2")
    with pytest.raises(UserError, match="no folder transformer there"):
        nft_trainer(nft_toml(tmp_path, tiny_sd3, lora=False), teacher)
