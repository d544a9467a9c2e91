"""Placement: every layer once, in order, within memory, and never on another device than the keys and values it reads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.backends.devices import Device
from onedraw.backends.placement import StageLoads, legal_cuts, nearest_cuts, place_layers
from onedraw.errors import BadSetting, OutOfMemory
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, RopeSpec
from tests.support.tiny_modern import spec


def layers_with_sources(sources: list[int | None]) -> list[LayerSpec]:
    def mixer(source: int | None) -> AttentionSpec:
        return AttentionSpec(heads=1, kv_heads=1, head_dim=8, rope=RopeSpec(1e4, 8), scale=1.0, reuses=source)

    return [LayerSpec(mixer(source), MlpSpec(8)) for source in sources]


def machine(*memories: int | None) -> list[Device]:
    return [Device(f"cuda:{i}", "cuda", "sm90", memory) for i, memory in enumerate(memories)]


@st.composite
def models(draw: st.DrawFn) -> tuple[StageLoads, list[LayerSpec]]:
    count = draw(st.integers(1, 12))
    sources = [draw(st.one_of(st.none(), st.integers(0, i - 1))) if i and draw(st.booleans()) else None for i in range(count)]
    sizes = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    loads = StageLoads(tuple(sizes), draw(st.integers(0, 60)), draw(st.integers(0, 60)), draw(st.integers(0, 5)))
    return loads, layers_with_sources(sources)


def every_placement(cuts: tuple[int, ...], total: int, count: int) -> list[tuple[range, ...]]:
    found = []
    for selected in itertools.combinations(cuts, count - 1):
        edges = (0, *selected, total)
        found.append(tuple(range(a, b) for a, b in itertools.pairwise(edges)))
    return found


@given(models())
def test_a_cut_is_legal_if_no_later_layer_reads_keys_from_before_it(model: tuple[StageLoads, list[LayerSpec]]) -> None:
    layers = model[1]
    for cut in range(1, len(layers)):
        free = all(layer.attention.reuses is None or layer.attention.reuses >= cut for layer in layers[cut:])
        assert (cut in legal_cuts(layers)) == free


@given(models(), st.lists(st.one_of(st.none(), st.integers(1, 400)), min_size=1, max_size=4), st.integers(0, 3))
def test_auto_places_every_layer_once_in_order_within_memory(
    model: tuple[StageLoads, list[LayerSpec]], memories: list[int | None], host: int
) -> None:
    loads, layers = model
    cuts, devices = legal_cuts(layers), machine(*memories)
    devices[host : host + 1] = [Device("cpu", "cpu", memory=m) for m in memories[host : host + 1]]
    possible = every_placement(cuts, len(layers), len(devices))
    fitting = [p for p in possible if all(m is None or loads.of(r) <= m for r, m in zip(p, memories, strict=True))]
    try:
        ranges = place_layers(loads, devices, cuts=cuts)
    except BadSetting:
        assert not possible
        return
    except OutOfMemory:
        assert not fitting or None in memories  # unknown memory counts as the largest known one
        return
    assert ranges in fitting
    assert [i for layers_ in ranges for i in layers_] == list(range(len(layers)))
    if None not in memories:
        assert _cost(loads, ranges, devices) == min(_cost(loads, p, devices) for p in fitting)


def _cost(loads: StageLoads, ranges: tuple[range, ...], devices: list[Device]) -> tuple[int, float]:
    """Bytes on a CPU beside an accelerator, and the highest utilization of a device."""
    slow = sum(loads.of(r) for r, d in zip(ranges, devices, strict=True) if d.kind == "cpu") if len(devices) > 1 else 0
    return slow, max(loads.of(r) / (d.memory or 1) for r, d in zip(ranges, devices, strict=True))


@given(models(), st.integers(1, 4), st.data())
def test_an_explicit_split_is_used_or_rejected_with_the_nearest_legal_one(
    model: tuple[StageLoads, list[LayerSpec]], count: int, data: st.DataObject
) -> None:
    loads, layers = model
    total, cuts = len(layers), legal_cuts(layers)
    if count > len(cuts) + 1:
        return
    wanted = sorted(data.draw(st.lists(st.integers(1, total), min_size=count - 1, max_size=count - 1)))
    counts = [b - a for a, b in itertools.pairwise((0, *wanted, total))]
    split = ",".join(map(str, counts))
    devices = machine(*[None] * count)
    legal = all(cut in cuts for cut in wanted) and len(set(wanted)) == len(wanted)
    if legal:
        assert [len(r) for r in place_layers(loads, devices, cuts=cuts, split=split)] == counts
        return
    with pytest.raises(BadSetting) as error:
        place_layers(loads, devices, cuts=cuts, split=split)
    offered = str(error.value).rsplit(" ", 1)[1]
    sizes = [len(r) for r in place_layers(loads, devices, cuts=cuts, split=offered)]
    distance = sum(abs(a - b) for a, b in zip(itertools.accumulate(sizes[:-1]), wanted))
    assert distance == min(sum(abs(r.start - a) for r, a in zip(p[1:], wanted)) for p in every_placement(cuts, total, count))


EVEN = StageLoads((10,) * 32)
CUTS = tuple(range(1, 32))


def test_shares_and_layer_counts_give_the_same_split() -> None:
    devices = machine(None, None)
    expected = (range(24), range(24, 32))
    assert (
        place_layers(EVEN, devices, cuts=CUTS, split="24,8")
        == place_layers(EVEN, devices, cuts=CUTS, split="0.75,0.25")
        == expected
    )


def test_auto_follows_the_memory_of_the_devices() -> None:
    assert [len(r) for r in place_layers(EVEN, machine(900, 300), cuts=CUTS)] == [24, 8]
    assert [len(r) for r in place_layers(EVEN, machine(None, None), cuts=CUTS)] == [16, 16]


def test_a_cpu_gets_the_layers_that_do_not_fit_on_accelerators() -> None:
    devices = [Device("cuda:0", "cuda", "sm90", 200), Device("cpu", "cpu", memory=10**6)]
    assert [len(r) for r in place_layers(EVEN, devices, cuts=CUTS)] == [20, 12]
    roomy = [Device("cuda:0", "cuda", "sm90", 10**6), devices[1]]
    assert [len(r) for r in place_layers(EVEN, roomy, cuts=CUTS)] == [31, 1]


def test_the_head_counts_on_the_last_device() -> None:
    assert [len(r) for r in place_layers(StageLoads((10,) * 32, last=80), machine(400, 400), cuts=CUTS)] == [20, 12]


def test_the_ranges_of_a_device_named_twice_are_added_up() -> None:
    twice = [Device("cuda:0", "cuda", memory=300), Device("cuda:0", "cuda", memory=300)]
    with pytest.raises(OutOfMemory, match="20 too many"):
        place_layers(EVEN, twice, cuts=CUTS)
    hypothetical = [Device("cuda/300", "cuda", memory=300)] * 2  # two devices with the same description
    assert [len(r) for r in place_layers(EVEN, hypothetical, cuts=CUTS)] == [16, 16]


def test_cores_of_one_machine_share_one_memory() -> None:
    halves = [Device(f"cpu:{core}", "cpu", memory=10, cores=(core,)) for core in (0, 1)]
    with pytest.raises(OutOfMemory, match="layers 0–5, 6–11 need 12 bytes and cpu:0 has 10"):
        place_layers(StageLoads((1,) * 12), halves, cuts=range(1, 12))
    alike = [Device("cpu/10MiB", "cpu", memory=10)] * 2
    assert place_layers(StageLoads((1,) * 12), alike, cuts=range(1, 12)) == (range(6), range(6, 12))


def test_uneven_splits_drop_no_layer() -> None:
    """Another server lost two of 61 layers when it split them over three devices."""
    ranges = place_layers(StageLoads((7,) * 61), machine(None, None, None), cuts=tuple(range(1, 61)))
    assert [i for r in ranges for i in r] == list(range(61))


def test_gemma_is_never_cut_between_a_layer_and_the_keys_it_reads() -> None:
    assert legal_cuts(spec("gemma4_e4b").layers) == (1, 2)
    assert legal_cuts(spec("gemma4_e2b").layers) == (1,)
    assert legal_cuts(spec("gemma4_31b").layers) == (1, 2, 3, 4, 5)
    with pytest.raises(BadSetting, match=r"layers after 3 read keys .* nearest legal split is 1,5"):
        place_layers(StageLoads((1,) * 6), machine(None, None), cuts=(1,), split="3,3")


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("24,9", "does not place 32 layers.* is 24,8"),
        ("32,0", "does not place 32 layers.* is 31,1"),
        ("24", "1 parts for 2 devices"),
        ("a,b", "neither auto, layers"),
        ("0.9,0.9", "add up to 1"),
        ("1.5,-0.5", "add up to 1"),
    ],
)
def test_an_invalid_split_is_rejected(split: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        place_layers(EVEN, machine(None, None), cuts=CUTS, split=split)


def test_more_devices_than_parts_are_rejected() -> None:
    with pytest.raises(BadSetting, match="can be cut into at most 2 parts; name fewer"):
        place_layers(StageLoads((1,) * 6), machine(None, None, None), cuts=(1,))


def test_nearest_cuts_are_increasing() -> None:
    assert nearest_cuts([3.0, 3.0], (2, 4, 9)) == (2, 4)
