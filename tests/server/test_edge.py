"""What happens before a request is understood: keys, sizes, slowness, and all kinds of abuse."""

import asyncio
import json
import socket
import time
from itertools import pairwise

import httpx
import pytest

from tests.server.conftest import running
from tests.server.scripted import say
from tests.server.test_completions import complete
from tests.server.test_lifecycle import read_stream, request_bytes

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def guarded(tiny_folder):
    flags = ["--api-key", "first-key,second-key", "--max-body-size", "100kB"]
    flags += ["--body-timeout", "1", "--served-model-name", "m"]
    with running(tiny_folder, *flags, scripted=True) as server:
        yield server


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer first-ke", 401),
        ("Basic first-key", 401),
        ("Bearer", 401),
        ("Bearer sch\u00fcssel", 401),
        ("Bearer first-key", 200),
        ("bearer second-key", 200),
    ],
)
def test_keys(guarded, header, status):
    headers = {} if header is None else {"authorization": header.encode()}
    response = guarded.get("/v1/models", headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"


def test_what_stays_open_and_what_does_not(guarded):
    for path in ("/", "/health", "/ready", "/metrics", "/page/app.js", "/page/style.css"):
        assert guarded.get(path).status_code == 200
    for path in ("/stats", "/explain", "/version", "/openapi.json", "/tokenizer_info", "/page"):
        assert guarded.get(path).status_code == 401
    assert guarded.post("/reset_prefix_cache").status_code == 401
    keyed = {"authorization": "Bearer first-key"}
    shown = guarded.get("/explain", headers=keyed).text + guarded.get("/metrics").text
    assert "first-key" not in shown
    assert "first-key" not in "".join(guarded.log)


def exchange(port, *parts, pause=0.0, seconds=20.0):
    """Send parts; what comes back until the server closes or falls silent."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(seconds)
        found = b""
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
            while piece := client.recv(65536):
                found += piece
        except (TimeoutError, ConnectionError):
            pass
        return found


def test_sizes_and_slowness_are_limited(guarded):
    key = b"authorization: Bearer first-key\r\ncontent-type: application/json\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + key
    big = exchange(guarded.port, head + b"content-length: 52428800\r\n\r\n" + b"x" * 1000)
    assert b" 413 " in big.split(b"\r\n")[0]
    chunks = b"transfer-encoding: chunked\r\n\r\n" + (b"2000\r\n" + b"x" * 8192 + b"\r\n") * 20
    assert b" 413 " in exchange(guarded.port, head + chunks).split(b"\r\n")[0]
    began = time.perf_counter()
    slow = exchange(guarded.port, head + b"content-length: 1000\r\n\r\n" + b'{"prompt": "')
    assert b" 408 " in slow.split(b"\r\n")[0]
    assert 0.9 < time.perf_counter() - began < 5
    huge = b"GET / HTTP/1.1\r\nhost: x\r\nx-huge: " + b"a" * 200_000
    assert b" 431 " in exchange(guarded.port, huge).split(b"\r\n")[0]
    many = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x%d: a\r\n" % i for i in range(20_000))
    assert b" 431 " in exchange(guarded.port, many).split(b"\r\n")[0]


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "x", "max_tokens": 3',
        b"not json",
        b"\xff\xfe{}",
        b"[]",
        b"null",
        b"5",
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "top_p": -Infinity}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"prompt": "x", "logit_bias": {"\xc2\xb2": 1}}',
    ],
)
def test_a_bad_body_is_the_clients_fault(scripted, content):
    response = scripted.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [{"a": 1}] * 500_000},
        {"prompt": [["x"]] * 500_000},
        {"prompt": "x", "logit_bias": {str(i): "x" for i in range(300_000)}},
        {"prompt": "x"} | {f"field{i}": 1 for i in range(300_000)},
        {"prompt": "x", "stop": [1] * 500_000},
    ],
    ids=["objects", "lists", "biases", "fields", "stops"],
)
def test_a_million_errors_are_not_collected(scripted, body):
    began = time.perf_counter()
    response = scripted.post("/v1/completions", body)
    assert response.status_code == 400
    assert time.perf_counter() - began < 5
    assert len(response.content) < 4000


def test_a_body_that_says_it_is_something_else(scripted):
    content = b'{"prompt": "x"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = scripted.post("/v1/completions", content=content, headers={"content-type": kind})
        assert response.status_code == 400


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00" * 100,
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_not_http_is_refused_and_forgotten(scripted, raw):
    answer = exchange(scripted.port, raw, seconds=2)
    assert answer == b"" or b" 40" in answer.split(b"\r\n")[0]
    assert scripted.get("/health").status_code == 200


def test_unknown_paths_and_methods(scripted):
    assert scripted.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert scripted.get("/v1/completions").status_code == 405
    assert scripted.get("/v1/models/gpt-4").json()["error"]["param"] == "model"
    assert scripted.get("/page/../app.py").status_code == 404
    assert scripted.get("/page/%2e%2e%2fapp.py").status_code == 404


def test_request_ids_are_ours(scripted):
    headers = {"x-request-id": "mine"}
    found = {scripted.get("/health", headers=headers).headers["x-request-id"] for _ in range(3)}
    assert len(found) == 3
    assert "mine" not in found


def test_a_neighbour_does_not_notice_abuse(scripted):
    """1,000 half-open connections, 50 MB bodies, truncated JSON, while a stream goes on."""

    async def abuse():
        async with httpx.AsyncClient(timeout=60) as client:
            prompt = say("a", repeat=600, split=True, delay_ms=5)
            stream = asyncio.create_task(read_stream(client, scripted.url, prompt))
            await asyncio.sleep(0.3)
            half = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le"
            opened = [await half_open(half) for _ in range(1000)]
            big = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 52428800\r\n\r\n"
            opened += [await half_open(big + b"x" * 100_000) for _ in range(5)]
            truncated = request_bytes(prompt="x")[:-3]
            opened += [await half_open(truncated) for _ in range(50)]
            times, last = await stream
            for writer in opened:
                writer.close()
            return times, last

    async def half_open(raw):
        _, writer = await asyncio.open_connection("127.0.0.1", scripted.port)
        writer.write(raw)
        return writer

    times, last = asyncio.run(abuse())
    assert last["choices"][0]["finish_reason"] == "stop"
    assert len(times) >= 600
    assert max(b - a for a, b in pairwise(times)) < 1.0
    scripted.until_idle()
    assert complete(scripted, prompt=say("fine"))["choices"][0]["text"] == "fine"


def test_errors_are_json_with_our_shape(scripted):
    error = json.loads(scripted.post("/v1/completions", {"prompt": "x", "n": 0}).text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
