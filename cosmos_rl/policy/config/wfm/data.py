"""`[dataloader_train]` and `[dataloader_val]` of the older configuration.

The older format had a table for each `type`; here one table has the keys of both, and the translator names what a type
lacks.
"""

from typing import Literal

from pydantic import Field

from cosmos_rl.policy.config.base import AnyTable, Table
from cosmos_rl.policy.config.wfm import Count


class FunctionConfig(Table):
    """A function by name: `[[trainer.callbacks]]`, or an augmentation."""

    name: str
    args: AnyTable = Field(default_factory=dict)
    step_size: int | None = None
    """In a published recipe this stands here and not in `args`."""


class WebDatasetConfig(Table):
    """`dataset` of a loader of the type "web"; with `len_t5` it stands for random data."""

    dataset_name: str | None = None
    is_train: bool | None = None
    resolution: str | None = None
    augmentor_name: str | None = None
    object_store: str | None = None
    detshuffle: bool | None = None
    caption_type: str | None = None
    embedding_type: str | None = None
    dataset_resolution_type: str | None = None
    len_t5: int | None = None
    t5_dim: int | None = None
    num_video_frames: int | None = None
    chunk_size: int | None = None
    min_fps_thres: int | None = None
    max_fps_thres: int | None = None
    long_caption_ratio: int | None = None
    medium_caption_ratio: int | None = None
    short_caption_ratio: int | None = None
    user_caption_ratio: int | None = None
    use_native_fps: bool | None = None
    video_decoder_name: str | None = None


class LoaderConfig(Table):
    """Keys of a loader of either type."""

    batch_size: Count = 1
    num_workers: int = 0
    use_cache: bool = False
    cache_size: int | None = None
    concat_size: int | None = None
    cache_augment_fn: FunctionConfig | None = None
    cache_replay_name: str | None = None
    webdataset: bool = False
    shuffle: bool = False
    drop_last: bool = True
    pin_memory: bool = True
    prefetch_factor: int = 4


class WebLoaderConfig(LoaderConfig):
    """`dataloader` of an entry of the type "web"."""

    dataset: WebDatasetConfig = WebDatasetConfig()


class DataEntryConfig(LoaderConfig):
    """`image_dataloader` or `video_dataloader`: of "web" with `dataloader`, of "local" with the keys themselves."""

    ratio: float = 1.0
    """Share of the batches; an entry with 0 is not read."""
    dataloader: WebLoaderConfig | None = None
    type: Literal["image", "video"] | None = None
    dataset_dir: str = ""
    """Folder with `videos/*.mp4` and `metas/*.txt`."""
    image_size: tuple[int, int] | None = None
    """[height, width]."""
    video_size: tuple[int, int] | None = None
    """[height, width]."""
    num_frames: int | None = None
    offline_text_embedding: bool = False
    text_encoder_type: str = "t5_xxl"

    @property
    def loader(self) -> LoaderConfig:
        """Where its batch size and workers stand."""
        return self.dataloader or self


class DataLoaderConfig(Table):
    """`[dataloader_train]` and `[dataloader_val]`."""

    type: Literal["web", "local"] = "web"
    image_dataloader: DataEntryConfig | None = None
    video_dataloader: DataEntryConfig | None = None

    @property
    def entry(self) -> DataEntryConfig | None:
        """The entry that is read: videos, or images where no videos are."""
        entries = [one for one in (self.video_dataloader, self.image_dataloader) if one is not None and one.ratio > 0]
        return next(iter(entries), None)

    @property
    def is_mock(self) -> bool:
        """Whether it stands for random data."""
        entry = self.entry
        return entry is not None and entry.dataloader is not None and entry.dataloader.dataset.len_t5 is not None
