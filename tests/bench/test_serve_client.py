"""One request: which events count, and what becomes of answers that go wrong."""

import asyncio
import json

import pytest

from minuet.bench.serve import load
from minuet.bench.serve.client import Endpoint, ask, session
from minuet.bench.serve.prompts import Prompt

PROMPT = Prompt([1, 2, 3], 4)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(**content):
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token(*ids, **more):
    return event(choices=[{"index": 0, "text": "", "token_ids": list(ids), **more}])


DONE = b"data: [DONE]\n\n"
USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 3})


def served(*pieces, chat=False, gap_s=0.0, times=1):
    """Outcomes of requests to a server that sends these bytes, and the bodies it was sent."""
    bodies = []

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        for number, piece in enumerate(pieces):
            await asyncio.sleep(gap_s if number else 0.0)
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", chat, {"model": "m"})
        async with server, session() as http:
            return [await ask(http, endpoint, PROMPT) for _ in range(times)]

    return asyncio.run(run()), bodies


def test_times_are_between_events_and_counts_are_the_servers():
    pieces = [HEAD, token(7), token(8, 9), token(finish_reason="stop"), USAGE, DONE]
    (outcome,), (body,) = served(*pieces, gap_s=0.03)
    assert outcome.ok
    assert (outcome.input_tokens, outcome.output_tokens, outcome.events) == (3, 3, [1, 2])
    assert 0.03 <= outcome.ttft_s < 0.06
    (gap,) = outcome.itls_s
    assert 0.02 < gap < 0.06
    # the event that only says why it ended brings no token, and ends no gap
    assert outcome.latency_s == pytest.approx(outcome.ttft_s + gap, abs=1e-6)
    assert outcome.tpot_s == pytest.approx(gap / 2, abs=1e-6)
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_role_of_a_chat_comes_before_the_first_token():
    def delta(**content):
        return event(choices=[{"index": 0, "delta": content}])

    pieces = [HEAD, delta(role="assistant", content=""), delta(content="a"), USAGE, DONE]
    (outcome,), (body,) = served(*pieces, chat=True, gap_s=0.03)
    assert outcome.events == [1]
    assert outcome.ttft_s >= 0.06
    assert body["messages"] == [{"role": "user", "content": [1, 2, 3]}]
    assert body["max_completion_tokens"] == 4


def test_events_may_be_cut_anywhere():
    whole = token(7) + b": a comment\n\n" + token(8) + USAGE + DONE
    (outcome,), _ = served(HEAD, *(bytes([byte]) for byte in whole))
    assert (outcome.ok, outcome.events, outcome.output_tokens) == (True, [1, 1], 3)


FULL = json.dumps({"error": {"message": "the queue is full"}}).encode()


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        (
            [b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n" % len(FULL), FULL],
            "429 Too Many Requests: the queue is full",
        ),
        ([b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\nnope"], "502 Bad Gateway: nope"),
        ([HEAD, token(7), event(error={"message": "gave up"}), DONE], "gave up"),
        ([HEAD, token(7)], "the stream ended before its end"),
        ([HEAD, USAGE, DONE], "the stream brought no token"),
        ([HEAD, token(7), b"data: {oops\n\n"], "DecodeError: "),
        ([], "ServerDisconnectedError: "),
    ],
)
def test_what_goes_wrong_is_part_of_the_outcome(pieces, error):
    (outcome,), _ = served(*pieces)
    assert not outcome.ok
    assert outcome.error.startswith(error)


def test_a_server_that_is_not_there_fails_requests_and_nothing_else():
    endpoint = Endpoint("http://127.0.0.1:9/v1", False, {})
    seen = []
    outcomes, _ = asyncio.run(load.run(endpoint, [PROMPT] * 3, [0.0] * 3, 2, seen.append))
    assert len(outcomes) == len(seen) == 3
    assert all("Connect" in outcome.error for outcome in outcomes)


def test_no_more_requests_are_in_flight_than_allowed():
    now = most = 0

    async def handle(reader, writer):
        nonlocal now, most
        await reader.readuntil(b"\r\n\r\n")
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.03)
        now -= 1
        writer.write(HEAD + token(7) + USAGE + DONE)
        await writer.drain()
        writer.close()

    async def run(limit):
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", False, {})
            return await load.run(endpoint, [PROMPT] * 9, [0.0] * 9, limit, lambda outcome: None)

    outcomes, seconds = asyncio.run(run(3))
    assert all(outcome.ok for outcome in outcomes)
    assert most == 3
    assert seconds >= 0.09
    # the clock of a request that waited for its turn starts with its turn
    assert max(outcome.latency_s for outcome in outcomes) < 0.09
