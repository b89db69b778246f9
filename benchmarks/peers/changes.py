"""What is changed in the peers: devices, lengths of the texts that the tiny model knows, and where their loops wait.

``yield`` makes their ``main`` a generator: each epoch runs to the end of sampling, and then to the end of learning.
Everything else is set from outside (``loops.py``): their configuration, and stand-ins for what is not installed.
"""

from benchmarks.peers.patch import Change

TEXT_TOKENS = 12
"""Those of the tiny checkpoint; the peers have 77 and 128."""
_ENCODING = "flow_grpo/diffusers_patch/train_dreambooth_lora_sd3.py"
_NFT, _GRPO = "scripts/train_nft_sd3.py", "scripts/train_sd3.py"


def _wait(file: str, heading: str, phase: str) -> Change:
    return Change(f"wait before {phase}", file, rf"(?m)^( +){heading}$", rf'\1yield "{phase}", locals()')


def _lengths(file: str) -> tuple[Change, Change]:
    return (
        Change("length of texts", file, "max_sequence_length=128", f"max_sequence_length={TEXT_TOKENS}", 4),
        Change("length of texts for CLIP", _ENCODING, "max_length=77", f"max_length={TEXT_TOKENS}"),
    )


NFT = (
    Change("no GPU", _NFT, r'f"cuda:\{local_rank\}"', '"cpu"'),
    Change("no pinned memory", _NFT, "pin_memory=True", "pin_memory=False", 2),
    *_lengths(_NFT),
    _wait(_NFT, "# SAMPLING", "sampling"),
    _wait(_NFT, "# TRAINING", "learning"),
)
GRPO = (
    Change("no loader processes", _GRPO, r"num_workers=[18],", "num_workers=0,", 4),
    *_lengths(_GRPO),
    _wait(_GRPO, "#{20} SAMPLING #{20}", "sampling"),
    _wait(_GRPO, "#{20} TRAINING #{20}", "learning"),
)
FOLDERS = ("config", "flow_grpo", "scripts")
"""Of the peers' checkouts, those that are used."""
SCRIPTS = {"nft": _NFT, "grpo": _GRPO}
