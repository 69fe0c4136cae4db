from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from laminar.errors import StorageError, VersionGone, WeightsError
from laminar.types import SlotRef, Version
from laminar.weights import Layout, NoFreeSlot, Reclaimed, SlotStore, VersionRecord, store
from tests.weights.conftest import GOLDEN, SHAPES, Machine, make_tensors

V0, V1, V2, V3 = (Version(0, number) for number in range(4))


def empty_like(layout: Layout) -> dict[str, torch.Tensor]:
    return {entry.name: torch.empty(entry.shape, dtype=layout.torch_dtype) for entry in layout}


def held(machine: Machine) -> set[Version]:
    """Versions in slots, shown or not."""
    states = [slot.read() for slot in machine.store.slots]
    return {state.version for state in states if state.state in ("written", "whole")}


# ---------------------------------------------------------------- a version's way


@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("published", ["fp32", "bf16"])
def test_weights_arrive_as_they_were_published(tmp_path: Path, trained: torch.dtype, published: str) -> None:
    """Faults 22 and 25: every parameter is compared, at every station of its way."""
    machine = Machine(tmp_path, published)
    weights = make_tensors(7, trained)
    expected = {name: tensor.to(machine.layout.torch_dtype) for name, tensor in weights.items()}

    result = machine.store.publish(V1, reversed(weights.items()), GOLDEN)
    assert machine.store.newest() is None, "not shown before the relay has checked it"
    assert result.fingerprint == machine.store.digest_only(weights.items())
    assert result.reclaimed is None
    assert result.stall_s > 0
    machine.log.append(VersionRecord(V1, result.fingerprint))
    assert machine.relay.step()

    ref = machine.store.newest()
    assert ref == machine.store.find(V1)
    assert ref == SlotRef(str(machine.store.slots[result.slot].path), V1, result.fingerprint, published)
    with machine.store.lease(ref) as lease:
        manifest = lease.manifest
        assert (manifest.version, manifest.golden, manifest.digests) == (V1, tuple(GOLDEN), result.digests)
        arrived = empty_like(machine.layout)
        lease.copy_into(arrived)
        views = dict(lease.tensors())
        assert list(views) == list(SHAPES)
        for name, tensor in expected.items():
            assert torch.equal(arrived[name], tensor)
            assert torch.equal(views[name], tensor)
    with safe_open(ref.path, framework="pt") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in expected.items()
        }


def test_copy_into_another_dtype_and_into_parts_of_fused_tensors(machine: Machine) -> None:
    """An engine that fuses projections hands out slices of its own tensors."""
    machine.publish(3)
    ref = machine.store.newest()
    assert ref is not None
    fused = torch.zeros(66, 16)
    dest = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    dest |= {"embed.weight": fused[:50], "layers.0.q.weight": fused[50:]}
    with machine.store.lease(ref) as lease:
        lease.copy_into(dest)
    weights = make_tensors(3)
    assert torch.equal(fused, torch.cat([weights["embed.weight"], weights["layers.0.q.weight"]]))
    assert torch.equal(dest["layers.0.norm"], weights["layers.0.norm"].double())


def test_a_reader_that_writes_to_its_views_hurts_nobody(machine: Machine) -> None:
    """Invariant 6 of docs/architecture.md."""
    machine.publish(1)
    ref = machine.store.newest()
    assert ref is not None
    with machine.store.lease(ref) as lease:
        for _, view in lease.tensors():
            view.zero_()
        lease.copy_into(empty_like(machine.layout))
        assert any(view.any() for _, view in lease.tensors())


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if torch.Size(shape).numel()])
def test_one_flipped_bit_is_found_and_named_by_the_reader(machine: Machine, name: str) -> None:
    """Faults 22 and 24; invariant 4 of docs/architecture.md: who says "I hold v" has the fingerprint of v."""
    machine.publish(1)
    ref = machine.store.newest()
    assert ref is not None
    machine.corrupt(0, name)
    with machine.store.lease(ref) as lease:
        with pytest.raises(WeightsError, match=f"1 tensors differ, the first is '{name}'"):
            lease.copy_into(empty_like(machine.layout))
        with pytest.raises(WeightsError, match=f"'{name}'"):
            list(lease.tensors())
        assert len(list(lease.tensors(verify=False))) == len(SHAPES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "1 tensors of the layout are missing, the first is 'scale'"),
        ({"surplus": torch.zeros(2)}, "'surplus'.*no such tensor"),
        ({"scale": torch.zeros(2)}, r"'scale' \(shape \[2\]\).*shape \[\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_the_slot_is_free_again(
    machine: Machine, change: dict[str, torch.Tensor | None], message: str
) -> None:
    """Faults 24 and 25: a version whose write failed is nowhere."""
    weights = {name: value for name, value in (make_tensors(1) | change).items() if value is not None}
    for publish in (
        lambda: machine.store.publish(V1, weights.items(), []),
        lambda: machine.store.digest_only(weights.items()),
    ):
        with pytest.raises(WeightsError, match=message):
            publish()
    assert machine.store.num_free() == len(machine.store.slots)
    assert machine.store.newest() is None
    assert not machine.relay.step()
    assert machine.publish(1) == V1


def test_a_tensor_given_twice_is_refused(machine: Machine) -> None:
    with pytest.raises(WeightsError, match=r"'scale' \(twice\)"):
        machine.store.publish(V1, [("scale", torch.zeros(())), ("scale", torch.zeros(()))], [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "'scale'.*the destination has nothing"),
        ({"none": None}, "'none'.*the destination has nothing"),
        ({"lm_head.weight": torch.zeros(2)}, "no weights for 1 tensors of the destination.*'lm_head.weight'"),
        ({"layers.0.norm": torch.zeros(17)}, r"'layers.0.norm' has shape \[16\].*\[17\]"),
    ],
)
def test_a_destination_that_does_not_fit_is_not_touched(
    machine: Machine, change: dict[str, torch.Tensor | None], message: str
) -> None:
    """Fault 25: no parameter is silently left as it was."""
    machine.publish(1)
    ref = machine.store.newest()
    assert ref is not None
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    dest = {name: value for name, value in (zeros | change).items() if value is not None}
    with machine.store.lease(ref) as lease, pytest.raises(WeightsError, match=message):
        lease.copy_into(dest)
    assert not any(tensor.any() for tensor in dest.values())


def test_publishing_again_compares_and_writes_nothing(machine: Machine) -> None:
    """A replayed version keeps its lineage if it came out the same, else it needs another."""
    machine.publish(1)
    before = machine.store.slots[0].path.read_bytes()
    again = machine.store.publish(V1, make_tensors(1).items(), GOLDEN)
    assert again.fingerprint == machine.store.digest_only(make_tensors(1).items())
    assert (again.slot, again.reclaimed) == (0, None)
    with pytest.raises(WeightsError, match="new lineage"):
        machine.store.publish(V1, make_tensors(2).items(), GOLDEN)
    assert machine.store.slots[0].path.read_bytes() == before
    assert machine.publish(1, lineage=1) == Version(1, 1)
    newest = machine.store.newest()
    assert newest is not None and newest.version == Version(1, 1)


# ---------------------------------------------------------------- leases and reclaiming


def test_what_a_dead_trainer_left_without_a_record_is_written_anew(machine: Machine) -> None:
    """It may have died between the copy and the record; its successor's weights of that number may be others."""
    version = Version(0, 1)
    machine.store.publish(version, make_tensors(7).items(), GOLDEN)
    machine.relay.step()
    machine.publish(1)
    assert machine.store.whole() == (version,)
    ref = machine.store.find(version)
    assert ref is not None and ref.fingerprint == machine.store.digest_only(make_tensors(1).items())


def test_readers_beyond_the_places_wait_for_one(tmp_path: Path) -> None:
    """A run may be scaled up: the trainer's slots stay free whoever reads."""
    machine = Machine(tmp_path, num_slots=6)
    machine.publish(1)
    ref = machine.store.newest()
    assert ref is not None
    events: list[str] = []

    def read() -> None:
        with machine.store.lease(ref):
            events.append("third")

    with machine.store.lease(ref):
        with machine.store.lease(ref):
            third = threading.Thread(target=read)
            third.start()
            events.append("second ends")
        third.join(timeout=30)
    assert events == ["second ends", "third"]


def test_a_leased_version_keeps_its_bytes_while_others_come_and_go(machine: Machine) -> None:
    """Invariants 5 and 6 of docs/architecture.md: publishing goes on, and who reads is never overwritten."""
    machine.publish(0)
    ref = machine.store.find(V0)
    assert ref is not None
    reader = SlotStore.open(machine.store.folder)
    assert reader is not None
    with reader.lease(ref) as lease:
        for number in range(1, 20):
            machine.publish(number)
            assert machine.store.find(V0) == ref
            lease.copy_into(arrived := empty_like(machine.layout))
            assert torch.equal(arrived["embed.weight"], make_tensors(0)["embed.weight"])
    machine.publish(20)
    assert machine.store.find(V0) is None
    with pytest.raises(VersionGone, match="version 0"), reader.lease(ref):
        pass


def test_memory_is_bounded_over_a_hundred_versions(machine: Machine) -> None:
    """Fault 37: versions are bounded by the ring, in files and in bytes."""

    def usage() -> tuple[int, int]:
        files = list(machine.store.folder.iterdir())
        slots = [file for file in files if file.suffix == ".safetensors"]
        return len(files), sum(file.stat().st_blocks for file in slots)

    for number in range(5):
        machine.publish(number)
    full = usage()
    for number in range(5, 105):
        machine.publish(number)
        assert usage() == full
    assert machine.store.whole() == tuple(Version(0, number) for number in range(100, 105))


def test_the_order_in_which_slots_are_taken(tmp_path: Path) -> None:
    """Free ones first, then versions nobody needs from the oldest, then kept ones, with an event."""
    machine = Machine(tmp_path, num_slots=4)
    for version in (V0, V1, V2, V3):
        machine.publish(version.number)
    machine.store.keep([V0, V2])

    taken = [machine.store.publish(Version(0, number), make_tensors(number).items(), []) for number in (10, 11, 12)]
    # 3 is the newest whole version (10 and 11 have not been checked); 10 is not needed and newer than 1.
    assert [result.reclaimed for result in taken] == [
        Reclaimed(V1, was_kept=False),
        Reclaimed(Version(0, 10), was_kept=False),
        Reclaimed(Version(0, 11), was_kept=False),
    ]
    machine.store.keep([V0, V2, Version(0, 12)])
    assert machine.store.publish(Version(0, 13), make_tensors(13).items(), []).reclaimed == Reclaimed(V0, was_kept=True)
    assert held(machine) == {V2, V3, Version(0, 12), Version(0, 13)}


def test_a_retired_lineage_goes_first(tmp_path: Path) -> None:
    machine = Machine(tmp_path, num_slots=3)
    machine.publish(9)
    machine.publish(3, lineage=1)
    machine.publish(4, lineage=1)
    machine.publish(5, lineage=1)
    assert machine.store.whole() == (Version(1, 3), Version(1, 4), Version(1, 5))


def test_without_a_slot_publishing_fails_at_once_and_breaks_nothing(tmp_path: Path) -> None:
    """Invariant 5 of docs/architecture.md: it never waits, not even when the ring is too small for its readers."""
    machine = Machine(tmp_path, num_slots=2)
    machine.publish(0)
    machine.publish(1)
    ref = machine.store.find(V0)
    assert ref is not None
    with machine.store.lease(ref), pytest.raises(NoFreeSlot, match="none of the 2 weight slots"):
        machine.publish(2)
    assert machine.store.whole() == (V0, V1)
    assert machine.publish(2) == V2


def test_a_version_given_up_between_find_and_lease_is_gone(machine: Machine) -> None:
    machine.publish(0)
    ref = machine.store.newest()
    assert ref is not None
    for number in range(1, 6):
        machine.publish(number)
    with pytest.raises(VersionGone), machine.store.lease(ref):
        pass


def test_a_reference_to_somewhere_else_is_refused(machine: Machine, tmp_path: Path) -> None:
    machine.publish(0)
    with (
        pytest.raises(WeightsError, match="not a slot of"),
        machine.store.lease(SlotRef(str(tmp_path / "slot-00.safetensors"), V0, "", "fp32")),
    ):
        pass


def test_num_free_leaves_out_the_newest_and_the_kept(machine: Machine) -> None:
    assert machine.store.num_free() == 5
    for number in range(3):
        machine.publish(number)
    assert machine.store.num_free() == 4
    machine.store.keep([V0, Version(0, 99)])
    assert machine.store.kept() == {V0, Version(0, 99)}
    assert machine.store.num_free() == 3


# ---------------------------------------------------------------- the folder


def test_a_store_is_made_once_and_found_by_all(machine: Machine) -> None:
    machine.publish(1)
    again = SlotStore.create_or_open(machine.store.folder, machine.layout, 5)
    opened = SlotStore.open(machine.store.folder)
    assert opened is not None
    assert again.newest() == opened.newest() == machine.store.newest()
    assert again.whole() == (V1,)
    assert opened.layout == machine.layout


@pytest.mark.parametrize(("dtype", "num_slots"), [("bf16", 5), ("fp32", 6)])
def test_a_folder_of_another_form_is_refused(machine: Machine, dtype: str, num_slots: int) -> None:
    with pytest.raises(StorageError, match="another model or configuration"):
        SlotStore.create_or_open(machine.store.folder, Layout.of(SHAPES.items(), dtype), num_slots)


def test_opening_before_anything_is_there(tmp_path: Path) -> None:
    assert SlotStore.open(tmp_path / "slots") is None
    SlotStore.destroy(tmp_path / "slots")


def test_a_creation_that_died_half_way_is_done_again(machine: Machine) -> None:
    machine.publish(1)
    (machine.store.folder / "layout.json").unlink()
    again = SlotStore.create_or_open(machine.store.folder, machine.layout, 5)
    assert again.newest() is None
    assert again.num_free() == 5


def test_destroy_leaves_nothing(machine: Machine) -> None:
    machine.publish(1)
    SlotStore.destroy(machine.store.folder)
    assert not machine.store.folder.exists()


def test_too_little_room_is_one_clear_error_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 6 of docs/architecture.md: memory is checked at the start, not when it runs out."""
    layout = Layout.of({"a": (1000, 1000)}.items(), "fp32")
    monkeypatch.setattr(store, "_free_bytes", lambda folder: 7_999_999)
    with pytest.raises(StorageError) as caught:
        SlotStore.create_or_open(tmp_path / "slots", layout, 2)
    for part in ("0.008 GB free (2 slots of 0.004 GB)", "rollout.replicas", "relay.spare_slots", "rollout.dtype"):
        assert part in str(caught.value)
    assert SlotStore.open(tmp_path / "slots") is None


def test_room_that_vanishes_later_is_a_clear_error_and_not_a_crash(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    machine.store.slots[0].create()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match="no room is left for weights"):
            machine.publish(1)
        with pytest.raises(StorageError, match="no room is left for weights"):
            machine.store.prefault()
    assert machine.publish(1) == V1


@pytest.mark.parametrize("writable", [True, False])
def test_prefaulting_changes_nothing_and_ends(machine: Machine, writable: bool) -> None:
    machine.publish(1)
    before = machine.store.slots[0].path.read_bytes()
    other = SlotStore.open(machine.store.folder, writable=writable)
    assert other is not None
    assert [other.prefault() for _ in range(7)] == [True] * 5 + [False] * 2
    assert machine.store.slots[0].path.read_bytes() == before
    if writable:
        assert all(slot.path.stat().st_blocks * 512 >= machine.layout.size for slot in other.slots)


@pytest.mark.parametrize(("dtype", "kind"), [("fp32", np.float32), ("bf16", np.uint16)])
def test_arrays_are_published_like_tensors(tmp_path: Path, dtype: str, kind: type[np.generic]) -> None:
    """The published form as it is: the same bytes, the same fingerprint."""
    tensors = {"a": torch.arange(70_000, dtype=torch.float32).view(7, -1), "b": torch.ones(3)}
    form = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    arrays = {name: tensor.to(form).view(torch.uint8).numpy().view(kind) for name, tensor in tensors.items()}
    layout = Layout.of([(name, tensor.shape) for name, tensor in tensors.items()], dtype)
    slots = SlotStore.create_or_open(tmp_path / "slots", layout, 2)
    published = slots.publish(Version(0, 0), arrays.items(), ())
    assert published.fingerprint == slots.digest_only(tensors.items()) == slots.digest_only(arrays.items())
    with pytest.raises(WeightsError, match="float64"):
        slots.digest_only((name, array.astype(np.float64)) for name, array in arrays.items())


def test_slots_and_relays_need_no_torch() -> None:
    """Processes without a model start quickly and small."""
    modules = "laminar.weights.publisher, laminar.weights.relay"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)})
