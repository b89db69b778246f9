"""Which elements of a data set are taken. No torch."""

from collections.abc import Sequence


def choose_indices(length: int, limit: int | None, *, spread: bool) -> Sequence[int]:
    """At most ``limit`` of ``length`` places: the first ones, or spread over all at even distances."""
    if limit is None or limit >= length:
        return range(length)
    if spread:
        return [i * length // limit for i in range(limit)]
    return range(limit)
