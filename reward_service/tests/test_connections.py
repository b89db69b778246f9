"""Connections without a token: heads without end, half-sent requests, clients that do not read, other names."""

import asyncio
import contextlib
import resource
import select
import socket
import time

import httpx
import psutil
import pytest

from cosmos_rl_reward.front import connections, uploads
from tests.fronts import front_in_memory
from tests.service import body, image


def run(folder, test, **config):
    """Run an asynchronous test against a front in memory that listens; ``test(front, port)``."""

    async def inside():
        async with front_in_memory(folder, **config).run() as front, front.serve() as port:
            return await test(front, port)

    return asyncio.run(inside())


async def answer(reader, seconds=20):
    """All that the server says until it closes the connection."""
    async with asyncio.timeout(seconds):
        return await reader.read()


async def say(port, *parts, pause=0.0):
    """Send the parts on a connection of its own; what comes back until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
    try:
        return await answer(reader)
    except ConnectionError:
        return b"closed"
    finally:
        writer.close()


CHUNKED = b"POST /api/reward/pull HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET / HTTP/1.1\r\nX-A: ", b"a" * 65536),
        (b"GET /", b"a" * 65536),
        (b"GET / HTTP/1.1\r\n", b"X-A: b\r\n" * 8192),
        (CHUNKED + b"1;x=", b"a" * 65536),
        (CHUNKED + b"0\r\nX-A: ", b"a" * 65536),
    ],
    ids=["header", "url", "headers", "chunk extension", "trailer"],
)
def test_what_has_no_end_is_ended_after_64_kib(tmp_path, start, piece):
    async def test(front, port):
        sent = []

        async def attack():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                writer.write(b"" + start)
                while True:
                    writer.write(piece)
                    sent.append(len(piece))
                    await writer.drain()
                    await asyncio.sleep(0)
                    if reader.at_eof():
                        break
            return await answer(reader)

        with contextlib.suppress(ConnectionError):  # reset while it still sends: the answer may be lost
            said = await asyncio.wait_for(attack(), 20)
            assert said.startswith(b"HTTP/1.1 431") or (start.startswith(CHUNKED) and said == b"")
        assert sum(sent) < 8 << 20  # what the sockets hold, not what an attacker can send
        return (await httpx.AsyncClient().get(f"http://127.0.0.1:{port}/healthz")).status_code

    assert run(tmp_path, test) == 200


def test_a_head_of_60_kib_and_large_bodies_are_fine(tmp_path):
    async def test(front, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            long = await client.get("/healthz", headers={"X-A": "a" * 60_000})
            large = await client.post("/api/reward/enqueue", content=body(image(side=900), "a"))

            async def crumbs():
                content = body(image(side=40), "a")
                for i in range(0, len(content), 3):  # each chunk has more bytes of frame than of body
                    yield content[i : i + 3]

            small = await client.post("/api/reward/enqueue", content=crumbs())
            return long.status_code, large.status_code, small.status_code

    assert run(tmp_path, test) == (200, 200, 200)


def test_a_head_and_a_body_have_their_time(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    monkeypatch.setattr(connections, "_REST_S", 0.3)
    monkeypatch.setattr(uploads, "_DISCARD_S", 0.3)

    async def test(front, port):
        whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        posted = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nuuid=1"
        return await asyncio.gather(
            say(port),
            say(port, whole[:20]),
            say(port, whole, whole[:20], pause=0.05),  # a second head on the same connection
            say(port, *(bytes([b]) for b in whole[:40]), pause=0.05),  # a byte now and then is no progress
            say(port, posted % b"/api/reward/pull"),
            say(port, posted % b"/nothing"),  # answered before its body is there
            say(port, CHUNKED + b"1;", *(b"x" for _ in range(20)), pause=0.05),
        )

    silent, begun, second, slow, pull, early, extension = run(tmp_path, test, receive_timeout_s=0.3)
    assert silent == b""
    assert begun.startswith(b"HTTP/1.1 408")
    assert slow.startswith(b"HTTP/1.1 408") or slow == b"closed"
    assert second.count(b"HTTP/1.1 200") == second.count(b"HTTP/1.1 408") == 1
    assert pull.startswith(b"HTTP/1.1 408")
    assert early.startswith(b"HTTP/1.1 404")
    assert extension in (b"", b"closed") or b" 408" in extension


def test_requests_piled_up_on_one_connection_are_refused(tmp_path):
    async def test(front, port):
        before = psutil.Process().memory_info().rss
        said = await say(port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000)
        return said, psutil.Process().memory_info().rss - before

    said, grown = run(tmp_path, test)
    assert said.count(b"HTTP/1.1 200") < 2000
    assert b"HTTP/1.1 400" in said or said == b"closed"
    assert grown < 16 << 20


def test_who_does_not_read_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "_READ_S", 0.3)

    async def test(front, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4
        end = time.monotonic() + 60
        with pytest.raises(ConnectionError):
            while time.monotonic() < end:
                writer.write(request)
                await asyncio.wait_for(writer.drain(), 5)
                await asyncio.sleep(0.001)
        writer.transport.abort()

    run(tmp_path, test)


def test_when_there_are_too_many_the_half_open_ones_make_room(tmp_path):
    async def test(front, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/healthz")).status_code == 200
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
            for _, writer in held[::2]:
                writer.write(b"GET / HTTP/1.1\r\nX-A: ")
            assert (await client.get("/healthz")).status_code == 200  # the connection that was there first
            with contextlib.suppress(ConnectionError):  # the oldest half-open one has gone
                assert await answer(held[0][0]) == b""
            for _, writer in held:
                writer.close()

    run(tmp_path, test, max_connections=16)


PING = b"POST /api/reward/ping HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"


def test_a_health_check_does_not_wait_for_what_400_connections_sent_before_it(tmp_path):
    info = b"info_data=" + b"x" * 300

    async def test(front, port):
        clients = []
        for _ in range(400):
            client = socket.create_connection(("127.0.0.1", port))
            clients.append(client)
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"  # all connections are accepted
        for client in clients:
            client.sendall(PING % (len(info), info))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await answer(reader)
        answered = select.poll()
        for client in clients:
            answered.register(client, select.POLLIN)
        before = len(answered.poll(0))
        for client in clients:
            client.settimeout(20)
        statuses = {(await asyncio.to_thread(client.recv, 100)).split()[1] for client in clients}
        for client in clients:
            client.close()
        return before, statuses

    answered, statuses = run(tmp_path, test)
    assert answered < 200
    assert statuses == {b"200"}  # those that waited are answered too


def test_a_request_that_waits_for_its_turn_may_come_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "_PER_ROUND", 1)

    async def test(front, port):
        request = PING % (11, b"info_data=a") + PING.replace(b"Host", b"Connection: close\r\nHost") % (0, b"")
        pieces = [request[at : at + 7] for at in range(0, len(request), 7)]
        return await asyncio.gather(*(say(port, *pieces) for _ in range(20)))

    for got in run(tmp_path, test):
        assert got.count(b"200 OK") == 2


@pytest.mark.process
def test_2000_half_open_connections_leave_healthz_quick(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 5000:
        pytest.skip(f"only {hard} open files allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def test(front, port):
        process, held, times = psutil.Process(), [], []
        before = process.memory_info().rss
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            for number in range(2000):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\nX-A: " + b"a" * (number % 3))
                held.append(writer)
            grown = process.memory_info().rss - before
            for _ in range(50):
                cpu = time.process_time()  # of client and server: what another process takes does not count
                assert (await client.get("/healthz")).status_code == 200
                times.append(time.process_time() - cpu)
        for writer in held:
            writer.close()
        return sorted(times)[45], grown

    try:
        seconds, grown = run(tmp_path, test)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seconds < 0.05
    assert grown < 64 << 20


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "127.0.0.1:8080"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "localhost:9", "Origin": "http://localhost:9"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example:8080"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:9", "Origin": "http://localhost:10"}, 403),
    ],
)
def test_without_tokens_only_names_of_this_machine_are_served(tmp_path, monkeypatch, headers, status):
    async def test(front):
        posted = await front.enqueue(body(image(), "a"), **headers, **{"Content-Type": "text/plain"})
        return posted.status_code, (await front.client.get("/api/reward/rewards", headers=headers)).status_code

    async def both():
        async with front_in_memory(tmp_path / "open").run() as front:
            without = await test(front)
        monkeypatch.setenv("COSMOS_RL_REWARD_TOKENS", "t" * 20)
        async with front_in_memory(tmp_path / "tokens").run() as front:
            front.client.headers["Authorization"] = "Bearer " + "t" * 20
            return without, await test(front)

    assert asyncio.run(both()) == ((status, status), (200, 200))
