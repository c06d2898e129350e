"""A relay over real connections: what is fetched, kept, pulled again and deleted, and which calls pass through it."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.relay.download import FetchError, Source, listing_of
from actors.relay.versions import FolderError, Versions
from common.wire import Tls
from learner.engine_api import Deadlines, EngineApi, EngineError, EngineGone
from learner.transport import RelayApi
from learner.weight_server import WeightServer
from tests.fakes import DROP, HANG, Answer, FakeEngine
from tests.processes import until
from tests.relay.conftest import PART
from tests.relays import TIGHT, RelayThread, put, sums_of

SIZES = {"model-1.safetensors": 3 * PART + 50, "model-2.safetensors": PART, "config.json": 2, "empty": 0}
TOTAL = sum(SIZES.values())
HEADERS = 2_000  # bytes of an answer that are not the file's, with room


def fetch(api, version):
    return api.prepare("unused", version)


# ---- fetching --------------------------------------------------------------------------------------------------


def test_a_version_arrives_whole_and_a_second_fetch_pulls_nothing(relay, wire, source, tmp_path):
    sums = put(source.weights, 7, SIZES)
    api = relay.api("engine-0", wire.url)
    path = fetch(api, 7)
    assert path == str(tmp_path / "host" / "7")
    assert sums_of(path) == sums
    before = wire.bytes
    assert fetch(api, 7) == path
    assert wire.bytes - before < HEADERS


def test_engines_that_ask_together_share_one_download(relay, wire, source):
    sums = put(source.weights, 1, SIZES)
    wire.held.clear()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(fetch, relay.api(f"engine-{index % 2}", wire.url), 1) for index in range(4)]
        until(lambda: relay.versions._fetches[1].waiting == 4 if 1 in relay.versions._fetches else False, "four that wait")
        wire.held.set()
        (path,) = {one.result() for one in asked}
    assert sums_of(path) == sums
    assert wire.bytes < TOTAL + 20 * HEADERS


def test_a_connection_that_is_cut_goes_on_where_it_was_cut(relay, wire, source):
    sums = put(source.weights, 1, SIZES)
    wire.cuts.extend([10**6, 40_000, 90_000, 0, 0, *[5_000] * 20])  # the first is for the listing
    assert sums_of(fetch(relay.api("engine-0", wire.url), 1)) == sums
    assert not wire.cuts
    assert wire.bytes < TOTAL + 40 * HEADERS  # what was there did not come again


def test_a_source_that_always_cuts_is_given_up_and_what_came_is_kept(relay, wire, source):
    sums = put(source.weights, 1, SIZES)
    wire.cuts.extend([10**6, *[PART + 500] * 3, *[0] * 1000])
    api = relay.api("engine-0", wire.url)
    with pytest.raises(EngineError, match=r"/fetch answered 502: .*/1/.*ConnectionError|RemoteDisconnected.*5 times in a row"):
        fetch(api, 1)
    wire.cuts.clear()
    before = wire.bytes
    assert sums_of(fetch(api, 1)) == sums
    assert wire.bytes - before <= TOTAL - PART + 20 * HEADERS


def test_damaged_bytes_are_pulled_again(relay, wire, source):
    sums = put(source.weights, 1, SIZES)
    wire.damage = 1
    assert sums_of(fetch(relay.api("engine-0", wire.url), 1)) == sums
    assert wire.damage == 0
    assert TOTAL < wire.bytes < TOTAL + PART + 20 * HEADERS  # the damaged part, not the file


def test_damage_that_stays_names_the_file_and_both_sums(relay, wire, source):
    put(source.weights, 1, {"model.safetensors": PART})
    wire.damage = 10**9
    want = r"502: model\.safetensors bytes 0 to 100000 of version 1 came twice with sha256 [0-9a-f]{64}; at the learner"
    with pytest.raises(EngineError, match=want) as failure:
        fetch(relay.api("engine-0", wire.url), 1)
    right = sums_of(source.weights / "1")["model.safetensors"]
    assert failure.value.message.endswith(f"it is {right}")
    assert wire.bytes < 2 * PART + 20 * HEADERS  # no third time
    wire.damage = 0
    assert sums_of(fetch(relay.api("engine-0", wire.url), 1))["model.safetensors"] == right


def test_a_deadline_ends_the_wait_says_how_far_it_got_and_keeps_it(relay, wire, source):
    sums = put(source.weights, 1, SIZES)
    wire.hold_at = PART  # in the middle
    with pytest.raises(EngineError, match=r"504: version 1 is not here after 0.5 s: \d+ bytes came from http://127.*are kept"):
        fetch(relay.api("engine-0", wire.url, TIGHT), 1)
    until(lambda: not relay.versions._fetches, "the end of a download that nobody waits for")
    wire.held.set()
    assert sums_of(fetch(relay.api("engine-0", wire.url), 1)) == sums


def test_a_version_that_is_not_there_or_retired(relay, source):
    put(source.weights, 1, SIZES)
    api = relay.api("engine-0", source.url)
    with pytest.raises(EngineError, match=r"/fetch answered 404: .*/9: there is no version 9; it was never published, or is re"):
        fetch(api, 9)
    fetch(api, 1)
    (source.weights / "1" / "DONE").unlink()
    with pytest.raises(EngineError, match="there is no version 1"):
        fetch(api, 1)


def test_a_source_that_is_not_there(relay):
    with pytest.raises(EngineError, match=r"502: http://127.0.0.1:1/1: ConnectionRefusedError"):
        fetch(relay.api("engine-0", "http://127.0.0.1:1"), 1)
    with pytest.raises(EngineError, match=r"400: source 'ftp://x': write http://host:port"):
        fetch(relay.api("engine-0", "ftp://x"), 1)


def test_a_full_disk_is_seen_before_anything_is_pulled(tmp_path, engine, wire, source):
    sums, room = put(source.weights, 1, SIZES), [TOTAL - 1]
    with RelayThread(tmp_path / "host", {"engine-0": engine.url}, free=lambda folder: room[0]) as relay:
        api = relay.api("engine-0", wire.url)
        with pytest.raises(
            EngineError, match=f"507: version 1 needs {TOTAL} more bytes in .*host, {TOTAL - 1} are free.*weights.fol"
        ):
            fetch(api, 1)
        assert wire.bytes < HEADERS
        room[0] = TOTAL
        assert sums_of(fetch(api, 1)) == sums


def test_a_file_name_that_leads_out_is_refused(tmp_path):
    """Whoever else answers there."""
    import json
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Evil(BaseHTTPRequestHandler):
        def do_GET(self):
            files = [{"name": "../../x", "size": 1}]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"version": 1, "made": 1, "part_bytes": 1, "files": files}).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Evil) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        evil = Source(f"http://127.0.0.1:{server.server_port}", None)
        with pytest.raises(FetchError, match=r"\.\./\.\./x"):
            listing_of(evil, 1)
        evil.close()
        server.shutdown()


# ---- what is kept ----------------------------------------------------------------------------------------------


def there(tmp_path):
    return sorted(entry.name for entry in (tmp_path / "host").iterdir() if entry.is_dir())


def update(api, path, version):
    api.update_weights(path, version)


def test_the_newest_two_stay_and_what_an_engine_was_last_told_of(relay, source, tmp_path):
    for version in range(1, 7):
        put(source.weights, version, {"config.json": 5})
    one, two = (relay.api(f"engine-{index}", source.url) for index in range(2))
    fetch(two, 1)
    for version in (2, 3, 4):
        fetch(one, version)
    assert there(tmp_path) == ["1", "3", "4"]  # engine-1 was told of version 1
    fetch(two, 5)
    fetch(two, 6)
    assert there(tmp_path) == ["4", "5", "6"]


def test_what_all_engines_have_left_behind_is_gone_before_the_next_version_comes(relay, source, tmp_path):
    for version in (1, 2):
        put(source.weights, version, {"config.json": 5})
    one, two = (relay.api(f"engine-{index}", source.url) for index in range(2))
    update(one, fetch(one, 1), 1)
    update(two, fetch(two, 1), 1)
    update(one, fetch(one, 2), 2)
    assert there(tmp_path) == ["1", "2"]  # engine-1 may start again, and read version 1
    update(two, fetch(two, 2), 2)
    until(lambda: there(tmp_path) == ["2"], "version 1 to be given back", 10)
    for api in (one, two):  # the learner went back to it
        update(api, fetch(api, 1), 1)
    until(lambda: there(tmp_path) == ["1"], "version 2 to be given back", 10)


def test_versions_that_an_engine_refuses_do_not_pile_up(relay, source, tmp_path, engine):
    for version in range(1, 8):
        put(source.weights, version, {"config.json": 5})
    api = relay.api("engine-0", source.url)
    engine.script("/update_weights_from_disk", *[Answer(400, {"message": "no"})] * 7)
    for version in range(1, 8):
        with pytest.raises(EngineError, match="no"):
            update(api, fetch(api, version), version)
    assert there(tmp_path) == ["6", "7"]


def test_what_an_engine_may_be_loading_stays_until_it_has_loaded_another(relay, source, tmp_path, engine):
    for version in range(1, 6):
        put(source.weights, version, {"config.json": 5})
    slow = Deadlines(look_s=5, pause_s=5, update_s=0.3, fetch_s=20)
    api = relay.api("engine-0", source.url, slow)
    engine.script("/update_weights_from_disk", HANG)
    with pytest.raises(EngineError, match="no answer within"):  # who hangs up does not know what the engine does
        update(api, fetch(api, 1), 1)
    fetch(api, 2)
    path = fetch(api, 3)
    engine.script("/update_weights_from_disk", Answer(400, {"message": "no"}))
    with pytest.raises(EngineError, match="no"):  # nor does this say anything of version 1
        update(api, path, 3)
    path = fetch(api, 4)
    assert there(tmp_path) == ["1", "3", "4"]
    update(api, path, 4)
    fetch(api, 5)
    assert there(tmp_path) == ["4", "5"]


def test_a_relay_that_starts_again_pulls_what_is_missing_and_trusts_nothing(tmp_path, engine, wire, source):
    sums = put(source.weights, 1, SIZES)
    with RelayThread(tmp_path / "host", {"engine-0": engine.url}) as first:
        path = fetch(first.api("engine-0", wire.url), 1)
    with open(tmp_path / "host" / "1" / "model-1.safetensors", "r+b") as file:
        file.seek(2 * PART)
        file.write(b"\0" * 10)
    (tmp_path / "host" / "1" / "config.json").unlink()
    (tmp_path / "host" / "1" / "stranger").write_text("x")
    before = wire.bytes
    with RelayThread(tmp_path / "host", {"engine-0": engine.url}) as second:
        with pytest.raises(EngineError, match="nothing that this relay has fetched"):
            update(second.api("engine-0", wire.url), path, 1)
        assert sums_of(fetch(second.api("engine-0", wire.url), 1)) == sums
    assert wire.bytes - before < PART + 20 * HEADERS


def test_a_run_that_was_started_over_has_other_weights_under_the_same_number(relay, source):
    put(source.weights, 1, SIZES)
    api = relay.api("engine-0", source.url)
    old = (source.weights / "1" / "model-1.safetensors").read_bytes()
    with open(f"{fetch(api, 1)}/model-1.safetensors", "rb") as mapped:
        shutil.rmtree(source.weights / "1")
        sums = put(source.weights, 1, SIZES, seed=1)
        assert sums_of(fetch(api, 1)) == sums
        assert mapped.read() == old  # an engine that maps it is not changed under its feet


async def test_a_folder_has_one_relay(tmp_path):
    first = Versions(tmp_path / "host")
    with pytest.raises(FolderError, match="another relay works there"):
        Versions(tmp_path / "host")
    await first.close(remove=True)
    assert not (tmp_path / "host").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"weights\.folder"):
        Versions(tmp_path / "file" / "host")


# ---- control calls ---------------------------------------------------------------------------------------------


def test_every_control_call_passes_and_generation_does_not(relay, source, engine):
    put(source.weights, 1, SIZES)
    engine.server_info = {"compilations_after_warmup": 3}
    api = relay.api("engine-0", source.url)
    api.health()
    assert (api.weight_version(), api.server_info()["compilations_after_warmup"]) == ("default", 3)
    path = fetch(api, 1)
    api.pause()
    update(api, path, 1)
    api.resume()
    api.abort_all()
    api.flush_cache()
    assert engine.posts() == [
        *("/pause_generation", "/update_weights_from_disk", "/continue_generation", "/abort_request", "/flush_cache")
    ]
    assert engine.queries == ["", "", "", "", "timeout=10"]
    assert (engine.calls[0][1], engine.model_path, api.weight_version()) == ({"mode": "retract"}, path, "1")
    for method, call in (("POST", "/generate?"), ("GET", "/pause_generation"), ("GET", "/v1"), ("POST", "/set_internal_state")):
        with pytest.raises(EngineError, match=r"answered 404: .* is not passed on"):
            api.call(method, call, 5)
    with pytest.raises(EngineError, match=r"no engine 'engine-9' on this host; there are engine-0, engine-1"):
        relay.api("engine-9", source.url).pause()


def test_an_engine_loads_only_what_was_fetched_under_its_own_number(relay, source, engine, tmp_path):
    put(source.weights, 1, SIZES)
    api = relay.api("engine-0", source.url)
    path = fetch(api, 1)
    for wrong in (tmp_path, f"{path}/../1", f"{path}/", "/etc", tmp_path / "host" / "2"):
        with pytest.raises(EngineError, match=r"400: model_path .* is nothing that this relay has fetched"):
            update(api, wrong, 1)
    with pytest.raises(EngineError, match=r"400: weight_version '2': .*/1 holds version 1"):
        update(api, path, 2)
    assert engine.posts() == []
    with pytest.raises(EngineError, match=r"400: version: .*greater than or equal to 1"):
        fetch(api, 0)


def test_an_engine_that_fails_or_is_gone_fails_through_the_relay_as_it_would_without(relay, source, engine):
    api = relay.api("engine-0", source.url)
    engine.script("/pause_generation", Answer(400, {"error": {"message": "no"}}), DROP)
    with pytest.raises(EngineError, match="/pause_generation answered 400: no"):
        api.pause()
    with pytest.raises(EngineGone, match=r"503: the relay cannot reach engine-0 at .*ServerDisconnectedError"):
        api.pause()
    engine.stop()
    with pytest.raises(EngineGone, match=r"503: the relay cannot reach engine-0 at .*ConnectionRefusedError"):
        api.health()


# ---- who may call ----------------------------------------------------------------------------------------------


def test_without_the_key_nobody_is_heard(tmp_path, engine, source):
    put(source.weights, 1, SIZES)
    engine.key = "abc"
    with RelayThread(tmp_path / "host", {"engine-0": engine.url}, key="abc") as relay:
        api = relay.api("engine-0", source.url)
        update(api, fetch(api, 1), 1)  # the relay shows it to the engine
        wrong = relay.api("engine-0", source.url, key="abd")
        for call in (wrong.pause, wrong.weight_version, wrong.health, lambda: fetch(wrong, 1)):
            with pytest.raises(
                EngineError, match="401: the call shows another key than that of this relay; it is in engine_key"
            ) as e:
                call()
            assert e.value.status == 401
        with pytest.raises(EngineError, match="401: the call shows no key"):
            RelayApi(f"{relay.url}/engine-0", source.url, EngineApi(engine.url), None).pause()
        EngineApi(relay.url).health()
        with pytest.raises(EngineError, match="/pause_generation answered 401: Unauthorized"):
            EngineApi(engine.url).pause()
        EngineApi(engine.url, key="abc").pause()


def test_with_tls_both_ways_show_certificates(tmp_path, engine, certificates):
    ours, client, stranger = certificates
    sums = put(tmp_path / "weights", 1, SIZES)
    server = WeightServer(tmp_path / "weights", "127.0.0.1:0", ours, part_bytes=PART)
    try:
        with RelayThread(tmp_path / "host", {"engine-0": engine.url}, tls=ours) as relay:
            api = relay.api("engine-0", server.url, tls=client)
            path = fetch(api, 1)
            assert sums_of(path) == sums
            update(api, path, 1)
            with pytest.raises(EngineGone, match=r"SSL|ConnectionReset|RemoteDisconnected|BrokenPipe"):
                relay.api("engine-0", server.url, tls=Tls(stranger.cert, stranger.key, ours.ca)).pause()
            with pytest.raises(EngineError, match=r"400: source 'http://.*write https://host:port"):
                fetch(relay.api("engine-0", "http://127.0.0.1:1", tls=client), 1)
        assert engine.posts() == ["/update_weights_from_disk"]
    finally:
        server.close()


def test_two_fakes_two_hosts(tmp_path, source, engine):
    """Each host pulls for itself."""
    sums = put(source.weights, 1, SIZES)
    with (
        FakeEngine() as other,
        RelayThread(tmp_path / "a", {"engine-0": engine.url}) as a,
        RelayThread(tmp_path / "b", {"engine-1": other.url}) as b,
    ):
        for relay, name in ((a, "engine-0"), (b, "engine-1")):
            assert sums_of(fetch(relay.api(name, source.url), 1)) == sums
