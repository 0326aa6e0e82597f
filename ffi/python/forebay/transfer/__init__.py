"""Transfers: a prompt's rows go from a prefill instance to a decode instance, layer by layer, while it is computed.

    sender: add -> begin -> (memory, computed) a layer -> finish -> Released, Ended
    receiver: Met -> grant -> Ready a layer -> Whole

A `Sender` is a rank of a prefill instance, a `Receiver` a rank of a decode instance. Each has a thread of the library:
calls are queued and wait for nothing, and events say what became of them. docs/transfer.md has the protocol.
"""

from .events import (
    Connected,
    Drained,
    Ended,
    Failed,
    Granted,
    Lost,
    Met,
    Payload,
    Ready,
    ReceiverEvent,
    Refused,
    Released,
    SenderEvent,
    Unopened,
    Whole,
)
from .receiver import HostPages, Receiver, ReceiverStats
from .sender import Computed, Lag, Sender, SenderStats
from .side import (
    Component,
    ComponentPlace,
    Parts,
    PlanePlace,
    Rank,
    TransferOptions,
    TransferSide,
    Use,
    transfer_bytes,
)

__all__ = [
    "Component", "ComponentPlace", "Computed", "Connected", "Drained", "Ended", "Failed", "Granted", "HostPages", "Lag",
    "Lost", "Met", "Parts", "Payload", "PlanePlace", "Rank", "Ready", "Receiver", "ReceiverEvent", "ReceiverStats",
    "Refused", "Released", "Sender", "SenderEvent", "SenderStats", "TransferOptions", "TransferSide", "Unopened", "Use",
    "Whole", "transfer_bytes",
]  # fmt: skip
