"""Any hosts read the same batches: no row twice, none missing, and positions move between them."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from convt5 import errors
from convt5.data import data_shards
from convt5.data.counts import Counts
from convt5.data.prefetching import position, split_position

BATCH = 24


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """What `data_shards` asks of a sharding, for devices of several hosts."""

    mesh: Mesh
    spec: PartitionSpec
    hosts: int

    def devices_indices_map(self, shape):
        found = NamedSharding(self.mesh, self.spec).devices_indices_map(shape)
        per_host = self.mesh.size // self.hosts
        order = {device: i for i, device in enumerate(jax.devices())}
        return {Device(order[d], order[d] // per_host): index for d, index in found.items()}


def placed(*, hosts, data=8):
    """Eight devices on some hosts; `data` parts of each batch, which the other axis repeats."""
    mesh = Mesh(np.array(jax.devices()).reshape(data, 8 // data), ("data", "tensor"))
    return Placement(mesh, PartitionSpec("data"), hosts)


@dataclasses.dataclass(frozen=True)
class Numbered:
    """Row r of batch b of a shard holds its shard, b and r."""

    batch_size: int = BATCH
    num_epochs: int | None = None

    def build(self, *, process_index, process_count):
        return NumberedReader(process_index, self.batch_size // process_count)


class NumberedReader:
    token_bytes = None

    def __init__(self, shard, rows):
        self.shard, self.rows, self.count = shard, rows, 0

    def __next__(self):
        self.count += 1
        return {"x": np.array([(self.shard, self.count, row) for row in range(self.rows)])}

    def counts(self):
        return {"numbers": Counts(self.count, self.shard, 0, 0)}

    def get_state(self):
        return position(bytes([self.shard, self.count]))

    def set_state(self, state):
        snapshot, skip = split_position(state)
        assert snapshot[0] == self.shard
        self.count = snapshot[1] + skip


def open_hosts(monkeypatch, where, num_shards, **settings):
    opened = []
    for host in range(where.hosts):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        data = Numbered(**settings)
        opened.append(data_shards.ShardedBatches(data, where, num_shards=num_shards))
    return opened


def whole_batch(hosts):
    """Puts the rows of all hosts where they belong; rows of several hosts must be equal."""
    rows = {}
    for host in hosts:
        for number, row in zip(host.rows.numbers.tolist(), next(host)["x"].tolist(), strict=True):
            assert rows.setdefault(number, row) == row
    assert sorted(rows) == list(range(BATCH))
    return [rows[number] for number in range(BATCH)]


@settings(deadline=None)
@given(
    hosts=st.sampled_from([1, 2, 4, 8]),
    data=st.sampled_from([1, 2, 4, 8]),
    num_shards=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
)
def test_hosts_read_every_row_of_every_shard_once(hosts, data, num_shards):
    with pytest.MonkeyPatch.context() as monkeypatch:
        opened = open_hosts(monkeypatch, placed(hosts=hosts, data=data), num_shards)
        for count in (1, 2):
            expected = [
                [shard, count, row]
                for shard in range(num_shards)
                for row in range(BATCH // num_shards)
            ]
            assert whole_batch(opened) == expected


@settings(deadline=None)
@given(
    before=st.sampled_from([1, 2, 4, 8]),
    after=st.sampled_from([1, 2, 4, 8]),
    data=st.sampled_from([1, 2, 8]),
    num_shards=st.sampled_from([1, 2, 3, 8]),
)
def test_positions_saved_by_some_hosts_serve_any_others(before, after, data, num_shards):
    with pytest.MonkeyPatch.context() as monkeypatch:
        opened = open_hosts(monkeypatch, placed(hosts=before, data=data), num_shards)
        saved = {}
        for host in opened:
            state = position(split_position(host.get_state())[0], 2)  # Two batches later.
            own = host.to_save(state)
            assert not saved.keys() & own.keys()
            saved |= own
        assert sorted(saved) == list(range(num_shards))
        others = open_hosts(monkeypatch, placed(hosts=after), num_shards)
        for host in others:
            wanted = host.rows.shards(num_shards)
            host.set_state(data_shards.join_positions({shard: saved[shard] for shard in wanted}))
        assert {row[1] for row in whole_batch(others)} == {3}


@pytest.mark.parametrize(("num_epochs", "expected"), [(None, (8, 6)), (2, (2, 0))])
@pytest.mark.parametrize("hosts", [1, 4])
def test_hosts_count_every_example_once(monkeypatch, hosts, num_epochs, expected):
    """Four shards after two batches; of finite data each of them reads everything."""
    opened = open_hosts(monkeypatch, placed(hosts=hosts, data=2), 4, num_epochs=num_epochs)
    total = np.zeros(4, int)
    for index, host in enumerate(opened):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        next(host), next(host)
        total += host.counts()["numbers"]
    assert total.tolist() == [*expected, 0, 0]


def test_hosts_that_hold_the_same_rows_are_one_by_default(monkeypatch):
    (first, *_) = open_hosts(monkeypatch, placed(hosts=4, data=2), None)
    assert first.num_shards == 2
    np.testing.assert_array_equal(first.rows.numbers, np.arange(12))


def test_shards_that_cannot_give_equal_blocks_are_refused():
    with pytest.raises(errors.UserError, match=r"data_shards=5 must divide batch_size=24"):
        data_shards.ShardedBatches(Numbered(), placed(hosts=1), num_shards=5)


def test_a_batch_that_saved_shards_cannot_give_is_no_damaged_checkpoint():
    rows = data_shards.own_rows(placed(hosts=1), batch_size=24)
    with pytest.raises(errors.UserError, match="data_shards=48 must divide batch_size=24"):
        rows.shards(48)
