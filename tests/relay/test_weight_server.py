"""The weight server over real connections: ranges, sums, what does not exist for it."""

import hashlib
import http.client
import json
import socket

import pytest

from common.wire import PortBusy, Tls, client_context
from learner.weight_server import WeightServer
from tests.processes import until
from tests.relay.conftest import PART
from tests.relays import put

SIZES = {"model.safetensors": 250_000, "config.json": 3, "empty": 0}


def get(server, path, headers={}, context=None):  # noqa: B006 - never changed
    kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
    connection = kind(server.url.rpartition("/")[2], timeout=20, **({"context": context} if context else {}))
    try:
        connection.putrequest("GET", path, skip_host=False)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_what_a_version_has_and_its_sums(source):
    put(source.weights, 1, SIZES)
    status, _, body = get(source, "/1")
    assert status == 200
    listing = json.loads(body)
    assert (listing["version"], listing["part_bytes"]) == (1, PART)
    assert {file["name"]: file["size"] for file in listing["files"]} == SIZES
    status, _, body = get(source, "/1/sums")
    assert status == 200
    data = (source.weights / "1" / "model.safetensors").read_bytes()
    parts = [hashlib.sha256(data[at : at + PART]).hexdigest() for at in (0, PART, 2 * PART)]
    small = hashlib.sha256((source.weights / "1" / "config.json").read_bytes()).hexdigest()
    assert json.loads(body) == {"sums": {"model.safetensors": parts, "config.json": [small], "empty": []}}


def test_files_whole_and_in_ranges(source):
    put(source.weights, 1, SIZES)
    data = (source.weights / "1" / "model.safetensors").read_bytes()
    path = "/1/files/model.safetensors"
    assert get(source, path)[::2] == (200, data)
    status, headers, body = get(source, path, {"Range": "bytes=1000-4999"})
    assert (status, headers["Content-Range"], body) == (206, "bytes 1000-4999/250000", data[1000:5000])
    assert get(source, path, {"Range": "bytes=249999-999999"})[2] == data[-1:]
    assert get(source, "/1/files/empty")[::2] == (200, b"")
    for wrong in ("bytes=250000-250001", "bytes=5-4", "bytes=-5", "lines=1-2"):
        assert get(source, path, {"Range": wrong})[0] == 416


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/1/files/", "/1/files/..", "/1/files/../../secret", "/1/files/%2e%2e/secret", "/../secret", "/1/"),
        *("/1/files/link", "/1/files/DONE", "/1/files/.hidden", "/01", "/0", "/-1", "/2", "/3", "/1/files/nothing", "/1/sum"),
    ],
)
def test_nothing_else_exists(source, path):
    """Not what is outside, not what is half written (2) or retired (3)."""
    put(source.weights, 1, {"config.json": 3, ".hidden": 3})
    (source.weights.parent / "secret").write_text("secret")
    (source.weights / "1" / "link").symlink_to(source.weights.parent / "secret")
    put(source.weights, 3, {"config.json": 3})
    (source.weights / "3" / "DONE").unlink()
    status, _, body = get(source, path)
    assert status == 404
    assert json.loads(body)["error"]["message"]
    assert b"secret\n" not in body


def test_a_version_that_is_retired_is_gone_at_once(source):
    put(source.weights, 1, SIZES)
    assert get(source, "/1/sums")[0] == 200
    (source.weights / "1" / "DONE").unlink()
    for path in ("/1", "/1/sums", "/1/files/config.json"):
        assert get(source, path)[0] == 404


def test_a_number_that_is_used_again_has_sums_of_its_own(source):
    put(source.weights, 1, SIZES)
    before = get(source, "/1/sums")[2]
    for entry in (source.weights / "1").iterdir():
        entry.unlink()
    (source.weights / "1").rmdir()
    put(source.weights, 1, SIZES, seed=1)
    assert get(source, "/1/sums")[2] != before


def test_only_who_shows_a_certificate_is_let_in(tmp_path, certificates):
    ours, client, stranger = certificates
    put(tmp_path, 1, SIZES)
    server = WeightServer(tmp_path, "127.0.0.1:0", ours)
    try:
        data = (tmp_path / "1" / "model.safetensors").read_bytes()
        assert get(server, "/1/files/model.safetensors", {}, client_context(client))[2] == data
        for tls in (stranger, Tls(ca=ours.ca)):
            context = client_context(Tls(stranger.cert, stranger.key, ours.ca)) if tls.cert else no_certificate(ours)
            with pytest.raises(OSError):  # noqa: PT011 - by the version of TLS, an alert or a reset
                get(server, "/1", {}, context)
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as silent:  # never shakes hands
            assert get(server, "/1", {}, client_context(client))[0] == 200
            silent.sendall(b"GET /1 HTTP/1.1\r\n\r\n")
            until(lambda: b"version" not in silent.recv(1000), "an end without an answer")
    finally:
        server.close()


def no_certificate(ours):
    import ssl

    return ssl.create_default_context(cafile=ours.ca)


def test_a_busy_port_is_one_error(source):
    with pytest.raises(PortBusy, match="set another port"):
        WeightServer(source.weights, source.url.rpartition("/")[2])
