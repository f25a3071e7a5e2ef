"""DLRM: its published size, its arithmetic by hand, and one operator per table."""

import pytest
import torch

from fxpart.capture.inference.export import export_program
from fxpart.capture.models.dlrm import CRITEO_ROWS, dlrm
from fxpart.errors import SpecError


def test_the_tables_of_the_benchmark() -> None:
    assert len(CRITEO_ROWS) == 26
    assert sum(CRITEO_ROWS) == 187_767_399
    assert max(CRITEO_ROWS) < 40_000_000


def test_the_layers_of_the_benchmark() -> None:
    with torch.device("meta"):
        model, (dense, indices) = dlrm(7, torch.float32)
    layers = [tuple(p.shape) for p in [*model.bottom.parameters(), *model.top.parameters()]]
    # 479 = 128 + 27 * 26 / 2.
    assert [shape for shape in layers if len(shape) == 2] == [
        (512, 13), (256, 512), (128, 256),
        (1024, 479), (1024, 1024), (512, 1024), (256, 512), (1, 256),
    ]  # fmt: skip
    assert tuple(dense.shape) == (7, 13)
    assert [tuple(index.shape) for index in indices] == [(7, 1)] * 26


def test_rows_are_capped() -> None:
    with torch.device("meta"):
        model, _ = dlrm(1, torch.float32, rows=(10, 1000), max_rows=100)
    tables = [parameter.shape[0] for parameter in model.tables.parameters()]
    assert tables == [10, 100]


def test_interaction_by_hand() -> None:
    model, (dense, _) = dlrm(1, torch.float64, embedding_dim=2, rows=(3, 5), bottom=(4,), top=(6,))
    first, second = model.tables.parameters()
    indices = [torch.tensor([[0, 2]]), torch.tensor([[4, 4]])]
    seen: list[torch.Tensor] = []
    model.top.register_forward_pre_hook(lambda _, given: seen.extend(given))
    with torch.no_grad():
        click = model(dense, indices)
        a = model.bottom(dense)[0]
        b = first[0] + first[2]
        c = 2 * second[4]
    # The bottom vector itself, then each pair once: b.a, c.a, c.b.
    expected = torch.stack([a[0], a[1], b @ a, c @ a, c @ b])
    torch.testing.assert_close(seen[0][0], expected)
    assert tuple(click.shape) == (1, 1)
    assert 0 < click.item() < 1


def test_every_table_is_an_operator_with_its_own_input() -> None:
    with torch.device("meta"):
        model, args = dlrm(4, torch.float32)
    program = export_program(model, args)
    bags = [n for n in program.graph.nodes if "embedding_bag" in str(n.target)]
    assert len(bags) == 26
    assert len({bag.args[0] for bag in bags}) == 26


@pytest.mark.parametrize(
    "wrong", [{"rows": ()}, {"rows": (3, 0)}, {"pooling": 0}, {"max_rows": 0}, {"top": (0,)}]
)
def test_empty_sizes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="every size must be 1 or more"):
        dlrm(1, torch.float32, **wrong)  # type: ignore[arg-type]
