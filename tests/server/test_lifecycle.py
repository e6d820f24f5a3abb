"""Death, hanging, draining, overload, clients that leave: everyone gets an end, nothing leaks."""

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import running
from tests.server.scripted import say
from tests.server.test_completions import complete


@pytest.fixture(scope="module")
def fragile(tiny_folder):
    """A scripted server that may be killed: short patience, many restarts."""
    flags = ["--served-model-name", "m", "--step-timeout", "2", "--engine-restarts", "100"]
    with running(tiny_folder, *flags, scripted=True) as server:
        yield server


def slow(tokens=2000, delay_ms=5):
    return say("a", repeat=tokens, split=True, delay_ms=delay_ms)


async def read_stream(client, url, prompt, **body):
    """(seconds of each event since the request, last event but [DONE])."""
    given = {"prompt": prompt, "stream": True, "max_tokens": 3000, **body}
    times, last, began = [], None, time.perf_counter()
    async with client.stream("POST", url + "/v1/completions", json=given) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter() - began)
                last = json.loads(line[6:])
    return times, last


async def broken_by(server, action, prompt=None):
    """What a stream and a plain request see when something happens to the engine."""
    async with httpx.AsyncClient(timeout=30) as client:
        url = server.url
        stream = asyncio.create_task(read_stream(client, url, prompt or slow()))
        body = {"prompt": slow(), "max_tokens": 3000}
        plain = asyncio.create_task(client.post(url + "/v1/completions", json=body))
        await asyncio.sleep(0.5)
        began = time.perf_counter()
        action()
        (_, last), response = await asyncio.gather(stream, plain)
        return time.perf_counter() - began, last, response


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_requests_of_a_dead_engine_end_within_5_s_and_it_serves_again(fragile, how):
    pid = fragile.engine_pid()
    seconds, last, response = asyncio.run(broken_by(fragile, lambda: os.kill(pid, how)))
    assert seconds < 5.0
    assert "error" in last
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "service_unavailable"
    fragile.until(lambda: fragile.get("/health").status_code == 200, 30)
    assert fragile.engine_pid() != pid
    assert complete(fragile, prompt=say("again"))["choices"][0]["text"] == "again"
    assert fragile.metric("minuet:engine_restarts_total") >= 1
    fragile.until_idle()


def test_a_stuck_step_fails_health_and_requests_within_5_s(fragile):
    seconds, last, response = asyncio.run(
        broken_by(fragile, lambda: None, say("a" * 50, split=True, do="hang", at=5))
    )
    assert seconds < 5.0
    assert "stuck" in last["error"]["message"]
    assert response.status_code == 503
    fragile.until(lambda: fragile.get("/health").status_code == 200, 30)


def test_health_tells_idle_busy_and_dead_apart(fragile):
    fragile.until_idle()
    assert fragile.get("/health").json()["status"] == "idle"
    with httpx.Client() as client:
        body = {"prompt": slow(), "stream": True, "max_tokens": 3000}
        url = fragile.url + "/v1/completions"
        with client.stream("POST", url, json=body, timeout=30) as response:
            lines = response.iter_lines()  # held: closing it would close the connection
            next(lines)
            fragile.until(lambda: fragile.get("/health").json()["status"] == "busy")
    os.kill(fragile.engine_pid(), signal.SIGKILL)
    fragile.until(lambda: fragile.get("/health").status_code == 503, 5)
    fragile.until(lambda: fragile.get("/ready").status_code == 200, 30)


def test_a_step_that_raises_ends_its_requests_alone(fragile):
    response = fragile.post("/v1/completions", {"prompt": say("abc", do="raise", at=1)})
    assert response.status_code == 500
    assert "the step failed" in response.json()["error"]["message"]
    assert complete(fragile, prompt=say("fine"))["choices"][0]["text"] == "fine"
    fragile.until(lambda: fragile.metric("minuet:engine_failed_steps_total") >= 1)
    fragile.until_idle()


def test_a_nonfinite_logit_ends_one_request_and_not_its_neighbour(scripted):
    async def both():
        async with httpx.AsyncClient(timeout=30) as client:
            neighbour = read_stream(client, scripted.url, slow(200, 1))
            sick = read_stream(client, scripted.url, say("abcdef" * 9, split=True, do="nan", at=30))
            return await asyncio.gather(neighbour, sick)

    before = scripted.metric("minuet:nonfinite_logits_total")
    (times, last), (_, error) = asyncio.run(both())
    assert last["choices"][0]["finish_reason"] == "stop"
    assert len(times) > 100
    assert "finite" in error["error"]["message"]
    scripted.until(lambda: scripted.metric("minuet:nonfinite_logits_total") == before + 1)
    # its pages were withdrawn: the same prompt is computed anew
    again = scripted.post("/v1/completions", {"prompt": say("x" * 80, do="nan", at=0)})
    assert again.status_code == 500
    retried = scripted.post("/v1/completions", {"prompt": say("x" * 80, do="nan", at=99)})
    cached = retried.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached < retried.json()["usage"]["prompt_tokens"] - 32


# --- clients that leave --------------------------------------------------------------------------


def request_bytes(path="/v1/completions", **body):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize(
    "stage", ["connected", "head", "body", "sent", "waiting", "streaming", "unread"]
)
def test_a_client_that_leaves_leaves_nothing_behind(scripted, stage):
    raw = request_bytes(prompt=slow(), max_tokens=3000, stream=stage in ("streaming", "unread"))
    sent = {"connected": b"", "head": raw[:30], "body": raw[:-20]}.get(stage, raw)
    with socket.create_connection(("127.0.0.1", scripted.port)) as client:
        client.sendall(sent)
        if stage == "waiting":
            scripted.until(lambda: scripted.get("/stats").json()["running"])
        elif stage == "streaming":
            client.recv(100)
            client.recv(100)
        elif stage == "unread":
            time.sleep(0.2)
    scripted.until_idle()


def test_clients_that_leave_while_they_wait_in_the_queue(tiny_folder):
    flags = ["--max-num-seqs", "1", "--max-num-queued-reqs", "3", "--served-model-name", "m"]
    with running(tiny_folder, *flags, scripted=True) as server:
        body = {"prompt": slow(), "max_tokens": 3000}
        clients = []
        for _ in range(4):
            client = socket.create_connection(("127.0.0.1", server.port))
            client.sendall(request_bytes(**body))
            clients.append(client)
        server.until(lambda: server.get("/stats").json()["waiting"] == 3)
        full = server.post("/v1/completions", body)
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["type"] == "rate_limit_error"
        too_many = server.post("/v1/completions", {**body, "n": 100})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        for client in clients:
            client.close()
        server.until_idle()
        assert complete(server, prompt=say("fine"))["choices"][0]["text"] == "fine"
        assert server.metric("minuet:request_refused_total", status="429") == 1
        assert server.metric("minuet:request_success_total", finished_reason="abort") == 4


def test_a_client_that_stops_reading_is_given_up(tiny_folder):
    flags = ["--write-timeout", "1", "--served-model-name", "m"]
    with running(tiny_folder, *flags, scripted=True) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        # an answer larger than the buffers between us
        body = {"prompt": "x", "max_tokens": 3000, "n": 32, "stream": True, "ignore_eos": True}
        client.sendall(request_bytes(**body, logprobs=1))

        def ended() -> float:
            reasons = ("abort", "length")
            name = "minuet:request_success_total"
            return sum(server.metric(name, finished_reason=reason) for reason in reasons)

        # all of it may be over before the first look
        server.until(lambda: server.get("/stats").json()["running"] or ended())
        server.until_idle()
        client.close()
        server.until(lambda: ended() >= 32)
        assert server.get("/stats").json()["running"] == 0


# --- the end -------------------------------------------------------------------------------------


def test_sigterm_drains(tiny_folder):
    async def drained(server):
        async with httpx.AsyncClient(timeout=30) as client:
            stream = asyncio.create_task(read_stream(client, server.url, slow(300, 3)))
            await asyncio.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            with pytest.raises(httpx.HTTPError):
                await client.post(server.url + "/v1/completions", json={"prompt": "x"})
            return await stream

    with running(tiny_folder, scripted=True) as server:
        pid = server.engine_pid()
        _, last = asyncio.run(drained(server))
        assert last["choices"][0]["finish_reason"] == "stop"
        assert server.process.wait(10) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_sigterm_ends_what_takes_too_long(tiny_folder):
    flags = ["--drain-timeout", "1"]
    with running(tiny_folder, *flags, scripted=True) as server, httpx.Client() as client:
        body = {"prompt": slow(3000, 20), "stream": True, "max_tokens": 3000}
        url = server.url + "/v1/completions"
        with client.stream("POST", url, json=body, timeout=30) as response:
            lines = response.iter_lines()  # held: closing it would close the connection
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(15) == 0


def test_the_engine_ends_with_its_server(tiny_folder):
    with running(tiny_folder, scripted=True) as server:
        pid = server.engine_pid()
        server.process.kill()
        server.process.wait()

        def is_gone():
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"

        server.until(is_gone, 5)


def test_a_server_that_was_suspended_does_not_blame_its_engine(fragile):
    fragile.until_idle()
    pid = fragile.engine_pid()
    fragile.process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    fragile.process.send_signal(signal.SIGCONT)
    fragile.until(lambda: fragile.get("/health").status_code == 200)
    time.sleep(0.5)
    assert fragile.engine_pid() == pid


def test_an_engine_that_cannot_be_kept_alive_ends_the_server(tiny_folder):
    with running(tiny_folder, "--engine-restarts", "0", scripted=True) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(10) == 1


def test_a_request_may_not_take_longer_than_allowed(tiny_folder):
    with running(tiny_folder, "--request-timeout", "0.5", scripted=True) as server:
        response = server.post("/v1/completions", {"prompt": slow(), "max_tokens": 3000})
        assert response.status_code == 408
        server.until_idle()
