"""The client process that gets killed. Says on stdout where it is; what it does next depends on its first argument."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from agent_harness import BLOCK_BYTES, RawClient

from tierkv.agent.client import AgentStore
from tierkv.agent.protocol import REQUESTS, Kind, encode
from tierkv.fragments import Fragments
from tierkv.testing.buffers import chain_hashes, make_spec, part_payload, random_hashes
from tierkv.testing.stores import OK, filled, load, save

PATIENCE_S = 120.0


def say(what: str) -> None:
    """A line for whoever is to kill this process here."""
    print(what, flush=True)


def stay() -> None:
    """Waits to be killed."""
    sys.stdin.read()
    time.sleep(PATIENCE_S)


def reserve(path: str, seed: int, point: str) -> None:
    """Reserves and stops before, amid or after writing; or says it is about to commit, and does so when told."""
    client = RawClient(path)
    number = client.open(make_spec(BLOCK_BYTES))
    hashes = random_hashes(4, seed)
    own, status, offsets = client.ask(Kind.RESERVE, number, 0, 30.0, hashes)
    assert not status.any()
    if point == "before":
        say("reserved " + " ".join(map(str, offsets.tolist())))
        stay()
    for position, offset in enumerate(offsets.tolist()):
        client.write(int(offset), b"\xbb" * (BLOCK_BYTES // 2 if position == 3 else BLOCK_BYTES))
        if point == "amid" and position == 2:
            say("writing " + " ".join(map(str, offsets.tolist())))
            stay()
    say("written " + " ".join(map(str, offsets.tolist())))
    if point == "late":  # goes on when it is continued: writes once more, then commits
        sys.stdin.readline()
        for offset in offsets.tolist():
            client.write(int(offset), b"\xcc" * BLOCK_BYTES)
        try:
            (found,) = client.ask(Kind.COMMIT, own, 1)
            say("committed " + " ".join(map(str, found.tolist())))
        except Exception as error:  # the parent reads what it was
            say(f"refused {error}")
    stay()


def hold(path: str, seed: int) -> None:
    """Saves, and holds leases and acquired blocks."""
    client = RawClient(path)
    spec = make_spec(BLOCK_BYTES)
    number, hashes = client.open(spec), random_hashes(4, seed)
    with AgentStore(path) as store:
        space = store.open(spec)
        assert save(store, space, hashes) == [OK] * 4
    client.ask(Kind.LEASE, 300.0, [number], [4], hashes)
    client.ask(Kind.ACQUIRE, number, 0, 10.0, hashes)
    say("held")
    stay()


def half(path: str) -> None:
    """Has sent half of a message."""
    client = RawClient(path)
    number = client.open(make_spec(BLOCK_BYTES))
    message = b"".join(
        bytes(piece) for piece in encode(Kind.MATCH, 9, REQUESTS[Kind.MATCH], (number, random_hashes(500)))
    )
    client.send(message[: len(message) // 2])
    say("half")
    stay()


def work(path: str, seed: int) -> None:
    """Saves and loads for ever."""
    random = np.random.default_rng(seed)
    with AgentStore(path) as store:
        space = store.open(make_spec(BLOCK_BYTES))
        say("working")
        while True:
            hashes = chain_hashes(int(random.integers(1, 20)), 20)
            memory = np.zeros((20, BLOCK_BYTES), np.uint8)
            jobs: list[Any] = [
                store.save(space, hashes, filled(space, hashes)),
                store.load(space, hashes, Fragments.from_blocks(memory)),
            ]
            lease = store.lease([(space, hashes)], 60.0)
            for job in jobs:
                assert job.wait(30.0)
            for position in np.flatnonzero(jobs[1].status == OK).tolist():
                assert memory[position].tobytes() == part_payload(space, hashes[position].tobytes(), 0)
            assert set(load(store, space, hashes)) <= {0, 1, 2, 3}
            if random.integers(2):
                lease.release()


if __name__ == "__main__":
    name, path, *rest = sys.argv[1:]
    match name:
        case "hold":
            hold(path, int(rest[0]))
        case "half":
            half(path)
        case "work":
            work(path, int(rest[0]))
        case _:
            reserve(path, int(rest[0]), name)
