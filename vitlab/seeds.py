"""Seeds derived from a run's one seed, so that no random stream depends on workers, order or interruptions."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Hash a purpose and its coordinates to a seed.

    Args:
        *parts: the run's seed, the name of the stream and where in it, such as `(7, "augment", epoch, index, repeat)`.

    Returns:
        An integer in [0, 2**63), the same on every machine; streams of different parts are independent.
    """
    digest = hashlib.blake2b("\x1f".join(map(repr, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
