"""--keep-dram with real SIGKILLs: what was saved is there again with its bytes, and no slot is lost or given twice."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from runtime_harness import (
    BLOCK_BYTES,
    TIMEOUT_S,
    Agent,
    eventually,
    load_checked,
    make_spec,
    names,
    payload,
    python,
    save,
    stand_still,
)

import tierkv
from tierkv import Fragments
from tierkv.agent.client import AgentStore

pytestmark = pytest.mark.crash

CLIENT = """
import json, sys
import numpy as np
import tierkv
from tierkv import Fragments
from runtime_harness import BLOCK_BYTES, finished, load_checked, make_spec, names, payload

path, seed, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(seed)
size_bytes = BLOCK_BYTES // parts
saved = loaded = missed = 0
store = tierkv.connect(path)
space = store.open(make_spec((size_bytes,) * parts))
print("going", flush=True)
import select
while not select.select([sys.stdin], [], [], 0.002 if store.attached else 0.05)[0]:
    hashes = names(int(rng.integers(0, 400)), int(rng.integers(1, 24)))
    for part in range(parts):
        status = finished(store.save(space, hashes, Fragments.from_blocks(payload(hashes, part, size_bytes)), part))
        saved += int(np.count_nonzero(status == 0))
    hashes = names(int(rng.integers(0, 400)), int(rng.integers(1, 24)))
    for part in range(parts):
        into = np.zeros((len(hashes), size_bytes), np.uint8)
        good = finished(store.load(space, hashes, Fragments.from_blocks(into), part)) == 0
        assert (into[good] == payload(hashes[good], part, size_bytes)).all(), "wrong bytes"
        loaded += int(np.count_nonzero(good))
        missed += int(np.count_nonzero(~good))
store.close()
print(json.dumps([saved, loaded, missed]))
"""


def arguments(directory: Path, dram: str, *more: str) -> list[str]:
    return ["--socket", str(directory / "agent.sock"), "--dram", dram, "--keep-dram", *more]


def settled(store: AgentStore) -> None:
    """Waits until nobody holds anything; then each slot that is in use holds a block that can be found."""

    def still() -> bool:
        try:
            stats = store.stats()
        except tierkv.TierKVError:
            return False
        dram = stats.tiers["dram"]
        busy = stats.pins or stats.pending_blocks or stats.leases
        return not busy and dram.used_bytes == dram.blocks * BLOCK_BYTES

    eventually(still, "no slot is in use but those of blocks")


def reattached(store: AgentStore, space: tierkv.Keyspace, hashes: np.ndarray) -> None:
    eventually(lambda: store.attached and store.match(space, hashes).length > 0, "the blocks are found again")


@pytest.mark.parametrize(
    ("parts", "below"),
    [
        (1, False),
        (2, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
)
def test_kills_under_load(tmp_path: Path, parts: int, below: bool) -> None:
    nvme = ["--nvme-dir", str(tmp_path / "nvme"), "--nvme", "32MiB"] if below else []
    delays = np.random.default_rng(parts + 2 * below)
    path = str(tmp_path / "agent.sock")
    with Agent(*arguments(tmp_path, "16MiB", *nvme)) as agent:
        agent.wait_serving()
        clients = [python(CLIENT, path, str(seed), str(parts)) for seed in range(3)]
        try:
            for client in clients:
                assert client.stdout is not None
                assert client.stdout.readline() == "going\n"
            for kill in range(4):
                time.sleep(float(delays.uniform(0.2, 0.6)))  # not for order: the moment is to be a random one
                agent.kill_serving()
                agent.wait_serving(kill + 2)
                if kill == 2:
                    clients[0].kill()
            time.sleep(0.3)
            totals = np.zeros(3, np.int64)
            for client in clients:
                out, _ = client.communicate("end\n", TIMEOUT_S)
                if client is not clients[0]:
                    assert client.returncode == 0
                    totals += json.loads(out)
        finally:
            for client in clients:
                client.kill()
                client.wait(TIMEOUT_S)
                for stream in (client.stdin, client.stdout):
                    assert stream is not None
                    stream.close()
        assert (totals[:2] > 100).all(), f"nothing was really tested: {totals}"
        with AgentStore(path) as store:
            settled(store)
            size_bytes = BLOCK_BYTES // parts
            space = store.open(make_spec((size_bytes,) * parts))
            hashes = names(0, 424)
            before = store.lookup([(space, hashes)])[0] != 0
            assert np.count_nonzero(before) > 50
            agent.kill_serving()
            agent.wait_serving(6)
            reattached(store, space, hashes[before])
            after = store.lookup([(space, hashes)])[0] != 0
            # What was whole is found again, but for what background demotion had just evicted.
            assert np.count_nonzero(before & ~after) <= (8 if below else 0)
            for part in range(parts):
                into = np.zeros((len(hashes), size_bytes), np.uint8)
                job = store.load(space, hashes, Fragments.from_blocks(into), part)
                assert job.wait(TIMEOUT_S)
                good = job.status == 0
                assert np.count_nonzero(good) >= np.count_nonzero(after) - 8
                assert (into[good] == payload(hashes[good], part, size_bytes)).all()
            settled(store)
        assert agent.end() == 0


def test_removed_and_cleared_blocks_stay_away_though_they_were_leased(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with Agent(*arguments(tmp_path, "8MiB")) as agent:
        agent.wait_serving()
        with AgentStore(path) as store:
            kept, cleared = store.open(make_spec()), store.open(make_spec(model="other"))
            for space in (kept, cleared):
                assert not save(store, space, names(0, 20)).any()
            lease = store.lease([(kept, names(0, 10)), (cleared, names(0, 10))], 60.0)
            assert lease.held[0].all()
            assert store.remove(kept, names(0, 5)) == 5
            assert store.clear(cleared) == 20
            agent.kill_serving()
            reattached(store, kept, names(5, 15))
            assert not lease.release()
            assert load_checked(store, kept, names(0, 20)).tolist() == [False] * 5 + [True] * 15
            assert not store.lookup([(cleared, names(0, 20))])[0].any()
            settled(store)
            assert store.stats().tiers["dram"].blocks == 15
        assert agent.end() == 0


def test_a_block_that_lacks_a_part_is_not_found_and_its_slot_is_free(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with Agent(*arguments(tmp_path, "4MiB")) as agent:
        agent.wait_serving()
        with AgentStore(path) as store:
            space, halves = store.open(make_spec()), store.open(make_spec((BLOCK_BYTES // 2,) * 2))
            assert not save(store, space, names(0, 4)).any()
            data = payload(names(0, 6), 0, BLOCK_BYTES // 2)
            job = store.save(halves, names(0, 6), Fragments.from_blocks(data), 0)
            assert job.wait(TIMEOUT_S)
            assert job.ok()
            assert store.stats().pending_blocks == 6
            agent.kill_serving()
            reattached(store, space, names(0, 4))
            assert not store.lookup([(halves, names(0, 6))])[0].any()
            settled(store)
            assert store.stats().tiers["dram"].blocks == 4
        assert agent.end() == 0


def test_the_order_of_eviction_survives(tmp_path: Path) -> None:
    """Chains lose their tail first, the least recently used one before others, also after a restart."""
    path = str(tmp_path / "agent.sock")
    with Agent(*arguments(tmp_path, "1MiB")) as agent:  # 16 blocks; a client's pieces have one block each
        agent.wait_serving()
        with AgentStore(path) as store:
            space = store.open(make_spec())
            for first in (0, 10):
                assert not save(store, space, names(first, 6)).any()
            assert load_checked(store, space, names(0, 6)).all()
            settled(store)
            agent.kill_serving()
            reattached(store, space, names(0, 6))
            assert not save(store, space, names(20, 8)).any()  # 20 blocks for 16 slots
            assert store.match(space, names(0, 6)).length == 6
            assert store.match(space, names(20, 8)).length == 8
            assert store.lookup([(space, names(10, 6))])[0].astype(bool).tolist() == [True] * 2 + [False] * 4
        assert agent.end() == 0


WRITER = """
import sys
import numpy as np
from runtime_harness import BLOCK_BYTES, make_spec, names, payload
from tierkv.agent.client import AgentStore
from tierkv.agent.protocol import Kind

store = AgentStore(sys.argv[1])
space = store.open(make_spec())
number, status, offsets = store.submit(Kind.RESERVE, space, 0, 60.0, names(100, 4)).result(30)
assert not status.any()
connection = store.connection()
view = connection.arena.view()
print("reserved", *offsets, flush=True)
for line in sys.stdin:  # a copy that is under way for as long as the test likes
    for offset in offsets:
        view[offset : offset + BLOCK_BYTES] = bytes([int(line)]) * BLOCK_BYTES
    print("written", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_a_late_writer_reaches_only_its_own_slots(tmp_path: Path, how: int | None) -> None:
    """A client that writes on, an agent later: the slots it had reserved serve nobody until it cannot any more."""
    path = str(tmp_path / "agent.sock")
    blocks = (1 << 20) // BLOCK_BYTES
    with Agent(*arguments(tmp_path, "1MiB")) as agent:
        agent.wait_serving()
        with python(WRITER, path) as writer, AgentStore(path) as store:
            assert writer.stdin is not None
            assert writer.stdout is not None
            assert writer.stdout.readline().startswith("reserved")
            space = store.open(make_spec())
            assert not save(store, space, names(0, 4)).any()
            agent.kill_serving()
            reattached(store, space, names(0, 4))
            assert not store.lookup([(space, names(100, 4))])[0].any()  # granted, and never committed
            # All the room that there is, and more: the four slots are not in it.
            for first in range(200, 264, 8):
                save(store, space, names(first, 8))
                writer.stdin.write("7\n")
                writer.stdin.flush()
                assert writer.stdout.readline() == "written\n"
                load_checked(store, space, names(0, 4))
                load_checked(store, space, names(200, first - 192))
            dram = store.stats().tiers["dram"]
            assert dram.used_bytes == blocks * BLOCK_BYTES
            assert dram.blocks <= blocks - 4
            agent.kill_serving()  # and another agent later still
            reattached(store, space, names(256, 8))
            assert (
                store.stats().tiers["dram"].used_bytes
                == (store.stats().tiers["dram"].blocks + 4) * BLOCK_BYTES
            )
            if how is None:
                writer.stdin.close()
            else:
                writer.send_signal(how)
            writer.wait(TIMEOUT_S)
            settled(store)
            assert not save(store, space, names(300, 16)).any()
            assert store.stats().tiers["dram"].blocks == blocks
            assert load_checked(store, space, names(300, 16)).all()
        assert agent.end() == 0


def test_a_client_that_stands_still_keeps_only_its_own_slots(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with Agent(*arguments(tmp_path, "4MiB")) as agent:
        agent.wait_serving()
        with python(WRITER, path) as writer, AgentStore(path) as store:
            assert writer.stdout is not None
            assert writer.stdout.readline().startswith("reserved")
            stand_still(writer.pid)
            space = store.open(make_spec())
            assert not save(store, space, names(0, 8)).any()
            agent.kill_serving()
            reattached(store, space, names(0, 8))
            dram = store.stats().tiers["dram"]
            assert dram.used_bytes == (dram.blocks + 4) * BLOCK_BYTES
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait(TIMEOUT_S)
            settled(store)
        assert agent.end() == 0


def test_the_agent_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    with Agent(*arguments(tmp_path, "4MiB")) as agent:
        agent.wait_serving()
        serving = psutil.Process(agent.serving_pid())
        assert serving.pid != agent.process.pid
        agent.process.kill()
        serving.wait(TIMEOUT_S)
        assert not (tmp_path / "agent.sock").exists()  # it ended in order


def test_nothing_is_left_after_many_deaths(tmp_path: Path) -> None:
    """Descriptors of the supervisor, memory, and files are what they were."""
    path = str(tmp_path / "agent.sock")
    with Agent(*arguments(tmp_path, "4MiB")) as agent:
        agent.wait_serving()
        supervisor = psutil.Process(agent.process.pid)
        with AgentStore(path) as store:
            space = store.open(make_spec())
            assert not save(store, space, names(0, 8)).any()
            counts = []
            for kill in range(5):
                agent.kill_serving()
                agent.wait_serving(kill + 2)
                reattached(store, space, names(0, 8))
                eventually(lambda: len(supervisor.children()) == 1, "one child")
                counts.append((supervisor.num_fds(), psutil.Process(agent.serving_pid()).num_fds()))
            assert len(set(counts)) == 1, counts
            assert load_checked(store, space, names(0, 8)).all()
            settled(store)
        assert agent.end() == 0
    assert {file.name for file in tmp_path.iterdir()} <= {"agent.sock.lock"}
