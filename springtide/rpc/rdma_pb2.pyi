from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RdmaPort(_message.Message):
    __slots__ = ("link", "gid", "lid", "mtu")
    LINK_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    LID_FIELD_NUMBER: _ClassVar[int]
    MTU_FIELD_NUMBER: _ClassVar[int]
    link: int
    gid: str
    lid: int
    mtu: int
    def __init__(self, link: _Optional[int] = ..., gid: _Optional[str] = ..., lid: _Optional[int] = ..., mtu: _Optional[int] = ...) -> None: ...

class RdmaQueuePair(_message.Message):
    __slots__ = ("port", "number", "first_packet", "max_reads_out", "max_reads_in")
    PORT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_PACKET_FIELD_NUMBER: _ClassVar[int]
    MAX_READS_OUT_FIELD_NUMBER: _ClassVar[int]
    MAX_READS_IN_FIELD_NUMBER: _ClassVar[int]
    port: RdmaPort
    number: int
    first_packet: int
    max_reads_out: int
    max_reads_in: int
    def __init__(self, port: _Optional[_Union[RdmaPort, _Mapping]] = ..., number: _Optional[int] = ..., first_packet: _Optional[int] = ..., max_reads_out: _Optional[int] = ..., max_reads_in: _Optional[int] = ...) -> None: ...

class RdmaMemory(_message.Message):
    __slots__ = ("address", "num_bytes", "key")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    address: int
    num_bytes: int
    key: int
    def __init__(self, address: _Optional[int] = ..., num_bytes: _Optional[int] = ..., key: _Optional[int] = ...) -> None: ...

class RdmaGreeting(_message.Message):
    __slots__ = ("caller_nonce",)
    CALLER_NONCE_FIELD_NUMBER: _ClassVar[int]
    caller_nonce: bytes
    def __init__(self, caller_nonce: _Optional[bytes] = ...) -> None: ...

class RdmaWelcome(_message.Message):
    __slots__ = ("server_nonce", "incarnation", "ports")
    SERVER_NONCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    server_nonce: bytes
    incarnation: int
    ports: _containers.RepeatedCompositeFieldContainer[RdmaPort]
    def __init__(self, server_nonce: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., ports: _Optional[_Iterable[_Union[RdmaPort, _Mapping]]] = ...) -> None: ...

class RdmaOffer(_message.Message):
    __slots__ = ("version", "expected_incarnation", "caller_name", "caller_incarnation", "paths", "session")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CALLER_NAME_FIELD_NUMBER: _ClassVar[int]
    CALLER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    expected_incarnation: int
    caller_name: str
    caller_incarnation: int
    paths: _containers.RepeatedCompositeFieldContainer[RdmaOfferedPath]
    session: RdmaSession
    def __init__(self, version: _Optional[int] = ..., expected_incarnation: _Optional[int] = ..., caller_name: _Optional[str] = ..., caller_incarnation: _Optional[int] = ..., paths: _Optional[_Iterable[_Union[RdmaOfferedPath, _Mapping]]] = ..., session: _Optional[_Union[RdmaSession, _Mapping]] = ...) -> None: ...

class RdmaOfferedPath(_message.Message):
    __slots__ = ("queue_pair", "port")
    QUEUE_PAIR_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    queue_pair: RdmaQueuePair
    port: int
    def __init__(self, queue_pair: _Optional[_Union[RdmaQueuePair, _Mapping]] = ..., port: _Optional[int] = ...) -> None: ...

class SignedRdmaOffer(_message.Message):
    __slots__ = ("caller_nonce", "server_nonce", "offer", "proof")
    CALLER_NONCE_FIELD_NUMBER: _ClassVar[int]
    SERVER_NONCE_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    caller_nonce: bytes
    server_nonce: bytes
    offer: bytes
    proof: bytes
    def __init__(self, caller_nonce: _Optional[bytes] = ..., server_nonce: _Optional[bytes] = ..., offer: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class RdmaAnswer(_message.Message):
    __slots__ = ("session", "region_bytes", "granule", "paths")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANULE_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    session: RdmaSession
    region_bytes: int
    granule: int
    paths: _containers.RepeatedCompositeFieldContainer[RdmaAnsweredPath]
    def __init__(self, session: _Optional[_Union[RdmaSession, _Mapping]] = ..., region_bytes: _Optional[int] = ..., granule: _Optional[int] = ..., paths: _Optional[_Iterable[_Union[RdmaAnsweredPath, _Mapping]]] = ...) -> None: ...

class RdmaAnsweredPath(_message.Message):
    __slots__ = ("index", "queue_pair", "region", "generations", "mailbox")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PAIR_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    index: int
    queue_pair: RdmaQueuePair
    region: RdmaMemory
    generations: RdmaMemory
    mailbox: RdmaMemory
    def __init__(self, index: _Optional[int] = ..., queue_pair: _Optional[_Union[RdmaQueuePair, _Mapping]] = ..., region: _Optional[_Union[RdmaMemory, _Mapping]] = ..., generations: _Optional[_Union[RdmaMemory, _Mapping]] = ..., mailbox: _Optional[_Union[RdmaMemory, _Mapping]] = ...) -> None: ...

class SignedRdmaAnswer(_message.Message):
    __slots__ = ("answer", "proof")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    answer: bytes
    proof: bytes
    def __init__(self, answer: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class RdmaSession(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class LeaveRdmaPath(_message.Message):
    __slots__ = ("session", "path")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    session: RdmaSession
    path: int
    def __init__(self, session: _Optional[_Union[RdmaSession, _Mapping]] = ..., path: _Optional[int] = ...) -> None: ...

class RdmaDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
