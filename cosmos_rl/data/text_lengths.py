"""Which texts are longer than the text encoders take: what follows is cut off, so it is said once. No torch."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_AT_ONCE = 1000
_MOST_COUNTED = 10_000
"""Long texts whose tokens are counted, at about 0.4 ms each; of more it is said that there are at least so many."""
Named = tuple[str, str]
"""(name for messages, text)."""


@dataclass(frozen=True)
class TextEncoder:
    """What counts the tokens of one of a pipeline's text encoders."""

    name: str
    """Its kind, such as CLIP or T5."""
    limit: int
    """Tokens that it takes, the special ones included."""
    lengths: Callable[[Sequence[str]], list[int]]
    """Texts -> their tokens, the special ones included."""


def build_encoder(
    tokenizer_class: str, longest: int, limit: int, lengths: Callable[[Sequence[str]], list[int]]
) -> TextEncoder:
    """A text encoder by the class of its tokenizer: CLIP takes ``longest`` tokens, all others what is configured."""
    name = tokenizer_class.removesuffix("Fast").removesuffix("Tokenizer") or "text encoder"
    if name == "CLIP":
        limit = longest
    return TextEncoder(name, limit, lengths)


def load_encoders(folder: Path, limit: int) -> list[TextEncoder]:
    """Those of a pipeline folder whose tokenizer is there as one file (``tokenizer.json``)."""
    from tokenizers import Tokenizer  # late: only with a pipeline to look into

    found = []
    for file in sorted(folder.glob("tokenizer*/tokenizer.json")):
        config = json.loads((file.parent / "tokenizer_config.json").read_bytes())
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()

        def lengths(texts: Sequence[str], tokenizer: Tokenizer = tokenizer) -> list[int]:
            return [len(encoded) for encoded in tokenizer.encode_batch(list(texts))]

        found.append(build_encoder(config["tokenizer_class"], int(config["model_max_length"]), limit, lengths))
    return found


def describe_truncation(texts: Sequence[Named], encoders: Sequence[TextEncoder], noun: str = "captions") -> str:
    """One line about the texts that are cut; empty when none is."""
    distinct = {(encoder.name, encoder.limit): encoder for encoder in reversed(encoders)}
    counts, longest, least = list[tuple[int, TextEncoder]](), (0, ""), ""
    for encoder in sorted(distinct.values(), key=lambda e: e.name, reverse=True):
        candidates = _candidates(texts, encoder)
        lengths = [(count, name) for name, count in _find_too_long(candidates[:_MOST_COUNTED], encoder)]
        if len(candidates) > _MOST_COUNTED:
            least = "at least "
        if lengths:
            counts.append((len(lengths), encoder))
            longest = max(longest, max(lengths))
    if not counts:
        return ""
    (first, encoder), *rest = counts
    parts = [f"{least}{first} of {len(texts)} {noun} are longer than {encoder.limit} tokens ({encoder.name})"]
    parts += [f"{count} than {encoder.limit} ({encoder.name})" for count, encoder in rest]
    return f"{', '.join(parts)}; what is beyond is cut off; longest: {longest[1]}, {longest[0]} tokens"


def _candidates(texts: Sequence[Named], encoder: TextEncoder) -> list[Named]:
    """Those that may be too long: a token has at least one character, unless one that is not ASCII is expanded."""
    return [named for named in texts if len(named[1]) > encoder.limit - 3 or not named[1].isascii()]


def _find_too_long(texts: Sequence[Named], encoder: TextEncoder) -> list[tuple[str, int]]:
    """(name, tokens) of those that are longer than the encoder takes."""
    found = []
    for first in range(0, len(texts), _AT_ONCE):
        part = texts[first : first + _AT_ONCE]
        lengths = _lengths([text for _, text in part], encoder)
        found += [(name, count) for (name, _), count in zip(part, lengths, strict=True) if count > encoder.limit]
    return found


def _lengths(texts: Sequence[str], encoder: TextEncoder) -> list[int]:
    """Tokens of each text; 0 for one that the tokenizer refuses, which is named when its turn comes."""
    try:
        return encoder.lengths(texts)
    except Exception:
        if len(texts) == 1:
            return [0]
        return [_lengths([text], encoder)[0] for text in texts]


def find_refusal(text: str, encoders: Sequence[TextEncoder]) -> str | None:
    """What a tokenizer raises for ``text``; None: all take it."""
    for encoder in encoders:
        try:
            encoder.lengths([text])
        except Exception as error:
            return f"the tokenizer of {encoder.name} cannot read it ({type(error).__name__}: {error})"
    return None
