"""What `check` says of a GPU that is too small: its largest part at the peak, and the key that lowers it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl.launcher.check import advice
from cosmos_rl.policy.config import load_config
from tests.support.checks import check, sizes
from tests.support.paths import ROOT

RECIPES = ROOT / "configs" / "stable-diffusion-3-5"
MODEL = "stabilityai/stable-diffusion-3.5-medium"
FLOAT32, NO_CACHE = "--policy.diffusers.dtype=float32", "--train.train_policy.cache.text=false"


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shapes of Stable Diffusion 3.5 medium."""
    from tests.support.published import write_sparse  # builds the transformer without memory

    return write_sparse(tmp_path_factory.mktemp("published") / "sd35", MODEL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options", "peak", "said"),
    [
        ("image-sft-lora", [], "11.3 GB", None),
        ("image-sft-lora", [NO_CACHE], "14.7 GB", None),
        ("image-sft-lora", [FLOAT32], "22.5 GB", "a GPU of 16 GB; …, 22.3 GB what lowers it: policy.diffusers.dtype ="),
        ("image-sft-lora", [FLOAT32, NO_CACHE], "24.2 GB", "a GPU of 24 GB; …, 19 GB what lowers it: policy.diff"),
        ("medium-nft", ["--train.train_batch_per_replica=144"], "11.4 GB", None),
        ("medium-dpo-lora", [], "11.3 GB", None),
    ],
)
def test_lora_recipes_fit_on_one_small_gpu_and_what_undoes_that_is_named(
    medium: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    options: list[str],
    peak: str,
    said: str | None,
) -> None:
    path = RECIPES / f"stable-diffusion-3-5-{recipe}.toml"
    where = ["--nproc-per-node", "1", "--train.device=cuda", f"--policy.model_name_or_path={medium}"]
    code, report, _ = check(capsys, "--config", path, *where, *options)
    assert code == 0
    assert f" peak {peak} " in report
    if said is None:
        assert "is above" not in report
    else:
        limit, lowers = said.split("…")
        assert f"the peak, while encoding, is above {limit}the largest part of it: text encoders" in report
        assert lowers in report


@pytest.mark.parametrize(
    ("options", "part", "remedy"),
    [
        (["--policy.diffusers.dtype=bfloat16"], "activations and other work", "train.train_policy.mini_batch = 1, now"),
        (
            ["--policy.diffusers.dtype=bfloat16", "--train.train_policy.mini_batch=1", "--policy.lora=none"],
            "optimizer state",
            "[policy.lora] in place of all weights",
        ),
    ],
)
def test_the_largest_part_of_the_peak_is_named_with_its_key(
    write_toml: Callable[..., Path], options: list[str], part: str, remedy: str
) -> None:
    from cosmos_rl.launcher.check import estimate

    size = "--policy.diffusers.inference_size=[8, 8]" if "mini_batch = 1" not in remedy else "--train.seed=1"
    config, files = sizes(write_toml(), size, *options)
    memory = estimate.memory(config, files, on_cpu=False, saves=1)
    assert sum(memory.at_peak.values()) == memory.peak
    assert list(advice.peak_lines(config, memory, memory.peak)) == []
    first, second = advice.peak_lines(config, memory, memory.peak - 1)
    assert "of this machine's GPU; the largest part of it: " + part in first
    assert second.startswith(f"what lowers it: {remedy}")


def test_nothing_is_said_where_an_unknown_gpu_may_be_small_and_the_run_is_smaller(
    write_toml: Callable[..., Path],
) -> None:
    from cosmos_rl.launcher.check import estimate

    config, files = sizes(write_toml())
    memory = estimate.memory(config, files, on_cpu=False, saves=1)
    assert list(advice.peak_lines(load_config(write_toml()), memory, None)) == []


@pytest.mark.slow
def test_a_base_in_4_bits_brings_flux_below_16_gb_on_one_gpu() -> None:
    from cosmos_rl.launcher.check import estimate
    from tests.support.published import files_of

    options = ["--train.train_policy.cache.text=true", "--policy.parallelism.dp_shard_size=1"]
    path = ROOT / "configs" / "flux" / "flux-1-dev-sft-lora.toml"

    def peak(*more: str) -> estimate.Memory:
        config = load_config(path, [*options, *more])
        return estimate.memory(config, files_of(config), on_cpu=False, saves=None)

    plain, packed = peak(), peak("--policy.lora.quantize_base=nf4")
    assert plain.peak > 24e9
    assert packed.peak < 16e9
    full = load_config(path, [*options, "--policy.lora.quantize_base=nf4"])
    remedy = [*advice.peak_lines(full, packed, packed.peak - 1)][1]
    assert "more GPUs" not in remedy or 'quantize_base = "none"' in remedy
    assert packed.parts["frozen transformer weights"] < 0.27 * plain.parts["frozen transformer weights"]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("form", ["none", "int8", "nf4"])
def test_a_form_of_the_base_is_named_where_it_is_smaller_on_a_rank(shards: int, form: str) -> None:
    from cosmos_rl.launcher.check import estimate
    from tests.support.published import files_of

    path = ROOT / "configs" / "flux" / "flux-1-dev-sft-lora.toml"

    def frozen(form: str) -> int:
        options = [f"--policy.lora.quantize_base={form}", f"--policy.parallelism.dp_shard_size={shards}"]
        config = load_config(path, options)
        return estimate.memory(config, files_of(config), on_cpu=False, saves=None).parts[estimate.FROZEN]

    named = advice.smaller_base(
        load_config(path, [f"--policy.lora.quantize_base={form}", f"--policy.parallelism.dp_shard_size={shards}"])
    )
    smaller = [other for other in ("int8", "nf4") if frozen(other) < frozen(form)]
    assert named in smaller if smaller else named is None
