"""Algebra on weights."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from maths.cases import named_case

from fedhet.core import trees

F32 = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3.0)}
F64 = trees.map(torch.Tensor.double, F32)


def test_a_difference_changes_neither_tree_however_often_it_is_read() -> None:
    for new in [F32, F64]:
        with named_case(new):
            held = trees.map(torch.clone, new)
            base = trees.map(lambda t: torch.full_like(t, 0.25), new)
            difference = trees.Difference(new, base)
            for _ in range(2):
                for name in new:
                    expected = (held[name] - 0.25).double()
                    torch.testing.assert_close(difference[name], expected, rtol=0, atol=0)
                    assert difference[name].dtype == torch.float64
            assert all(
                torch.equal(new[name], held[name]) and (base[name] == 0.25).all() for name in new
            )
            assert list(difference) == ["a", "b"] and len(difference) == 2


def test_means_and_sums_do_not_change_their_trees() -> None:
    for tree in [F32, F64]:
        with named_case(tree):
            held = trees.map(torch.clone, tree)
            trees.mean([(tree, 2.0), (tree, 3.0)])
            trees.add(tree, tree, 0.5)
            trees.cast(tree, tree)
            assert all(torch.equal(tree[name], held[name]) for name in tree)


def test_a_difference_of_float32_is_exact_in_float64() -> None:
    """Therefore one client's old + (new - old) is new, bit for bit."""
    g = torch.Generator().manual_seed(0)

    def draw() -> trees.Tree:
        scales = 10 ** torch.randint(-3, 3, (1000,), generator=g)
        return {"w": torch.randn(1000, generator=g) * scales}

    old, new = draw(), draw()
    back = trees.add(trees.Difference(new, old), old)
    assert torch.equal(back["w"].float(), new["w"])


def test_the_weighted_mean_is_that_of_numpy_and_only_ratios_matter() -> None:
    g = torch.Generator().manual_seed(1)
    values, weights = torch.randn(5, 3, generator=g), [3.0, 1.0, 0.0, 2.5, 7.0]
    for scale in (1.0, 1e-9):
        mean = trees.mean(({"x": v}, scale * w) for v, w in zip(values, weights, strict=True))
        expected = np.average(values.double().numpy(), axis=0, weights=weights)
        np.testing.assert_allclose(mean["x"], expected, rtol=1e-14)


def test_sums_of_differences_are_exact_also_together_with_other_trees() -> None:
    g = torch.Generator().manual_seed(2)
    old = {"x": torch.randn(4, generator=g)}
    news = torch.randn(3, 4, generator=g)
    weights = [2.0, 0.5, 3.0]
    total = trees.Sum()
    for new, weight in zip(news, weights, strict=True):
        total.add(trees.Difference({"x": new}, old), weight)
    expected = (news.double() - old["x"]).numpy()
    np.testing.assert_allclose(total.tree["x"], np.tensordot(weights, expected, 1), rtol=1e-13)
    mean = np.average(expected, axis=0, weights=weights)
    np.testing.assert_allclose(total.mean()["x"], mean, rtol=1e-13)
    total.add(trees.Difference({"x": news[0]}, {"x": news[1]}), 1.5)  # from another old tree
    total.add({"x": news[2]}, 0.5)
    others = [(news[0].double() - news[1]).numpy(), news[2].double().numpy()]
    expected = np.concatenate([expected, others])
    weights += [1.5, 0.5]
    mean = np.average(expected, axis=0, weights=weights)
    np.testing.assert_allclose(total.mean()["x"], mean, rtol=1e-12)
    np.testing.assert_allclose(total.tree["x"], np.tensordot(weights, expected, 1), rtol=1e-12)


def test_the_mean_of_nothing_but_empty_trees_is_empty() -> None:
    assert trees.mean([({}, 1.0), ({}, 2.0)]) == {}


def test_a_mean_can_reuse_the_memory_of_its_sum() -> None:
    total = trees.Sum()
    total.add(F32, 2.0)
    address = total.tree["a"].data_ptr()
    kept = total.mean()
    reused = total.mean(reuse=True)
    assert kept["a"].data_ptr() != address == reused["a"].data_ptr()
    assert all(torch.equal(kept[name], reused[name]) for name in F32)


def test_sums_do_not_depend_on_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a client's tensor has another memory layout, as with channels_last."""
    g = torch.Generator().manual_seed(3)
    weights = (1.0, 0.3, 2.0, 0.7, 5.0)
    values = [{"x": x, "y": x[0].contiguous()} for x in torch.randn(5, 2, 3, 4, 4, generator=g)]
    layouts = [{**v, "x": v["x"].to(memory_format=torch.channels_last)} for v in values]
    whole = trees.mean(zip(values, weights, strict=True))
    monkeypatch.setattr(trees, "SUM_BLOCK", 7)
    blocks = trees.mean(zip(layouts, weights, strict=True))
    assert all(torch.equal(blocks[name], whole[name]) for name in whole)


def test_a_mean_needs_a_positive_total() -> None:
    with pytest.raises(ValueError, match="positive total weight"):
        trees.mean((F32, w) for w in (0.0, 0.0))


def test_a_negative_or_infinite_weight_is_refused() -> None:
    """Also if the total would be positive."""
    for bad in [-1.0, -1e-300, float("nan"), float("inf")]:
        with named_case(bad), pytest.raises(ValueError, match=f"weight {bad}; "):
            trees.mean((F32, w) for w in (2.0, bad))


def test_a_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="positive total weight"):
        trees.mean([])


def test_first_nonfinite_returns_the_tensors_name() -> None:
    for bad in [float("nan"), float("inf"), -float("inf")]:
        with named_case(bad):
            huge = torch.full((4,), 3e38)  # finite, though its sum is not
            counter = torch.tensor(5)
            assert trees.first_nonfinite({"huge": huge, "n": counter}) is None
            assert (
                trees.first_nonfinite({"fine": huge, "n": counter, "bad": torch.tensor([1.0, bad])})
                == "bad"
            )


def test_the_hash_is_over_slot_name_dtype_shape_and_bytes() -> None:
    """Computed by hand, so that the hash means the same in every version."""
    h = hashlib.sha256()
    for slot, name, dtype, shape, content in [
        ("density", "v", "float64", "(2,)", np.array([1.0, 2.0]).tobytes()),
        ("model", "a", "int64", "()", np.array(3).tobytes()),
        ("model", "w", "float32", "(1, 2)", np.array([[1, 2]], dtype=np.float32).tobytes()),
    ]:
        h.update(f"{slot}|{name}|{dtype}|{shape}|".encode() + content)
    density = {"v": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    slots = {"model": {"w": torch.tensor([[1.0, 2.0]]), "a": torch.tensor(3)}, "density": density}
    assert trees.sha256(slots) == h.hexdigest()


def test_the_hash_depends_on_everything_but_the_order() -> None:
    w = torch.tensor([1.0, 2.0, 3.0, 4.0])
    variants = [
        {"model": {"w": w}},
        {"model": {"v": w}},
        {"other": {"w": w}},
        {"model": {"w": w.reshape(2, 2)}},
        {"model": {"w": -w}},
        {"model": {"w": w.double()}},
        {"model": {"w": w.view(torch.int32)}},
        {"model": {"w": w}, "empty": {"w": w[:0]}},
    ]
    hashes = [trees.sha256(slots) for slots in variants]
    assert all(x != y for x, y in itertools.combinations(hashes, 2))
    assert trees.sha256({"model": {"x": w, "y": -w}}) == trees.sha256({"model": {"y": -w, "x": w}})
    strided = torch.stack([w, w], 1)[:, 0]
    assert trees.sha256({"model": {"w": strided}}) == hashes[0]
