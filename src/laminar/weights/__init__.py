"""Weight versions on one machine: published once, checked by the relay, read by every replica."""

from laminar.weights.manifest import Layout, Manifest, TensorRange, fingerprint_of
from laminar.weights.relay import Manager, Rejected, Relay, RelayBeat, RelayEvent, RelayReply, RelaySettings, describe
from laminar.weights.store import Lease, NoFreeSlot, Published, Reclaimed, SlotStore
from laminar.weights.versions import VersionLog, VersionRecord

__all__ = [
    "Layout",
    "Lease",
    "Manager",
    "Manifest",
    "NoFreeSlot",
    "Published",
    "Reclaimed",
    "Rejected",
    "Relay",
    "RelayBeat",
    "RelayEvent",
    "RelayReply",
    "RelaySettings",
    "SlotStore",
    "TensorRange",
    "VersionLog",
    "VersionRecord",
    "describe",
    "fingerprint_of",
]
