"""Every decoder of bytes that come from elsewhere, as hypothesis and atheris call it: what it may raise, and
examples of what it is meant for.

A wire's bytes, a file's, or a line's: `Decoder.read` takes them as they are, and either returns or raises one of
`Decoder.refusals`, which are those that its callers are told of. Anything else is a fault.
"""

import atexit
import math
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fuzz import handshakes
from fuzz.edge import Edge, play, reports, script
from google.protobuf.message import DecodeError
from long_runs import long_record

from atoll.comm import invite
from atoll.comm.allreduce import control_frames
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.allreduce.sealing import EncodedSeal, GatheredSeal, SealFormat, TimedSeal, WeightedMean
from atoll.comm.bitmap import places
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import Codec, Malformed
from atoll.comm.codecs.factory import make_codec
from atoll.comm.codecs.zstd import pack, pack_floats, pack_shuffled, unpack, unpack_floats, unpack_shuffled
from atoll.comm.config import run
from atoll.comm.config.hf_config import read_model
from atoll.comm.config.run import CodecName, RunConfig
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError, Refused
from atoll.comm.ids import Epoch, Incarnation, NodeId, Pin, PublicKey, Round, is_pin
from atoll.comm.invite import split_host_port
from atoll.comm.peer_names import (
    host_and_port_of_multiaddr,
    host_of_peer,
    is_peer_host,
    peer_of_host,
    peer_of_multiaddr,
)
from atoll.comm.plan import Fence, InvalidPlan, Plan, PlanMember
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.join_proof import prove_join
from atoll.comm.proto.packed_plan import OtherRoster, pack_plan, unpack_plan
from atoll.comm.receipts import MalformedReceipt, sign_input, sign_receipt, unpack_receipt, unpack_record
from atoll.comm.roster import RosterMember
from atoll.comm.signatures import PrivateKey, is_public_key, sign, verify
from atoll.comm.transport.certificates import load_or_make
from atoll.comm.transport.connection import LinkBroken
from atoll.comm.transport.frames import FrameKind, Header, parse_address
from atoll.coordinator.history import record_codec, segment
from atoll.coordinator.history.columns import BadColumn
from atoll.coordinator.history.record_codec import BadRecord as BadCommitRecord
from atoll.coordinator.history.series import SERIES, series_row, unpack_series
from atoll.coordinator.service import journaled_machine, validation
from atoll.coordinator.service import view as coordinator_view
from atoll.coordinator.service.roster import Roster as CoordinatorRoster
from atoll.coordinator.service.telemetry import Cut, Telemetry, Vitals
from atoll.coordinator.state_machine.events import Heartbeat, Note
from atoll.coordinator.state_machine.state import State
from atoll.node import trainer_channel
from atoll.node.checkpoint import run_manifest, snapshots
from atoll.node.checkpoint.remote_store import FORMAT, CheckpointManifest, WrittenFile, read_manifest
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.checkpoint.sealed_log import SealedLog
from atoll.node.checkpoint.weights_file import Unusable, shard_names, tensors_of
from atoll.node.control.reports import plan_of
from atoll.node.control.roster import Roster
from atoll.node.daemon.audits import offers
from atoll.node.data.manifest import Manifest, Shard
from atoll.node.data.tokenizer_files import TokenizerFiles
from atoll.node.export.commit_records import read_file
from atoll.node.gateway.records import BadRecord, CoordinatorRecord, open_record, write_record
from atoll.node.gateway.stream_header import BadHeader, Purpose, Service, StreamHeader, read_header, write_header

N = 130  # elements of a chunk
A, B = NodeId("n1"), NodeId("n2")
ROSTER = {n: RosterMember(address=f"{n}:1") for n in (A, B)}
RUN_ID = b"r" * 16
CHUNKS = Chunks(40, 10)
LAYOUT = (("weight", (5, 8)),)


@dataclass(frozen=True)
class Decoder:
    """A decoder under test."""

    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    examples: Callable[[], list[bytes]]
    memory: int = 1 << 20  # bytes that it may take beyond what is proportional to its input


def codec(name: CodecName) -> Codec:
    return make_codec(name, 64)


def encoded(made: Codec, scale: float = 1.0) -> bytes:
    out = np.zeros(made.size(N), np.uint8)
    made.encode((np.random.default_rng(1).standard_normal(N) * scale).astype(np.float32), out)
    return out.tobytes()


def decoded(made: Codec, data: bytes) -> None:
    out = np.zeros(N, np.float32)
    made.decode(data, out)
    assert np.isfinite(out).all()
    made.mean([data, data], [0.5, 0.5], out)
    assert np.isfinite(out).all()


def codec_examples(name: CodecName) -> list[bytes]:
    return [encoded(codec(name), scale) for scale in (0.0, 1.0, 1e30)]


def seal_format(kind: str) -> SealFormat:
    if kind == "encoded":
        return EncodedSeal(codec(CodecName.INT8), WeightedMean(codec(CodecName.INT8)))
    sparse = codec(CodecName.SPARSE)
    return TimedSeal(GatheredSeal(sparse, WeightedMean(sparse)))


def sealed_examples(kind: str) -> list[bytes]:
    made = seal_format(kind)
    payload = encoded(codec(CodecName.INT8 if kind == "encoded" else CodecName.SPARSE))
    out = np.zeros(made.size(N, 2), np.uint8)
    made.seal(0, [(0, payload, 0.25), (1, payload, 0.75)], 1.0, N, out)
    return [out.tobytes()]


def unsealed(kind: str, data: bytes) -> None:
    """What `check` passes, `decode` takes, and the other way round."""
    made, out = seal_format(kind), np.zeros(N, np.float32)
    try:
        made.decode(0, data, out)
    except Malformed:
        return
    made.check(data, N)
    assert np.isfinite(out).all()


def floats_examples() -> list[bytes]:
    return [pack_floats(np.arange(1024, dtype="<f4").tobytes())]


def unshuffled(data: bytes) -> None:
    int8 = codec(CodecName.INT8)
    unpack_shuffled(data, np.zeros(int8.size(N), np.uint8), int8.apart(N))


def shuffled_examples() -> list[bytes]:
    int8 = codec(CodecName.INT8)
    return [pack_shuffled(np.frombuffer(encoded(int8), np.uint8), int8.apart(N))]


def resync(data: bytes) -> None:
    """The purpose is the first byte, the bitmaps are the rest."""
    exchange = ReduceProtocol(A, 6, 1)
    members = tuple(PlanMember(n, f"{n}:1", 1.0) for n in (A, B))
    exchange.replan(Plan(Incarnation(1), Epoch(1), Round(1), 1, members, (0, 1) * 3))
    control_frames.receive(exchange, B, FrameKind.RESYNC, data[0] if data else 0, 1, data[1:])


def packed_plan(data: bytes) -> None:
    view = pb.View(packed_plan=data)
    unpack_plan(view, ROSTER)
    plan_of(view.plan).validate()


def plan_examples() -> list[bytes]:
    plan = pb.Plan(round=1, attempt=1, length=1.0, owners=[0, 1, 0])
    for node, member in ROSTER.items():
        plan.members.add(node_id=node, address=member.address, weight=1.0, scale=1.0, norm=1.0)
    return [pack_plan(plan)]


def view(data: bytes) -> None:
    """What a node makes of a view before its machine sees it."""
    found, known = pb.View.FromString(data), Roster()
    known.read(found)
    unpack_plan(found, known.members)
    if found.HasField("plan"):
        plan_of(found.plan).validate()
    for order in found.audits:
        places(order.inputs)
    offers(found)


def view_examples() -> list[bytes]:
    """The views of a run in which chunks are audited, and a round is replayed."""
    edge, roster = Edge(), CoordinatorRoster(ROSTER, 1, b"key")
    while edge.audit is None or not edge.state.replays.tasks:
        edge.behave()
        edge.tick()
    shown = [coordinator_view.view(edge.state, node) for node in edge.nodes]
    return [each.SerializeToString() + roster.encode(None) for each in shown]


def report(data: bytes) -> None:
    validation.event(A, 1, pb.ReportRequest.FromString(data))


def report_examples() -> list[bytes]:
    return [request.SerializeToString() for request in reports()]


def join(data: bytes) -> None:
    """What the coordinator looks at of a request to join before it admits a node."""
    request = pb.JoinRequest.FromString(data)
    host, _ = split_host_port(validation.address(request.address, "ipv4:10.0.0.9:1"), "the address")
    assert host not in validation.WILDCARD_HOSTS
    validation.is_behind_gateway(request.address)
    assert is_pin(validation.pin(request.pin, tls=True))
    assert is_public_key(validation.key(request))
    assert len(validation.name(request.name) + validation.version(request.version)) < 100
    assert validation.secret(request.session) in request.session


def join_examples() -> list[bytes]:
    made, pin = PrivateKey.generate(), Pin("a" * 52)
    request = pb.JoinRequest(protocol=310, run="reef", name="gpu", address=":4700", pin=pin, session="ab" * 16)
    request.version = "1.0"
    prove_join(request, made)
    return [request.SerializeToString()]


def heartbeat(data: bytes) -> None:
    request = pb.HeartbeatRequest.FromString(data)
    beat, vitals = validation.heartbeat(A, 1, request), validation.vitals(request)
    assert beat.phase.isprintable() and vitals.progress.isprintable()
    assert all(map(math.isfinite, (vitals.tokens_per_s, vitals.loss, vitals.mfu, vitals.device_bytes)))
    assert all(0 < seconds < math.inf for seconds in validation.unanswered(request).values())


def heartbeat_examples() -> list[bytes]:
    figures: Any = {"tokens_per_s": 1e4, "loss": 2.0, "mfu": 0.4, "gradient_norm": 0.1, "device_bytes": 1 << 34}
    spent = pb.PhaseSeconds(inner=5.0)
    beat = pb.HeartbeatRequest(
        session="n1", phase="inner", round=3, progress="step 4", unanswered=spent, **figures
    )
    return [beat.SerializeToString()]


def receipt_examples() -> list[bytes]:
    key, salt = PrivateKey.generate(), bytes(16)
    records = (sign_input(key, salt, 3, 0, bytes(16)), sign_input(key, salt, 3, 2, bytes(16), (2, 4)))
    return [sign_receipt(key, salt, 3, 1, 0, records, bytes(16)).pack()]


def record_examples_of_inputs() -> list[bytes]:
    key, salt = PrivateKey.generate(), bytes(16)
    return [sign_input(key, salt, 3, 2, bytes(16), inputs).pack() for inputs in ((), (2, 4))]


def checkpoint_manifest_examples() -> list[bytes]:
    files = {"anchor.safetensors": WrittenFile(64, "0" * 32)}
    made = CheckpointManifest(FORMAT, "reef", "00" * 16, 7, 4096, 512, 10, "0" * 32, files)
    return [msgspec.json.encode(made)]


def archived_segment(data: bytes) -> None:
    found = segment.read(data)
    assert found.rows
    list(found.decoded())


def segment_header(data: bytes) -> None:
    """As the archive reads the beginning of one."""
    end = segment.PREFIX_SIZE + segment.header_size(data[: segment.PREFIX_SIZE])
    found = segment.read_header(data[segment.PREFIX_SIZE : end])
    unpack_series(found.series, found.last - found.first + 1)


def segment_examples() -> list[bytes]:
    records = [long_record(k, 3) for k in (1, 2)]
    rows, encoded = [series_row(record) for record in records], [record_codec.encode(record) for record in records]
    return [segment.write("reef", rows, encoded, [(1.0, Note("a sentence"))])]


def commit_record(data: bytes) -> None:
    """As a whole, and by what a page asks of it."""
    try:
        record_codec.decode(data)
    except BadCommitRecord as error:
        assert str(error)
    found = record_codec.RecordView(data)
    assert found.decisions is not None and found.seconds is not None and len(found.row) == len(SERIES)
    for field in (*record_codec.COUNTS, *record_codec.MEASURES, *record_codec.FIGURES):
        found.of_nodes(field)
    assert found.names is not None


def commit_record_examples() -> list[bytes]:
    return [record_codec.encode(long_record(k, members)) for k, members in ((1, 2), (2, 40))]


def roster(data: bytes) -> None:
    """What was taken in is what its digest says."""
    found = Roster()
    changed = found.read(pb.View.FromString(data))
    assert bool(changed) == bool(found.digest) and (changed or not found.members)


def roster_examples() -> list[bytes]:
    return [CoordinatorRoster(ROSTER, 1, b"key").encode(None), CoordinatorRoster({}, 0, b"key").encode(None)]


def header(data: bytes) -> None:
    if len(data) == 48:  # the link reads so many
        found = Header.unpack(data)
        assert Header.unpack(found.pack()) == found


def header_examples() -> list[bytes]:
    fence = Fence(Incarnation(1), Epoch(2), Round(3), 4)
    return [Header(kind, fence, 5, 8, True, 1, 16, 64).pack() for kind in FrameKind]


def invited(data: bytes) -> None:
    found = invite.parse(data.decode(errors="surrogateescape"))
    assert invite.parse(str(found)).address == found.address


def addressed(data: bytes) -> None:
    parse_address(data.decode(errors="replace"))


def run_config(data: bytes) -> None:
    run.from_json(data)


def signature(data: bytes) -> None:
    verify(PublicKey(data[:33]), data[33:97], data[97:])


def signature_examples() -> list[bytes]:
    key = PrivateKey.generate()
    return [key.public + sign(key, b"message") + b"message"]


def weights_header(data: bytes) -> None:
    tensors_of("model.safetensors", data, 64)


def weights_examples() -> list[bytes]:
    one = '{"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]}}'
    two = '{"v":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]},"w":{"dtype":"F16","shape":[24],'
    return [one.encode(), f'{two}"data_offsets":[16,64]}}}}'.encode()]


@cache
def folder() -> Path:
    """A folder of this process for files under test, which ends with it."""
    made = tempfile.mkdtemp(prefix="atoll-fuzz-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def new_folder(name: str) -> Path:
    """An empty folder in that one."""
    return Path(tempfile.mkdtemp(prefix=name, dir=folder()))


def snapshot(data: bytes) -> None:
    path = folder() / "snapshot-000000000001.safetensors"
    path.write_bytes(data)
    found = snapshots.read(path, RUN_ID, LAYOUT, CHUNKS)
    assert found is None or found.size == len(data)
    if found is not None:
        assert all(len(found.chunk(c, CHUNKS) or bytes(80)) == 80 for c in range(CHUNKS.count))
    snapshots.other_format(path)
    snapshots.describe(path)


def snapshot_examples() -> list[bytes]:
    both = np.arange(20, dtype=np.float32)
    place = new_folder("example-")
    written = snapshots.write(place, RUN_ID, LAYOUT, CHUNKS, 7, lambda c: (3, both, digest(both.data.cast("B"))))
    return [written.path.read_bytes()]


def sealed_log(data: bytes) -> None:
    place = folder() / "log"
    place.mkdir(exist_ok=True)
    (place / "sealed-000000000001").write_bytes(data)
    log = SealedLog(place, RUN_ID, CHUNKS)
    for round_ in log.rounds:
        assert log.sizes[round_] == len(data)
        for c in range(-1, CHUNKS.count + 1):
            log.read(round_, c)


def log_examples() -> list[bytes]:
    place = new_folder("example-")
    payloads = [bytes([c]) * 12 for c in range(CHUNKS.count)]
    SealedLog(place, RUN_ID, CHUNKS).write(1, payloads, [digest(p) for p in payloads])
    return [(place / "sealed-000000000001").read_bytes()]


def manifest_of_run(data: bytes) -> None:
    (folder() / "run.json").write_bytes(data)
    run_manifest.read(folder() / "run")


def run_manifest_examples() -> list[bytes]:
    return [msgspec.json.encode(RunManifest(RunConfig(name="reef")))]


def commit_records(data: bytes) -> None:
    path = folder() / "rounds.jsonl"
    path.write_bytes(data)
    read_file(path).contributors(9)


def tokenizer_config(data: bytes) -> None:
    TokenizerFiles(b"", {"tokenizer_config.json": data}).special_token("eos_token")


def manifest_examples() -> list[bytes]:
    zero = "0" * 32
    shards = (Shard("train-00000", "train", 2, 16, zero), Shard("validation-00000", "validation", 1, 3, zero))
    return [Manifest(1, "reef", "uint16", 8, 300, 0, zero, False, 5, shards).encode()]


def trainer_examples() -> list[bytes]:
    said: list[trainer_channel.ToDaemon] = [
        trainer_channel.Hello(1, 1, 40, (("weight", (5, 8)),)),
        trainer_channel.Ready(1, 4, 2.0, 16),
        trainer_channel.Progress(1, 2, 3.0),
        trainer_channel.LogLine("a sentence"),
        trainer_channel.Rests(2.5),
        trainer_channel.MicroBatch(8),
    ]
    return [msgspec.json.encode(message) for message in said]


def order_examples() -> list[bytes]:
    said: list[trainer_channel.ToTrainer] = [
        trainer_channel.Train(1, 4, 1, 6, 0, 2, ((0, 8),), state="00"),
        trainer_channel.Attach("/a", "/b", 40),
    ]
    return [msgspec.json.encode(message) for message in said]


CONFIG_JSON = (
    b'{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":64,"num_hidden_layers":2,'
    b'"num_attention_heads":4,"intermediate_size":128,"vocab_size":300,"max_position_embeddings":128}'
)

PEER = b"\x12\x20" + bytes(32)


def record_examples() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        made = load_or_make(Path(folder))
        record = CoordinatorRecord("reef", "10.0.0.1:4700", host_of_peer(PEER), 1, 2, 2_000_000_000)
        return [write_record(record, made.der, made.signing_key())]


def stream_examples() -> list[bytes]:
    asked = StreamHeader(Purpose.RELAY, Service.DATA, PEER)
    passed = StreamHeader(Purpose.PASS, Service.PUNCH)
    return [write_header(header) for header in (asked, passed, StreamHeader(Purpose.HOLD))]


def named_peer(data: bytes) -> None:
    text = data.decode(errors="replace")
    (peer_of_host if is_peer_host(text) else peer_of_multiaddr)(text)


def multiaddr(data: bytes) -> None:
    host, port = host_and_port_of_multiaddr(data.decode(errors="replace"))
    assert host and 0 < port < 1 << 16


PEER_NAMES = [
    host_of_peer(PEER).encode(),
    b"/ip4/10.0.0.1/tcp/1/p2p/QmRQU9P1KZLcobTaNu1F9p8V6DTfHtPd6RPd3sFeQHq39S",
]

DECODERS: dict[str, Decoder] = {
    **{
        f"codec-{name}": Decoder(partial(decoded, codec(name)), (Malformed,), partial(codec_examples, name))
        for name in CodecName
    },
    "zstd": Decoder(
        lambda data: unpack(data, 4096), (Malformed,), lambda: [pack(bytes(4096)), pack(bytes(1 << 24))]
    ),
    "zstd-floats": Decoder(
        lambda data: unpack_floats(data, 4096),
        (Malformed,),
        floats_examples,
    ),
    "zstd-shuffled": Decoder(unshuffled, (Malformed,), shuffled_examples),
    "seal-encoded": Decoder(partial(unsealed, "encoded"), (), partial(sealed_examples, "encoded")),
    "seal-gathered": Decoder(partial(unsealed, "gathered"), (), partial(sealed_examples, "gathered")),
    "bitmap": Decoder(places, (), lambda: [b"\x05\x01"]),
    "header": Decoder(header, (LinkBroken,), header_examples),
    "resync": Decoder(resync, (), lambda: [b"\x01\x3f\x00\x15", b"\x02"]),
    "plan": Decoder(packed_plan, (Refused, InvalidPlan, OtherRoster), plan_examples, memory=200 << 20),
    "view": Decoder(view, (DecodeError, Refused, InvalidPlan, OtherRoster), view_examples, memory=200 << 20),
    "report": Decoder(report, (DecodeError, ValueError), report_examples),
    "join": Decoder(join, (DecodeError, ValueError, ConfigError), join_examples),
    "heartbeat": Decoder(heartbeat, (DecodeError,), heartbeat_examples),
    "greeting": Decoder(handshakes.greeted, (LinkBroken,), lambda: [handshakes.greeting()]),
    "hello": Decoder(handshakes.welcomed, (LinkBroken,), lambda: [handshakes.hello()]),
    "receipt": Decoder(unpack_receipt, (MalformedReceipt,), receipt_examples),
    "input-record": Decoder(unpack_record, (MalformedReceipt,), record_examples_of_inputs),
    "checkpoint-manifest": Decoder(read_manifest, (ValueError,), checkpoint_manifest_examples),
    "segment": Decoder(archived_segment, (BadCommitRecord, BadColumn), segment_examples),
    "segment-header": Decoder(segment_header, (BadCommitRecord, BadColumn), segment_examples),
    "commit-record": Decoder(
        commit_record, (BadCommitRecord,), commit_record_examples, memory=512 << 20
    ),  # a million nodes may be named in few bytes
    "roster": Decoder(roster, (DecodeError,), roster_examples),
    "address": Decoder(addressed, (ValueError,), lambda: [b"[::1]:4700", b"reef.example.org:4700"]),
    "invite": Decoder(invited, (ConfigError,), lambda: [b"atoll://token:" + b"a" * 52 + b"@10.0.0.1:4700/reef"]),
    "coordinator-record": Decoder(open_record, (BadRecord,), record_examples),
    "gateway-stream": Decoder(read_header, (BadHeader,), stream_examples),
    "multiaddr": Decoder(multiaddr, (ValueError,), lambda: PEER_NAMES),
    "peer-name": Decoder(named_peer, (ValueError,), lambda: PEER_NAMES),
    "signature": Decoder(signature, (), signature_examples),
    "run-config": Decoder(run_config, (ConfigError,), lambda: [run.to_json(RunConfig(name="reef"))]),
    "model-config": Decoder(lambda d: read_model(d, "config.json"), (ConfigError,), lambda: [CONFIG_JSON]),
    "weights-header": Decoder(weights_header, (Unusable,), weights_examples),
    "weights-index": Decoder(
        shard_names, (Unusable,), lambda: [b'{"weight_map":{"w":"model-00001-of-00002.safetensors"}}']
    ),
    "snapshot": Decoder(snapshot, (), snapshot_examples),
    "sealed-log": Decoder(sealed_log, (), log_examples),
    "run-manifest": Decoder(
        manifest_of_run, (), lambda: [msgspec.json.encode(RunManifest(RunConfig(name="reef")))]
    ),
    "data-manifest": Decoder(Manifest.decode, (ConfigError,), manifest_examples),
    "tokenizer-config": Decoder(tokenizer_config, (ConfigError,), lambda: [b'{"eos_token":{"content":"</s>"}}']),
    "commit-records": Decoder(
        commit_records, (ConfigError,), lambda: [b'{"round":1,"contributors":{"n1":9},"state_digest":"00"}\n']
    ),
    "trainer": Decoder(trainer_channel.from_trainer, (ValueError,), trainer_examples),
    "trainer-order": Decoder(trainer_channel.from_daemon, (ValueError,), order_examples),
    "telemetry": Decoder(
        lambda data: Telemetry.load(data.decode(errors="replace")),
        DECODE_ERRORS,
        lambda: [observed().dump().encode()],
    ),
    "coordinator-snapshot": Decoder(
        lambda data: journaled_machine.decode(data, RunConfig(name="reef")),
        (ConfigError,),
        lambda: [journaled_machine.encode(State(RunConfig(name="reef")))],
    ),
    "coordinator": Decoder(play, (), lambda: [script()], memory=8 << 20),
}


def observed() -> Telemetry:
    """The telemetry of a run with one member, of which much is known."""
    telemetry, node = Telemetry(round=2, until=9.0), NodeId("n1")
    telemetry.meter.enter(node, 1.0)
    telemetry.record_heartbeat(Heartbeat(node, 1, "inner", 1, 3), Vitals(5.0), {"sync": 1.0}, 2.0)
    telemetry.meter.record_contribution(node, 1, carries=False)
    telemetry.meter.record_commit(1, {node: 0.5}, 3.0)
    telemetry.failures.noticed(node, 2, "it is silent", 2.0, 4.0)
    telemetry.cuts[1] = Cut(telemetry.meter.cut(), {"inner": 1.0}, tuple(telemetry.failures.open.values()))
    return telemetry


def faulty(data: bytes) -> None:
    if data == b"fault":
        raise KeyError("a fault")


FAULTY = Decoder(faulty, (), lambda: [b"fault"])  # so that the tests of faults can be seen to fail

# What every JSON and msgpack decoder is shown besides.
DEEP = [b"[" * 20_000, b'{"name":' + b"[" * 20_000, b"\x91" * 20_000]
ODD = [
    *(b"", b"\0", b"{}", b"[]", b"null", b'"\\ud800"', b'{"type":"LogLine","sentence":"\xff"}', b'{"\xff":1}'),
    *(b'{"name":"\xff"}', b'{"version":' + b"9" * 5000 + b"}", b"1e999", b"\xdd\xff\xff\xff\xff"),
    *(struct.pack("<Q", 1 << 63), struct.pack("<Q", 2) + b"{}", b"\xff" * 48),
    b'{"type":"LoopLeft","unknown":' + b"[" * 20_000,
]
