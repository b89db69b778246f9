"""Prompt sets that others publish: where each file is at a fixed commit, and the digest that it must have there."""

import hashlib
from dataclasses import dataclass

_RAW = "https://raw.githubusercontent.com"


@dataclass(frozen=True)
class PublishedFile:
    """One split of a published set."""

    url: str
    """At a fixed commit."""
    digest: str
    """``sha256:<hex>`` of its bytes, or ``git:<hex>``: the name that git has for them, where that is what is known."""
    prompts: int | None = None
    """How many it holds; None: not known before it is fetched."""


@dataclass(frozen=True)
class PublishedSet:
    """A prompt set, its splits, and where it comes from."""

    file: str
    """Its file name in the cache, with the split in braces."""
    splits: dict[str, PublishedFile]
    """Empty: it is made here."""
    source: str = ""
    """The repository and its licence."""


@dataclass(frozen=True)
class _Repository:
    """A repository at a commit."""

    name: str
    commit: str
    licence: str

    def publish(self, file: str, **splits: tuple[str, str, int | None]) -> PublishedSet:
        """``splits``: split -> (path, digest, prompts)."""
        root = f"{_RAW}/{self.name}/{self.commit}"
        files = {split: PublishedFile(f"{root}/{path}", digest, n) for split, (path, digest, n) in splits.items()}
        return PublishedSet(file, files, f"{self.name}, {self.licence}")


_NFT = _Repository("NVlabs/DiffusionNFT", "24af5554898d85e93efa492f42b5e9cdf4156e9b", "Apache-2.0")
_DANCE = _Repository("XueZeyue/DanceGRPO", "15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344", "Apache-2.0")
_GENEVAL = _Repository("djghosh13/geneval", "af4902f24d3ca90ebbb446dd9891a59e0f82725f", "MIT")
_PARTI = _Repository("google-research/parti", "5a657978134374ce28973948331b319adef164bd", "Apache-2.0")
_COMPBENCH = _Repository("Karine-Huang/T2I-CompBench", "1b7094991a57f3c22abdd4f6e8ba6c1a15517073", "MIT")
_VBENCH = _Repository("Vchitect/VBench", "45e79ec14e69a2187202c675d2dbce1a71843d53", "Apache-2.0")
_VIDEO_PROMPTS = (
    "assets/video_prompts.txt",
    "sha256:c96ceb6c93c16809f6fef53d6d488c34c78823e5edd20f6d907d90c9e5653db1",
    50_000,
)
_COMPBENCH_DIGESTS = {
    "color_train": "db5d3287027d453f8c977f0c7315f8a01a770f02f61fa54ae19406762982393f",
    "color_val": "1634259756dbc77d13093d907d414480080ec9790a8c97ad09efaea7b2534f2d",
    "shape_train": "451bdfccd330d4cf979d45664817be7959e89250b93d5c591cc562b858175a87",
    "shape_val": "37e1a276906c7ea9516cbd7ac8501be896006c0c17ca7344f260562834455bae",
    "texture_train": "4846315c5972f9e9cc82e4833099e8ec2c28b999ca77269512715f3f56bde54f",
    "texture_val": "fbb5363515b4a28009e360afaaaf389d2dd2289e50dbb0c6ef4ea0c7fe4f3d4f",
    "spatial_train": "af14cdf2320057d98f94077e6211c2ddfaabfbb9e3842873657baabb17e00de6",
    "spatial_val": "8707a1d7e42ce3002d95363cf55f74bd043c843ae27108f5125aaaa7840ca988",
    "3d_spatial_train": "0bba7e9ad31b0ce7908f6cbf2426a4b7ef6e8b841c1b737d0ad2d5b8e688dd93",
    "3d_spatial_val": "c9953597315f36a5fcb41291bb19bdc6ab5f64a0fa760d691b4854a73f5d1fe9",
    "numeracy_train": "f66bb8708cb0be23c0406e14d892b25661b2b71e3e72abddc79c38466ab629c6",
    "numeracy_val": "dad8df141604b70ba7554bec724e3db0a80023680769b5c514854ea2d2527bbe",
    "non_spatial_train": "dbac5a9ec83204dcd0c3538a12d3212e2ce66db6f7ba45b49a1d869b2d3f2430",
    "non_spatial_val": "04c56cc9ac441dc9ea6c5157652058bd1635b5308526dd31bb29a1caab9a758d",
    "complex_train": "d214ac45cb3c5307dd14a144c8c69aa5ffdcc7be74ff71b5dac989f8ca9f924b",
    "complex_val": "1b808018b8d9916db3d47d5aa2ef18377a3549a56901a474156f799824cdf3b4",
}
"""Each of the splits for training has 700 prompts, each for validation 300."""

PUBLISHED = {
    "pickscore": _NFT.publish(
        "{split}.txt",
        train=(
            "dataset/pickscore/train.txt",
            "sha256:2f425adcbb9a6d0feee7c6c448e1cb83a1f71deca9434b803907e2578eca837f",
            25_432,
        ),
        test=(
            "dataset/pickscore/test.txt",
            "sha256:d75c025fa451866e70f7e36243f7cdd93095523cb51f5f9651f2ce3236d20262",
            2_048,
        ),
    ),
    "ocr": _NFT.publish(
        "{split}.txt",
        train=("dataset/ocr/train.txt", "git:3ce0521b77b0a9031191d66ecc36ebaaf27a3922", None),
        test=("dataset/ocr/test.txt", "sha256:4dd8caf3ab6ade73bd376c7d14c6ca49b6eacfb1bd321e22c40714ae4a98d4dc", 1_018),
    ),
    "geneval": _NFT.publish(
        "{split}_metadata.jsonl",
        train=("dataset/geneval/train_metadata.jsonl", "git:0b97e8a6802c08fc7537cd00c76ae79c851bddcb", None),
        test=(
            "dataset/geneval/test_metadata.jsonl",
            "sha256:cec4b24b9fee7bac21c8f787054ecc8dc9ff831674037713a4cd35e0f0a74a28",
            2_212,
        ),
    ),
    "dance_grpo_t2v": _DANCE.publish("{split}.txt", train=_VIDEO_PROMPTS, test=_VIDEO_PROMPTS),
    "drawbench": _NFT.publish(
        "{split}.txt",
        test=(
            "dataset/drawbench/test.txt",
            "sha256:9006b98feabb94b28a2bc0c88de42fd4f31a9ec3c2a19e308a02c5385b7172f0",
            1_000,
        ),
    ),
    "geneval_553": _GENEVAL.publish(
        "{split}_metadata.jsonl",
        test=(
            "prompts/evaluation_metadata.jsonl",
            "sha256:5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13",
            553,
        ),
    ),
    "parti_prompts": _PARTI.publish(
        "{split}.tsv",
        test=("PartiPrompts.tsv", "sha256:fab29e41bb512a169b56acab4cf2a41dcb675e285df2efcde6640c7dd3c440eb", 1_632),
    ),
    "t2i_compbench": _COMPBENCH.publish(
        "{split}.txt",
        **{
            split: (f"examples/dataset/{split}.txt", f"sha256:{digest}", 300 if split.endswith("val") else 700)
            for split, digest in _COMPBENCH_DIGESTS.items()
        },
    ),
    "vbench": _VBENCH.publish(
        "{split}.txt",
        test=(
            "prompts/all_dimension.txt",
            "sha256:f9b50654f81ab732b9235d5bb91f0c3a4d152fac19249ce3a3a9185b2d80d8c3",
            946,
        ),
    ),
    "vbench_2": _VBENCH.publish(
        "{split}.txt",
        test=(
            "VBench-2.0/prompts/VBench2_full_text.txt",
            "sha256:7d5e2e955339c9ee9f26e7116765155bb93b67eb222f716c23827d777b301261",
            1_013,
        ),
    ),
}
"""By `dataset.name`."""


def compute_digest(content: bytes, like: str) -> str:
    """Of a file's bytes, in the form that the digest ``like`` has."""
    if like.startswith("git:"):  # the name of a blob: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
        return "git:" + hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return "sha256:" + hashlib.sha256(content).hexdigest()


def find_difference(published: PublishedFile, content: bytes) -> str:
    """How a file's bytes differ from those of the published one; empty: they are the same."""
    found = compute_digest(content, published.digest)
    if found == published.digest:
        return ""
    return f"has the digest {found}, and the published file {published.url} has {published.digest}"
