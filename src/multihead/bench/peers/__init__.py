"""The candidates: this library and its forms, and every peer that may be installed."""

from __future__ import annotations

from collections.abc import Iterable

from .base import Peer, Prepared
from .flex import Flex
from .jax_xla import JaxXla
from .onnx_runtime import OrtGqa, OrtMha
from .ours import EntropyLoss, InFloat32, InFloat32Pages, InOnePiece, Multihead, Observing
from .torch_eager import TorchEager
from .torch_sdpa import TorchSdpa

__all__ = ["OURS", "PEERS", "VARIANTS", "Peer", "Prepared", "peers"]

OURS = Multihead()
VARIANTS = {peer.name: peer for peer in (Observing(), InFloat32(), InFloat32Pages(), InOnePiece(), EntropyLoss())}
PEERS = {peer.name: peer for peer in (TorchSdpa(), TorchEager(), Flex(), OrtMha(), OrtGqa(), JaxXla())}


def peers(names: Iterable[str] | None = None) -> list[Peer]:
    """The peers of these names in the order of the registry, by default all, installed or not.

    Raises:
        ValueError: a name that no peer has; the message lists those that there are.
    """
    if names is None:
        return list(PEERS.values())
    asked = set(names)
    for name in sorted(asked - PEERS.keys()):
        raise ValueError(f"no peer is called {name!r}: there are {', '.join(PEERS)}")
    return [peer for peer in PEERS.values() if peer.name in asked]
