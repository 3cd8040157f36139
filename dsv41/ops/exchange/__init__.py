from .api import (
    exchange_combine,
    exchange_pack,
    exchange_pack_fixed,
    exchange_plan,
    exchange_unpack,
    record_bytes,
)
from .handle import Exchange, Flight, usual_capacity
from .mega import mega_experts
from .peers import agree, facts
from .transport import GroupTransport, LocalTransport, PeerLost, Transport, deepep_transport

__all__ = [
    "Exchange",
    "Flight",
    "GroupTransport",
    "LocalTransport",
    "PeerLost",
    "Transport",
    "agree",
    "deepep_transport",
    "exchange_combine",
    "exchange_pack",
    "exchange_pack_fixed",
    "exchange_plan",
    "exchange_unpack",
    "facts",
    "mega_experts",
    "record_bytes",
    "usual_capacity",
]
