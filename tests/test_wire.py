"""The wire: chunks, message limits, plain and mutual-TLS channels, busy ports."""

import random

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from common import wire
from common.convert import trajectory_bytes, trajectory_parse
from common.proto import rl_pb2, rl_pb2_grpc
from common.wire import Assembler, Chunk, PortBusy, Tls, split
from tests.records import difference, step, trajectory

# ---- chunks --------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.integers(1, 40), st.randoms(use_true_random=False))
def test_chunks_may_repeat_and_begin_again(data, size, rng: random.Random):
    chunks = list(split(data, size))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    earlier = list(split(data + b"and more", size))  # another try, cut off
    sent = earlier[: rng.randint(0, len(earlier) - 1)]
    sent += [chunk for chunk in chunks[:-1] for _ in range(rng.randint(1, 2) if chunk.index else 1)]
    assembler = Assembler()
    assert [assembler.add(chunk) for chunk in sent] == [None] * len(sent)
    assert assembler.add(chunks[-1]) == data


@given(st.binary(min_size=3, max_size=100), st.integers(1, 20), st.data())
def test_nothing_half_leaves_the_assembler(data, size, draw):
    chunks = list(split(data, size))
    damage = draw.draw(st.sampled_from(["lose", "flip", "cut"]))
    at = draw.draw(st.integers(0, len(chunks) - (2 if damage == "lose" else 1))) if len(chunks) > 1 else 0
    if damage == "lose" and len(chunks) > 1:
        del chunks[at]
    else:
        hurt = chunks[at]
        payload = hurt.payload[:-1] if damage == "cut" else bytes([hurt.payload[0] ^ 1]) + hurt.payload[1:]
        chunks[at] = Chunk(hurt.index, hurt.count, hurt.total_bytes, hurt.crc32, payload)
    assembler = Assembler()
    with pytest.raises(ValueError, match=r"checksum|only chunks"):
        [assembler.add(chunk) for chunk in chunks]
    whole = list(split(data, size))
    assert [assembler.add(chunk) for chunk in whole][-1] == data  # the sender starts again


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk(3, 3, 4, 0, b"")],
        [Chunk(-1, 3, 4, 0, b"")],
        [Chunk(0, 1, wire.MAX_TRAJECTORY_BYTES + 1, 0, b"")],
        [Chunk(0, 2, 4, 0, b"12345")],
        [Chunk(5, 9, 4, 0, b"1"), Chunk(1, 2, 2, 0, b"2")],  # as many as announced, but not these
    ],
)
def test_chunks_that_do_not_fit_are_refused(chunks):
    assembler = Assembler()
    with pytest.raises(ValueError, match=r"chunk|bytes"):
        [assembler.add(chunk) for chunk in chunks]


def test_empty_data_is_one_chunk_and_too_much_is_refused():
    (chunk,) = split(b"")
    assert Assembler().add(chunk) == b""

    class Huge(bytes):
        def __len__(self):
            return wire.MAX_TRAJECTORY_BYTES + 1

    with pytest.raises(ValueError, match="the limit for one trajectory is 268435456"):
        next(split(Huge()))


def test_a_trajectory_beyond_grpcs_default_limit_travels_in_chunks():
    ids = [index * 40_503 % 2**31 for index in range(700_000)]  # 5.6 MB with logprobs, above gRPC's 4 MiB
    record = trajectory(step(ids[:3], ids))
    chunks = list(split(trajectory_bytes(record)))
    assert len(chunks) == 3  # 2 MiB each
    assembler = Assembler()
    whole = [assembler.add(chunk) for chunk in chunks][-1]
    assert difference(record, trajectory_parse(whole)) == ""


# ---- servers and channels ------------------------------------------------------------------------------------


class Echo(rl_pb2_grpc.LearnerServiceServicer):
    def Deliver(self, request, context):
        return rl_pb2.DeliverReply(status=rl_pb2.STORED, reason=request.payload[:20].decode() + str(len(request.payload)))

    def Status(self, request, context):
        return rl_pb2.StatusReply(report_json="x" * 10_000_000)


def serve(tls=Tls()):
    server = wire.thread_server(2)
    rl_pb2_grpc.add_LearnerServiceServicer_to_server(Echo(), server)
    wire.add_health_and_reflection(server, ["polyturn.v1.LearnerService"])
    port = wire.bind(server, "127.0.0.1:0", tls)
    server.start()
    return server, f"127.0.0.1:{port}"


def exchange_ten_megabytes(address, tls):
    with wire.channel(address, tls) as channel:
        stub = rl_pb2_grpc.LearnerServiceStub(channel)
        reply = stub.Deliver(rl_pb2.DeliverRequest(payload=b"a" * 10_000_000), timeout=60)
        assert reply.reason == "a" * 20 + "10000000"
        assert len(stub.Status(rl_pb2.StatusRequest(), timeout=60).report_json) == 10_000_000


def test_ten_megabytes_pass_both_ways():
    server, address = serve()
    exchange_ten_megabytes(address, Tls())
    server.stop(0).wait()


def test_ten_megabytes_pass_with_mutual_tls(certificates):
    ours, client, stranger = certificates
    server, address = serve(ours)
    exchange_ten_megabytes(address, client)
    for tls in (stranger, Tls()):  # a certificate of another authority, none
        with wire.channel(address, tls) as channel, pytest.raises(grpc.RpcError) as refused:
            rl_pb2_grpc.LearnerServiceStub(channel).Status(rl_pb2.StatusRequest(), timeout=20)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    server.stop(0).wait()


async def test_the_asyncio_side_has_the_same_limits(certificates):
    ours, client, _ = certificates

    class Environment(rl_pb2_grpc.EnvServiceServicer):
        async def Step(self, request, context):
            text = request.action.text
            return rl_pb2.StepReply(observation=rl_pb2.ObservationMessage(messages=[rl_pb2.MessageMessage(text=text)]))

    server = wire.aio_server()
    rl_pb2_grpc.add_EnvServiceServicer_to_server(Environment(), server)
    await wire.add_aio_health_and_reflection(server, ["polyturn.v1.EnvService"])
    port = wire.bind(server, "127.0.0.1:0", ours)
    await server.start()
    async with wire.aio_channel(f"127.0.0.1:{port}", client) as channel:
        request = rl_pb2.StepRequest(action=rl_pb2.ActionMessage(text="ü" * 5_000_000))
        reply = await rl_pb2_grpc.EnvServiceStub(channel).Step(request, timeout=60)
        assert reply.observation.messages[0].text == request.action.text
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="polyturn.v1.EnvService"))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(None)


def test_health_and_reflection_answer():
    server, address = serve()
    with wire.channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="polyturn.v1.LearnerService")
        assert health_pb2_grpc.HealthStub(channel).Check(request).status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked)
        assert "polyturn.v1.LearnerService" in {service.name for service in answer.list_services_response.service}
    server.stop(0).wait()


def test_a_busy_port_is_one_error(certificates):
    server, address = serve()
    for tls in (Tls(), certificates[0]):
        with pytest.raises(PortBusy, match=f"cannot listen on {address}: the port is busy"):
            wire.bind(wire.thread_server(1), address, tls)
    server.stop(0).wait()


async def test_a_busy_port_is_one_error_on_the_asyncio_side():
    server, address = serve()
    other = wire.aio_server()
    with pytest.raises(PortBusy, match=f"cannot listen on {address}: the port is busy"):
        wire.bind(other, address)
    await other.stop(None)
    server.stop(0).wait()
