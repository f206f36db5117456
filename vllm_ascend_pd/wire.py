# SPDX-License-Identifier: Apache-2.0
"""Every message between two engines, and the fields a request carries between them.

Control messages travel between the scheduler processes (consumer asks, producer answers); data
messages between the worker processes. All are msgspec structs in MessagePack, one per frame of a
connection.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from vllm_ascend_pd.errors import UNREADABLE, TransferError, brief
from vllm_ascend_pd.types import Cause, Endpoint, Layers

# History: 1 - first version (prefill first, the consumer asks for pieces).
#          2 - a consumer names its session on every transport; waiting, watch and progress, for
#              prompts that are opened before they are computed.
#          3 - several workers a side: opened names each, a fetch names a share of the pages.
#          4 - direct placement: a fetch may name live pages instead of staging memory.
#          5 - opened carries tickets, and watch and fetch show them.
#          6 - the first token comes from the producer; a fetch may offer a ring, fetched says
#              whether it was used, packing that it is full.
#          7 - TLS, in frames with a length; a worker's key travels with its address.
#          8 - spans: an open names its end and each KV cache group's hashes, a fetch its group; how
#              far something can be read is said in tokens.
#          9 - a running request is handed over: open names it; extend, extended, ready, go.
#         10 - pipeline parallel: each worker of opened says which layers it has.
#         11 - a running request of several KV cache groups is handed over: extended says which
#              blocks of each are left.
#         12 - an engine runs a request of another one's client: take, more, told.
#         13 - take may name a LoRA adapter, and bring images; told has logprobs.
#         14 - open of a running request says what makes the masks of its structured output.
#         15 - instead it says all that decides tokens and is not compared otherwise.
WIRE_VERSION = 15

_MAX_PARAM_LENGTH = 256
_MAX_ITEMS = 1 << 18
"""Blocks of a prompt, leases of a consumer: what no engine has, and memory that any host has."""
Name = Annotated[str, msgspec.Meta(max_length=_MAX_PARAM_LENGTH, pattern=r"^[ -~]*\Z")]
Text = Annotated[str, msgspec.Meta(max_length=16384, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
"""Neither begins a line of its own in a log."""
CauseName = Annotated[
    str, msgspec.Meta(pattern=f"^({'|'.join(cause.value for cause in Cause)})?\\Z")
]
"""A value of ``types.Cause``, or none: it becomes a label of a metric."""
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Digests = Annotated[tuple[Digest, ...], msgspec.Meta(max_length=_MAX_ITEMS)]
Indices = Annotated[tuple[int, ...], msgspec.Meta(max_length=_MAX_ITEMS)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=_MAX_ITEMS)]


class GroupHashes(msgspec.Struct, frozen=True, array_like=True):
    """What a span's blocks of one KV cache group hold: the hashes of those before the tail, in
    order, and the digest of the tail's tokens up to the span's end, which may be none.
    """

    block_hashes: Digests
    tail_digest: Digest


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Consumer: may I read the tokens [0, ``end``)? Starts or renews the lease.

    ``groups`` has the consumer's own hashes. The producer compares them with its lease, so a
    reference to another sequence's KV is refused.

    An empty ``epoch`` means that the prompt may still have to reach the producer: whoever routes
    chose ``transfer_id`` and sent both requests at once.
    """

    version: int
    fingerprint: Text
    transfer_id: Name
    epoch: Name
    end: int = 0
    groups: Annotated[tuple[GroupHashes, ...], msgspec.Meta(max_length=64)] = ()
    """Always sent; engines of other versions have other fields, and are to hear of that."""
    open_id: int = 0
    """Chosen by the client and echoed: several requests may ask for one transfer."""
    sampling_key: Digest = b""
    """How the first token is to be sampled, empty when the producer's is not wanted; with
    ``running`` the digest of all sampling parameters.
    """
    running: Name = ""
    """The running request, as its client knows it, that is to be handed over: its prompt is what
    is compared, the lease begins with this message, and ``Extended`` is the answer."""
    made_by: Text = ""
    """What decides at the consumer which tokens the running request gets, beside all that is
    compared otherwise: parts of ``resume.made_by``."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Shown to a worker of the producer it entitles to the tokens [0, ``end``) of the lease of
    this generation: see ``transfer.tickets``.
    """

    generation: int
    end: int
    mac: Digest

    def __repr__(self) -> str:
        """Without the MAC: an engine that ends logs what its last step was told."""
        return f"Ticket({self.generation}, {self.end})"


class Worker(msgspec.Struct, frozen=True, array_like=True):
    """One of the producer: where it serves its pages, what to show it, and what key it shows."""

    host: Name
    port: Port
    ticket: Ticket
    key: Name
    layers: Layers | None = None
    """Those that its pipeline stage has; all of them without stages."""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.host, self.port, self.key)


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Producer: the tokens [0, ``end``) can be read, in every group.

    Without ``is_computed`` they can be read as they are computed: see ``Watch``.
    """

    transfer_id: Name
    end: int
    workers: Annotated[tuple[Worker, ...], msgspec.Meta(max_length=4096)]
    """By rank: those of the first pipeline stage by tensor-parallel rank, those of the next one."""
    epoch: Name
    is_computed: bool = True
    open_id: int = 0
    first_token_id: int | None = None
    """What the producer has sampled after the prompt, with the consumer's ``sampling_key``."""
    first_token_follows: bool = False
    """``FirstToken`` will be sent when the producer has sampled it."""


class Extend(msgspec.Struct, frozen=True, tag="extend"):
    """Consumer: how far is the running request, of which I know ``num_known`` output tokens?

    With ``freeze`` it is to stop, and the answer follows when nothing of it is in flight.
    """

    transfer_id: Name
    epoch: Name
    num_known: int
    freeze: bool = False
    open_id: int = 0


class Extended(msgspec.Struct, frozen=True, tag="extended"):
    """Producer: these are the output tokens after the known ones, and [0, ``end``) can be read: of
    each KV cache group the blocks from its ``first_blocks`` on, as it has given up those before.

    When it ``is_frozen``, all tokens are known and only the last one is not computed; else ``end``
    is a boundary of blocks, as the last block is still written.
    """

    transfer_id: Name
    epoch: Name
    token_ids: Indices
    end: int
    first_blocks: Indices
    workers: Annotated[tuple[Worker, ...], msgspec.Meta(max_length=4096)]
    is_frozen: bool
    open_id: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Consumer: all of the frozen request is here."""

    transfer_id: Name
    epoch: Name
    open_id: int = 0


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Producer: it is yours, and never computed here again."""

    transfer_id: Name
    open_id: int = 0


class Take(msgspec.Struct, frozen=True, tag="take"):
    """Source: run this request of mine, which you get from me by ``Open`` and what follows it, and
    tell me its tokens. Its client stays mine. ``Told`` is the answer.
    """

    transfer_id: Name
    """Random; also what ``Open.running`` names then, and of ``More``."""
    epoch: Name
    version: int
    request: bytes
    """As vLLM's front end sends it to its engine core, with ``kv_transfer_params.resume``."""
    fingerprint: Text = ""
    """Of the source: who does not fit it does not read the request, which may be another version's.
    """
    open_id: int = 0


class More(msgspec.Struct, frozen=True, tag="more"):
    """Source: which output tokens follow the first ``num_known``? Sent again after each answer;
    who is not asked for long ends the request."""

    transfer_id: Name
    epoch: Name
    num_known: int
    open_id: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one output token: itself first, then the likeliest ones, as vLLM's front end gets them."""

    token_ids: Indices
    logprobs: tuple[float, ...]
    rank: int


class Told(msgspec.Struct, frozen=True, tag="told"):
    """Target: the output tokens from number ``start`` on, as soon as there is one, or none after a
    while. With ``is_over`` no more come, ``cause`` if it has not ended by them.
    """

    transfer_id: Name
    start: int
    token_ids: Indices
    is_over: bool = False
    cause: CauseName = ""
    logprobs: Annotated[tuple[TokenLogprobs, ...], msgspec.Meta(max_length=_MAX_ITEMS)] = ()
    """Of the last of them, those that the target has sampled, where the request asks for them."""
    open_id: int = 0


class FirstToken(msgspec.Struct, frozen=True, tag="first_token"):
    """Producer: the prompt is computed, and this token was sampled after it."""

    transfer_id: Name
    token_id: int
    open_id: int = 0


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Producer: no request has brought this transfer id yet; the answer follows when one does."""

    transfer_id: Name
    open_id: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Producer: no; ``cause`` is a value of ``types.Cause``, ``detail`` is for a person."""

    transfer_id: Name
    cause: CauseName
    detail: Text
    open_id: int = 0


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Consumer: keep these leases."""

    transfer_ids: Names
    epoch: Name


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Consumer: this prompt is not needed any more. Source: nor is what was to ``Take``."""

    transfer_id: Name
    epoch: Name


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Consumer: tell me how far this prompt is, now and whenever that changes.

    Sent again while nothing is heard, as a sign of life is expected. With ``each_layer`` the
    layers of a step count one by one, else the step as a whole.
    """

    transfer_id: Name
    epoch: Name
    ticket: Ticket
    each_layer: bool


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Producer: how far a span is computed, in tokens.

        layer   0 .. num_layers_done - 1    to num_coming
        the other layers                    to num_ready

    With ``cause`` set nothing more can be, ever.
    """

    transfer_id: Name
    num_ready: int
    num_coming: int
    num_layers_done: int
    cause: CauseName = ""


class PageRun(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes of every block of one layer: that of block b is at ``address + b * stride``.

    A layer's page is one run or several: K and V apart, MLA's latent and RoPE parts.
    """

    address: int
    stride: int
    num_bytes: int


class LivePages(msgspec.Struct, frozen=True):
    """Pages of the consumer's KV cache: ``block_ids`` in the order of the fetch's indices, and for
    each layer of the fetch its runs, in the order in which a page lies in staging memory.
    """

    block_ids: Indices
    layers: Annotated[
        tuple[Annotated[tuple[PageRun, ...], msgspec.Meta(max_length=64)], ...],
        msgspec.Meta(max_length=4096),
    ]


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Consumer: write these pages, layer-major, into my staging memory at ``address``.

    Layers and blocks are counted within KV cache group ``group``. ``sessions`` says by which
    transports that memory can be reached, ``{name: session}``. Of each page, only part ``share`` of
    ``num_shares`` equal ones.

    With ``live`` whole pages go right into those of the consumer instead, and ``seed`` is 0 unless
    it wants a checksum to compare them with.

    A producer that maps that memory may instead use ``ring_bytes`` of it, unless 0, as a ring with
    the key ``seed``: see ``backends.page_ring``.
    """

    fetch_id: int
    transfer_id: Name
    epoch: Name
    ticket: Ticket
    group: int
    first_layer: int
    num_layers: int
    block_indices: Indices
    sessions: Annotated[dict[Name, Text], msgspec.Meta(max_length=16)]
    address: int
    num_bytes: int
    seed: int
    share: int = 0
    num_shares: int = 1
    live: LivePages | None = None
    ring_bytes: int = 0


class Packing(msgspec.Struct, frozen=True, tag="packing"):
    """Producer: the ring of this fetch is full. Said once, until its consumer makes room."""

    fetch_id: int


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """Producer: written, with this checksum (``cause`` empty), or not (``cause`` set)."""

    fetch_id: int
    checksum: int
    cause: CauseName = ""
    transport: Name = ""
    by_ring: bool = False
    """Whether the pages went through the ring; then nothing of it is written any more."""


AskOfRunning = Open | Extend | Ready
Ask = AskOfRunning | Take | More
"""What is answered, with the same ``open_id``."""
Answer = Opened | Waiting | Refused | Extended | Go | Told
ControlMessage = Ask | Answer | FirstToken | Heartbeat | Release
DataMessage = Watch | Progress | Fetch | Packing | Fetched

_encoder = msgspec.msgpack.Encoder()
_control_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_data_decoder: msgspec.msgpack.Decoder[DataMessage] = msgspec.msgpack.Decoder(DataMessage)


def encode(message: ControlMessage | DataMessage) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_control(frame: bytes) -> ControlMessage:
    """A control message; ``TransferError`` for anything else."""
    try:
        return _control_decoder.decode(frame)
    except UNREADABLE as e:
        raise TransferError(f"not a control message: {brief(e)}") from e


def decode_data(frame: bytes) -> DataMessage:
    """A data message; ``TransferError`` for anything else."""
    try:
        return _data_decoder.decode(frame)
    except UNREADABLE as e:
        raise TransferError(f"not a data message: {brief(e)}") from e


def check_name(field: str, value: object) -> str:
    """A client's value of ``kv_transfer_params[field]``; ``TransferError`` when it is no name."""
    is_text = isinstance(value, str) and value.isascii() and value.isprintable()
    if isinstance(value, str) and is_text and 0 < len(value) <= _MAX_PARAM_LENGTH:
        return value
    raise TransferError(
        f"kv_transfer_params.{field} must be 1..{_MAX_PARAM_LENGTH} printable ASCII characters"
    )


class RemotePrefill(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """What a producer returns in ``kv_transfer_params`` and a router hands to the consumer.

    The first group are upstream's names, with their meaning. ``remote_block_ids`` is there for
    routers that look at it; no engine of ours reads it, because it comes from a client.
    """

    remote_engine_id: str
    remote_host: str
    remote_port: int
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_block_ids: tuple[int, ...] | None = None
    tp_size: int = 1
    # Ours.
    transfer_id: str = ""
    remote_epoch: str = ""
    """Empty when both requests were sent at once; the producer says it when it is asked."""
    remote_key: str = ""
    """Of the process at ``remote_host``, see ``net.trust``."""
    remote_num_tokens: int = 0
    supports_concurrent: bool = True
    """Said by a producer: a router may choose the transfer id and send both requests at once."""
    remote_data_parallel_rank: int | None = None
    """Of the producer, if its front end has several: a prompt sent at once must go there."""

    def to_params(self) -> dict[str, Any]:
        """As plain JSON values."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> RemotePrefill:
        """Check a client's values; ``TransferError`` names the wrong field."""
        known = {name: params[name] for name in cls.__struct_fields__ if name in params}
        known.pop("remote_block_ids", None)
        try:
            remote = msgspec.convert(known, cls)
        except msgspec.ValidationError as e:
            raise TransferError(f"kv_transfer_params: {e}") from e
        for name in ("transfer_id", "remote_host", "remote_engine_id"):
            check_name(name, getattr(remote, name))
        for name in ("remote_epoch", "remote_key"):
            if value := getattr(remote, name):
                check_name(name, value)
        if not 0 < remote.remote_port <= 65535:
            raise TransferError(f"kv_transfer_params.remote_port: {remote.remote_port}")
        return remote
