"""A sum whose terms the server does not see. Bonawitz et al., CCS 2017, Figure 4, against a semi-honest server.

Every client hides its vector under one mask per other client, which cancel in the sum, and one of its own. Shares of
what makes the masks lie with the other clients, so that the sum can be opened although some clients are lost.

    client: advertise -> deal -> mask -> reveal        server: passes messages on, adds, `open_sum`

Each step is a function of the state before it and of messages; nothing is sent here. Keys are for one sum only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedtailor.aggregation import shamir
from fedtailor.aggregation.shamir import SHARE, Entropy

Words = NDArray[np.uint64]  # numbers modulo 2**64
KEY = 32  # bytes of a key or a seed


@dataclass(frozen=True)
class Keys:
    """A client's private keys: one to encrypt shares with, one to agree on masks with. The latter may be opened."""

    encryption: bytes
    masking: bytes


@dataclass(frozen=True)
class Dealt:
    """A client that has dealt its shares."""

    me: int
    keys: Keys
    adverts: dict[int, bytes]
    threshold: int
    context: bytes
    seed: bytes  # of its own mask
    own_share: bytes


@dataclass(frozen=True)
class Masked:
    """A client that has sent its masked vector: the shares it holds, by who dealt them. It knows no seed any more."""

    me: int
    threshold: int
    shares: dict[int, bytes]


def least(clients: int) -> int:
    """The lowest threshold allowed: more than half, so that no two groups can be told different stories."""
    return max(2, clients // 2 + 1)


def advertise(entropy: Entropy = os.urandom) -> tuple[Keys, bytes]:
    """First step: fresh keys, and their public halves for everybody."""
    keys = Keys(entropy(KEY), entropy(KEY))
    return keys, _public(keys.encryption) + _public(keys.masking)


def deal(
    keys: Keys, me: int, adverts: Mapping[int, bytes], threshold: int, context: bytes, entropy: Entropy = os.urandom
) -> tuple[Dealt, dict[int, bytes]]:
    """Second step: a share of the own mask's seed and of the masking key for every other client, encrypted for it."""
    everybody = sorted(adverts)
    if me not in adverts or not least(len(adverts)) <= threshold <= len(adverts):
        raise ValueError(f"{threshold} of {len(adverts)} clients: at least {least(len(adverts))} must open a sum")
    if len(set(adverts.values())) != len(adverts):
        raise ValueError("two clients with the same keys")
    seed = entropy(KEY)
    of_seed = shamir.split(seed, everybody, threshold, entropy)
    of_key = shamir.split(keys.masking, everybody, threshold, entropy)
    sealed = {
        other: ChaCha20Poly1305(
            _shared_key(keys.encryption, adverts[other][:KEY], b"shares", me, other, context)
        ).encrypt(
            bytes(12), of_seed[other] + of_key[other], context
        )  # a key for one direction of one pair in one sum: its only message may have the nonce 0
        for other in everybody
        if other != me
    }
    return Dealt(me, keys, dict(adverts), threshold, context, seed, of_seed[me] + of_key[me]), sealed


def mask(dealt: Dealt, inbox: Mapping[int, bytes], values: Words) -> tuple[Masked, Words]:
    """Third step: the vector under the masks shared with those whose shares arrived, and under the own one."""
    if len(inbox) + 1 < dealt.threshold:
        raise ValueError(f"shares of {len(inbox) + 1} clients, {dealt.threshold} needed")
    me, keys, context = dealt.me, dealt.keys, dealt.context
    shares = {me: dealt.own_share}
    total = values + _expand(dealt.seed, len(values))
    for other, box in inbox.items():
        advert = dealt.adverts[other]
        try:
            key = _shared_key(keys.encryption, advert[:KEY], b"shares", other, me, context)
            shares[other] = ChaCha20Poly1305(key).decrypt(bytes(12), box, context)
        except InvalidTag:
            raise ValueError(f"the share of client {other} was changed on its way") from None
        _add_mask(total, _pair_seed(keys.masking, advert, me, other, context), is_plus=me < other)
    return Masked(me, dealt.threshold, shares), total


def reveal(masked: Masked, survivors: Iterable[int]) -> dict[int, bytes]:
    """Last step: of everybody one share, of the own mask's seed if its vector arrived, else of its masking key."""
    alive = set(survivors)
    if masked.me not in alive or not alive <= masked.shares.keys() or len(alive) < masked.threshold:
        raise ValueError(f"{len(alive)} vectors arrived, {masked.threshold} needed, mine among them")
    return {who: share[:SHARE] if who in alive else share[SHARE:] for who, share in masked.shares.items()}


def open_sum(
    adverts: Mapping[int, bytes],
    dealers: Iterable[int],
    vectors: Mapping[int, Words],
    revealed: Mapping[int, Mapping[int, bytes]],
    threshold: int,
    context: bytes,
) -> Words:
    """The server's step: the sum of the vectors that arrived, all masks taken away."""
    if min(len(vectors), len(revealed)) < threshold:
        raise ValueError(f"{len(vectors)} vectors and {len(revealed)} sets of shares, {threshold} needed")
    few = dict(list(revealed.items())[:threshold])
    total = add_modulo(vectors.values())
    for who in dealers:
        secret = shamir.combine({holder: shares[who] for holder, shares in few.items()}, KEY)
        if who in vectors:
            total -= _expand(secret, len(total))
        elif _public(secret) != adverts[who][KEY:]:
            raise ValueError(f"the shares of client {who} do not give its key")
        else:
            for other in vectors:  # takes away what `other` put on for a pair whose second half never came
                seed = _pair_seed(secret, adverts[other], who, other, context)
                _add_mask(total, seed, is_plus=who < other)
    return total


def add_modulo(vectors: Iterable[Words]) -> Words:
    first, *others = vectors
    total = first.copy()
    for vector in others:
        total += vector
    return total


def largest(fraction_bits: int, clients: int) -> float:
    """No value of a vector may be as large as this, else a sum of so many clients might not fit."""
    return 2.0 ** (63 - fraction_bits) / clients


def is_in_range(values: NDArray[np.float64], fraction_bits: int, clients: int) -> bool:
    """Whether a sum of so many such vectors fits."""
    return bool(np.all(np.abs(values) < largest(fraction_bits, clients)))


def limit_to_range(values: NDArray[np.float64], fraction_bits: int, clients: int) -> NDArray[np.float64]:
    """The nearest vector whose sum fits; what is no number becomes 0."""
    limit = np.nextafter(largest(fraction_bits, clients), 0)
    return np.clip(np.nan_to_num(values, nan=0.0, posinf=limit, neginf=-limit), -limit, limit)


def encode_fixed_point(values: NDArray[np.float64], fraction_bits: int, clients: int) -> Words:
    """Numbers as multiples of 2**-fraction_bits, to be added up over so many clients; halves are rounded to even."""
    if not is_in_range(values, fraction_bits, clients):
        limit = largest(fraction_bits, clients)
        raise ValueError(f"a number is not within ±{limit:.6g}, the range of a secure sum")
    return np.rint(values * 2.0**fraction_bits).astype(np.int64).view(np.uint64)


def decode_fixed_point(words: Words, fraction_bits: int) -> NDArray[np.float64]:
    return words.view(np.int64).astype(np.float64) * 2.0**-fraction_bits


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _shared_key(private: bytes, public: bytes, purpose: bytes, first: int, second: int, context: bytes) -> bytes:
    """A key that two clients alone know."""
    common = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    info = b"fedtailor secure sum|%s|%d|%d|%s" % (purpose, first, second, context)
    return HKDF(hashes.SHA256(), KEY, salt=None, info=info).derive(common)


def _pair_seed(private: bytes, advert: bytes, me: int, other: int, context: bytes) -> bytes:
    return _shared_key(private, advert[KEY:], b"mask", min(me, other), max(me, other), context)


def _expand(seed: bytes, length: int) -> Words:
    """A mask: the key stream of ChaCha20. A seed serves one mask only, so the nonce may be 0."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)


def _add_mask(total: Words, seed: bytes, *, is_plus: bool) -> None:
    words = _expand(seed, len(total))
    np.add(total, words, out=total) if is_plus else np.subtract(total, words, out=total)
