"""A load of clients that behave and that do not: soak.py BASE_URL SECONDS [PID]

64 clients ask, stream, read slowly, leave in the middle, and send broken and oversized requests. Wanted: no 5xx,
refusals only for what is wrong or when the queue is full, answers equal to those given alone, no request that is
stuck, and memory that stays within 5% of what it was after a third of the time (with a PID).
"""

import asyncio
import json
import random
import sys
import time

import httpx

BASE, SECONDS = sys.argv[1], float(sys.argv[2])
PID = sys.argv[3] if len(sys.argv) > 3 else None
CLIENTS = 64
PROMPTS = ["Once upon a time", "A brave fox", "The sea was calm and", "Tell me of an owl. " * 8]
counts = {}


def count(what):
    counts[what] = counts.get(what, 0) + 1


def memory():
    """Own memory in bytes: anonymous and shared pages."""
    with open(f"/proc/{PID}/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def request(i):
    return {"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": 4 + i % 29, "temperature": i % 2, "seed": i}


async def ask(client, i):
    response = await client.post("/v1/completions", json=request(i))
    if response.status_code == 429:
        assert response.headers["retry-after"]
        return None
    assert response.status_code == 200, (response.status_code, response.text)
    return response.json()["choices"][0]["text"]


async def stream(client, i, delay, leave):
    text = ""
    async with client.stream("POST", "/v1/completions", json={**request(i), "stream": True}) as response:
        if response.status_code == 429:
            return None
        assert response.status_code == 200, response.status_code
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            text += chunk["choices"][0]["text"]
            await asyncio.sleep(delay)
            if random.random() < leave:
                return None
    return text


async def wrong(client, rng):
    kind = rng.randrange(5)
    if kind == 0:
        response = await client.post("/v1/chat/completions", content=b"{" * rng.randrange(1, 2000))
    elif kind == 1:
        response = await client.post("/v1/messages", json={"max_tokens": "x", "messages": 3})
    elif kind == 2:
        response = await client.post("/v1/completions", content=b" " * (9 << 20))
    elif kind == 3:
        response = await client.post("/v1/completions", json={"prompt": "word " * 20000})
    else:
        reader, writer = await asyncio.open_connection(*BASE.removeprefix("http://").split(":"))
        writer.write(rng.randbytes(rng.randrange(200)) + b"\r\n\r\n")
        await writer.drain()
        writer.close()
        return
    assert 400 <= response.status_code < 500, response.status_code


async def behave(number, want, end, going):
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=BASE, timeout=120) as client:
        while time.time() < end:
            await going.wait()
            i = rng.randrange(len(want))
            kind = rng.random()
            try:
                if kind < 0.35:
                    got = await ask(client, i)
                elif kind < 0.6:
                    got = await stream(client, i, 0, 0)
                elif kind < 0.75:
                    got = await stream(client, i, 0.05, 0)
                elif kind < 0.88:
                    got = await stream(client, i, 0, 0.3)
                else:
                    await wrong(client, rng)
                    count("wrong")
                    continue
            except (httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError, ConnectionError) as error:
                # A server may close on who sends too much.
                assert kind >= 0.88, repr(error)
                count("closed")
                continue
            if got is None:
                count("left or refused")
                await asyncio.sleep(0.02)
            else:
                assert got == want[i], (i, got, want[i])
                count("answered")


async def resting(client):
    """Waits until nothing is computed; gives the memory that is kept then."""
    for _ in range(300):
        health = (await client.get("/health")).json()
        if health["running"] == 0 and health["waiting"] == 0:
            break
        await asyncio.sleep(0.1)
    else:
        raise AssertionError(f"stuck: {health}")
    # What is free is given back every two seconds.
    await asyncio.sleep(5)
    return memory() if PID else 0


async def main():
    async with httpx.AsyncClient(base_url=BASE, timeout=120) as client:
        want = [await ask(client, i) for i in range(40)]
        begin, steady = time.time(), None
        end = begin + SECONDS
        going = asyncio.Event()
        going.set()
        clients = [asyncio.create_task(behave(n, want, end, going)) for n in range(CLIENTS)]
        highest = [0, 0, 0]
        while not all(task.done() for task in clients):
            await asyncio.sleep(0.5)
            if not PID:
                continue
            third = min(int(3 * (time.time() - begin) / SECONDS), 2)
            highest[third] = max(highest[third], memory())
            # After a third, all pages that will be touched have been. Everybody rests, so that what is kept is
            # compared with what is kept, and not with what is in use.
            if steady is None and third > 0:
                going.clear()
                steady = await resting(client)
                going.set()
        for task in clients:
            task.result()
        now = await resting(client)
        # Memory that is first touched late is not touched again; a leak goes on. So what grew is looked at once more.
        for _ in range(2):
            if not PID or now <= steady * 1.05:
                break
            print(f"memory: {steady} kept after a third, {now} later: once more")
            steady, end = now, time.time() + SECONDS / 2
            await asyncio.gather(*(behave(n, want, end, going) for n in range(CLIENTS)))
            now = await resting(client)
        metrics = (await client.get("/metrics")).text
        assert 'forebay_requests_total{end="failed"} 0' in metrics
        if PID:
            grown = 100 * (now - steady) / steady
            print(f"memory: {steady} kept before, {now} at the end ({grown:+.1f}%); highest in thirds: {highest}")
            assert now <= steady * 1.05, "memory grows"
    print(counts, f"in {SECONDS:.0f} s")
    print("1 passed, 0 failed")


asyncio.run(main())
