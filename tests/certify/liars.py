"""Servers in front of an honest engine that change what is asked or what is told."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import orjson

from actors.codec import ByteLevelCodec, decode


class Liar:
    """An honest relay; subclasses lie. `with Kind(url, codec) as liar: ... liar.url`."""

    def __init__(self, honest: str, codec: ByteLevelCodec) -> None:
        self.codec = codec
        self._honest = urlsplit(honest)
        relay = self

        class Door(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(*relay.look(self.path))

            def do_POST(self) -> None:
                body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._reply(*relay.post(self.path, body))

            def _reply(self, status: int, answer: Any) -> None:
                data = orjson.dumps(answer)
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Liar:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def forward(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self._honest.hostname or "", self._honest.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else orjson.dumps(body))
            response = connection.getresponse()
            return response.status, orjson.loads(response.read() or b"null")
        finally:
            connection.close()

    # ---- what lies change ----------------------------------------------------------------------------------

    def look(self, path: str) -> tuple[int, Any]:
        status, answer = self.forward("GET", path)
        return status, self.info(answer) if path == "/model_info" else answer

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = self.forward("POST", path, self.ask(orjson.loads(orjson.dumps(body))))
        if status == 200:
            self.tell(body, answer, answer["meta_info"])
        return status, answer

    def info(self, answer: dict[str, Any]) -> dict[str, Any]:
        return answer

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def tell(self, body: dict[str, Any], answer: dict[str, Any], meta: dict[str, Any]) -> None:
        """Change `answer`, whose meta_info is `meta`, in place."""


def put(answer: dict[str, Any], ids: list[int]) -> None:
    """Other ids, with everything that counts them in line."""
    meta = answer["meta_info"]
    logprobs = [pair[0] for pair in meta["output_token_logprobs"]] or [-1.0]
    meta["output_token_logprobs"] = [[logprobs[min(n, len(logprobs) - 1)], i, None] for n, i in enumerate(ids)]
    meta["completion_tokens"] = len(ids)
    meta["weight_versions"][-1]["end"] = len(ids)
    answer["output_ids"] = ids


class DropsEndToken(Liar):
    def tell(self, body, answer, meta) -> None:
        if meta["finish_reason"]["type"] == "stop":
            put(answer, answer["output_ids"][:-1])


class IgnoresStops(Liar):
    def ask(self, body):
        return {**body, "sampling_params": {**body["sampling_params"], "stop_token_ids": []}}


class NamesAnotherStop(Liar):
    def tell(self, body, answer, meta) -> None:
        if meta["finish_reason"]["type"] == "stop":
            meta["finish_reason"]["matched"] = 0


class CallsEverythingAStop(Liar):
    """Finish reason "length" becomes "stop": a cut call would be executed."""

    def tell(self, body, answer, meta) -> None:
        meta["finish_reason"] = {"type": "stop", "matched": answer["output_ids"][-1]}


class CutsEarly(Liar):
    """The length limit, one token early."""

    def tell(self, body, answer, meta) -> None:
        if meta["finish_reason"]["type"] == "length" and len(answer["output_ids"]) > 1:
            put(answer, answer["output_ids"][:-1])


class RawLogprobs(Liar):
    """Samples and logprobs of softmax(logits) whatever the temperature."""

    def ask(self, body):
        params = body["sampling_params"]
        return {
            **body,
            "sampling_params": {**params, "temperature": 1.0 if params["temperature"] == 0.7 else params["temperature"]},
        }


class OneLogprobTooFew(Liar):
    def tell(self, body, answer, meta) -> None:
        meta["output_token_logprobs"].pop()


class ShiftedLogprobs(Liar):
    """Each id has its neighbour's logprob."""

    def tell(self, body, answer, meta) -> None:
        pairs = meta["output_token_logprobs"]
        meta["output_token_logprobs"] = [[pairs[n - 1][0], pair[1], None] for n, pair in enumerate(pairs)]


class EncodesSamplesAgain(Liar):
    """Output ids are those of the text, with logprobs that fit by their number."""

    def tell(self, body, answer, meta) -> None:
        put(answer, self.codec.encode_template(decode(self.codec, answer["output_ids"])))


class EncodesPromptsAgain(Liar):
    def ask(self, body):
        return {**body, "input_ids": self.codec.encode_template(decode(self.codec, body["input_ids"]))}


class EncodesPromptsAgainAndHidesIt(EncodesPromptsAgain):
    def tell(self, body, answer, meta) -> None:
        meta["prompt_tokens"] = len(body["input_ids"])
        if meta["input_token_logprobs"]:
            meta["input_token_logprobs"] = [[-1.0, i, None] for i in body["input_ids"]]


class CountsOneMore(Liar):
    def tell(self, body, answer, meta) -> None:
        meta["completion_tokens"] += 1


class CountsAPromptTokenMore(Liar):
    def tell(self, body, answer, meta) -> None:
        meta["prompt_tokens"] += 1


class SamplesPadding(Liar):
    """An id of a row that the tokenizer has no token for."""

    def tell(self, body, answer, meta) -> None:
        put(
            answer,
            [*answer["output_ids"][:-1], len(self.codec.pieces)] if len(answer["output_ids"]) > 20 else answer["output_ids"],
        )


class VersionsStopShort(Liar):
    def tell(self, body, answer, meta) -> None:
        meta["weight_versions"][-1]["end"] -= 1


class TellsNoVersions(Liar):
    def tell(self, body, answer, meta) -> None:
        del meta["weight_versions"]


class AnswersNothing(Liar):
    """Breaks down when it is to sample."""

    def post(self, path, body):
        return 500, {"error": {"message": "out of memory"}}


class Silent(Liar):
    """Takes what it is asked, and says nothing while the test runs."""

    released = threading.Event()

    def post(self, path, body):
        self.released.wait(60)
        return 500, None

    def __exit__(self, *_: object) -> None:
        self.released.set()
        super().__exit__()


class Llama(Liar):
    """Another architecture, whose folder is on another machine."""

    def info(self, answer):
        return {**answer, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "model_path": "/nowhere"}


class Router(Liar):
    def look(self, path):
        return 404, {"detail": "Not Found"}


class Starting(Liar):
    def look(self, path):
        return 503, ""


class Sglang(Liar):
    """The honest engine in the shape of a stock SGLang server: deprecated names, texts, input logprobs, a tokenizer."""

    def look(self, path):
        if path in ("/model_info", "/server_info"):
            return 404, {"detail": "Not Found"}
        status, answer = self.forward("GET", path.replace("get_", ""))
        answer.pop("engine", None)
        return status, {**answer, "context_length": None}

    def encode(self, text: str) -> list[int]:
        return self.codec.encode_template(text)

    def echoed(self, ids: list[int]) -> list[int]:
        return ids

    def post(self, path, body):
        listed = body.pop("logprob_start_len", -1) == 0
        if "text" in body:
            body["input_ids"] = self.encode(body.pop("text"))
        status, answer = super().post(path, body)
        if status == 200:
            answer["text"] = decode(self.codec, answer["output_ids"])
            if listed:
                pairs = [[-1.0, i, None] for i in self.echoed(body["input_ids"])]
                answer["meta_info"]["input_token_logprobs"] = [[None, *pairs[0][1:]], *pairs[1:]]
        return status, answer


class ListsNoPrompts(Liar):
    """Honest, but it has no logprobs of prompts."""

    def post(self, path, body):
        if "logprob_start_len" in body:
            return 400, {"error": {"message": "leave logprob_start_len out"}}
        return super().post(path, body)


class SglangWithoutVersions(Sglang):
    def tell(self, body, answer, meta) -> None:
        del meta["weight_versions"]


class SglangEchoesOtherIds(Sglang):
    def echoed(self, ids):
        return self.codec.encode_template(decode(self.codec, ids))


class SglangWithAnotherTokenizer(Sglang):
    def encode(self, text):
        return list(text.encode())


class SglangElsewhereWithAnotherTokenizer(SglangWithAnotherTokenizer):
    """Its files cannot be read from here."""

    def look(self, path):
        status, answer = super().look(path)
        return status, {**answer, "model_path": "/elsewhere", "tokenizer_path": "/elsewhere"} if status == 200 else answer


class EndsEarly(Liar):
    """A policy whose turns have three tokens, as a trained one's may have: no lie."""

    def tell(self, body, answer, meta) -> None:
        if (
            body["sampling_params"]["max_new_tokens"] > 3
            and body["sampling_params"]["stop_token_ids"]
            and len(answer["output_ids"]) > 2
        ):
            end = body["sampling_params"]["stop_token_ids"][0]
            put(answer, [*answer["output_ids"][:2], end])
            meta["finish_reason"] = {"type": "stop", "matched": end}
