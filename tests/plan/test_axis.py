import pytest

from pipedejavu.facts import FaultsError, Record
from pipedejavu.plan import Cut, Feed, Keep, Order, Place, Reduce, Version


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        (Cut(), "whole"),
        (Cut(kind="chain"), "chain"),
        (Cut(kind="chain", stages=8), "chain(8)"),
        (Cut(kind="layout", layouts=("head", "row", "col", "row")), "head row col row"),
        (Place(), "one"),
        (Place(workers=4), "linear"),
        (Place(replicas=4), "one ×4"),
        (Place(workers=4, replicas=2), "linear ×2"),
        (Place(kind="loop", workers=4, chunks=3), "loop(3)"),
        (Place(kind="v", workers=4, chunks=2), "v"),
        (Place(kind="bidirectional", workers=4, replicas=2), "bidirectional ×2"),
        (Place(stage_replicas=(3, 1)), "linear ×3-1"),
        (Place(shards=4), "one mesh(4)"),
        (Place(workers=3, stage_shards=(4, 1, 1)), "linear mesh(4-1-1)"),
        (Place(workers=3, stage_shards=(2, 2, 2)), "linear mesh(2)"),
        (Place(stage_replicas=(1, 2), stage_shards=(4, 2)), "linear ×1-2 mesh(4-2)"),
        (Place(replicas=2, cpu_replicas=1), "one ×2 + 1 cpu"),
        (Place(replicas=2, servers=1), "one ×2 + 1 server"),
        (Place(replicas=2, servers=3), "one ×2 + 3 servers"),
        (Feed(), "microbatch"),
        (Feed(kind="share", is_controlled=True), "share*"),
        (Order(), "step"),
        (Order(kind="gpipe", recompute=1.0), "gpipe + recompute"),
        (Order(kind="1f1b", recompute=0.5, is_eager=True), "1f1b + recompute(0.5) + eager"),
        (Order(kind="1f1b", recompute_units=(0, 2)), "1f1b + recompute(2 units)"),
        (Order(kind="1f1b", recompute=1.0, checkpoints=(3, 6)), "1f1b + recompute by 2 checkpoints"),
        (Order(kind="gpipe", recompute=1.0, recomputes_early=True), "gpipe + early recompute"),
        (Order(kind="layer-major", prefetch=2), "layer-major + prefetch(2)"),
        (Version(kind="double-buffer"), "double-buffer"),
        (Reduce(), "–"),
        (Reduce(wire="server", gate="bound", bound=3), "server, bound(3)"),
        (Reduce(wire="server", gate="lock"), "server, lock"),
        (Reduce(clip="global"), "–, clip global"),
        (Keep(), "replicated"),
        (Keep(kind="host", window=2), "host(2)"),
        (Keep(kind="split", device_pieces=3), "split(3)"),
        (Keep(kind="split", places=("device", "visit", "visit", "host")), "split(1 device, 2 visit, 1 host)"),
        (Keep(kind="zero-2", activations="host"), "zero-2, activations on host"),
        (Keep(kind="zero-3", zeros=(0, 3, 1), persists=True), "zero-0-3-1, persists"),
        (Keep(versions=1), "replicated, 1 version"),
        (Keep(versions=2), "replicated, 2 versions"),
        (Keep(kind="zero-3", persists=True), "zero-3, persists"),
    ],
)
def test_an_axis_prints_as_a_short_text(axis: Record, text: str) -> None:
    assert str(axis) == text


def test_a_reduction_shows_what_is_not_usual() -> None:
    text = str(Reduce(wire="all-reduce", combiner="average", period=4, clip="delayed"))
    assert text.startswith("all-reduce")
    assert text.endswith("average, every 4, clip delayed")


@pytest.mark.parametrize(
    ("axis", "text", "fault"),
    [
        (Cut, '{"kind":"chian"}', "kind: 'chian' is not one of its values; did you mean 'chain'?"),
        (Cut, '{"stages":0}', "stages: Input should be greater than or equal to 1, found 0"),
        (Place, '{"workers":-1}', "workers: Input should be greater than or equal to 1, found -1"),
        (Place, '{"kind":"V"}', "kind: 'V' is not one of its values; did you mean 'v'?"),
        (Feed, '{"microbatches":0}', "microbatches: Input should be greater than or equal to 1, found 0"),
        (Feed, '{"microbatches":"4"}', "microbatches: Input should be a valid integer, found '4'"),
        (Order, '{"kind":"1F1B"}', "kind: '1F1B' is not one of its values; did you mean '1f1b'?"),
        (Order, '{"recompute":1.5}', "recompute: Input should be less than or equal to 1, found 1.5"),
        (Version, '{"kind":"stashed"}', "kind: 'stashed' is not one of its values; did you mean 'stash'?"),
        (Reduce, '{"wires":"server"}', "unknown key 'wires'; did you mean 'wire'?"),
        (Keep, '{"kind":"zero3"}', "kind: 'zero3' is not one of its values; did you mean 'zero-3'?"),
    ],
)
def test_a_wrong_value(axis: type[Record], text: str, fault: str) -> None:
    with pytest.raises(FaultsError) as caught:
        axis.from_json(text)
    assert caught.value.faults == (fault,)
