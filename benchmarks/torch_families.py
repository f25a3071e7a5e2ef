"""Families of traceable modules by size, on which both sides are run.

The regular families grow one block at a time, so that running times can be fitted. The random ones
vary everything that a partitioner looks at: branches, joins, widths, parameters read by
``get_attr``, keyword arguments, methods, unread inputs. All weights are seeded.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = [
    "FAMILIES",
    "OPERATORS_PER_BLOCK",
    "Built",
    "chain",
    "inception",
    "random_module",
    "random_sparse",
    "residual",
    "transformer",
]

WIDTH = 64
ROWS = 4
TOKENS = 8

Built = tuple[nn.Module, tuple[Tensor, ...]]
"""A module and example inputs for it."""


class Residual(nn.Module):
    """Linear, ReLU, Linear, add: 4 operators, one diamond."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, WIDTH) from the same shape."""
        out: Tensor = x + self.down(self.relu(self.up(x)))
        return out


class Inception(nn.Module):
    """Four linear branches and their concatenation: 5 operators, four paths."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH // 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, WIDTH) from the same shape."""
        return torch.cat([branch(x) for branch in self.branches], dim=-1)


class TransformerBlock(nn.Module):
    """Pre-norm attention with one head, then an MLP: 15 operators.

    The scale of the scores is assumed to be folded into the query weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.softmax, self.gelu = nn.Softmax(dim=-1), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, tokens, WIDTH) from the same shape."""
        normed = self.norm_1(x)
        scores = torch.matmul(self.query(normed), self.key(normed).transpose(1, 2))
        x = x + self.out(torch.matmul(self.softmax(scores), self.value(normed)))
        out: Tensor = x + self.down(self.gelu(self.up(self.norm_2(x))))
        return out


def chain(blocks: int) -> Built:
    """Return a chain of `blocks` linear layers: one operator per block."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(blocks)])
    return module, (torch.randn(ROWS, WIDTH),)


def residual(blocks: int) -> Built:
    """Return a chain of `blocks` residual blocks: 4 operators and one diamond per block."""
    torch.manual_seed(0)
    return nn.Sequential(*[Residual() for _ in range(blocks)]), (torch.randn(ROWS, WIDTH),)


def inception(blocks: int) -> Built:
    """Return a chain of `blocks` four-way branches: 5 operators per block."""
    torch.manual_seed(0)
    return nn.Sequential(*[Inception() for _ in range(blocks)]), (torch.randn(ROWS, WIDTH),)


def transformer(blocks: int) -> Built:
    """Return a chain of `blocks` transformer blocks: 15 operators per block."""
    torch.manual_seed(0)
    module = nn.Sequential(*[TransformerBlock() for _ in range(blocks)])
    return module, (torch.randn(1, TOKENS, WIDTH),)


FAMILIES: dict[str, Callable[[int], Built]] = {
    "chain": chain,
    "residual": residual,
    "inception": inception,
    "transformer": transformer,
}

OPERATORS_PER_BLOCK = {"chain": 1, "residual": 4, "inception": 5, "transformer": 15}


class RandomModule(nn.Module):
    """A directed acyclic graph of `ops` operators, drawn from a seed.

    It has three inputs, some possibly unread; every value that no operator reads is an output.
    """

    def __init__(self, seed: int, ops: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.layers = nn.ModuleDict()
        self.steps: list[tuple[str, str, int, int]] = []
        """Kind, name of layer or parameter, numbers of the first and second value."""
        self.widths = [8, 16, 16]
        self.depth = rng.choice((0.3, 0.6, 0.9))
        """Probability of reading the newest value: low makes wide graphs, high deep ones."""
        while len(self.steps) < ops:
            self._draw(rng)
        self.tupled = rng.random() < 0.3

    def _draw(self, rng: random.Random) -> None:
        """Append one operator; the widths of values are tracked so that every operator is valid."""
        values = len(self.widths)
        first = values - 1 if values > 3 and rng.random() < self.depth else rng.randrange(values)
        width, name = self.widths[first], f"op{len(self.steps)}"
        equal = [v for v in range(values) if self.widths[v] == width and v != first]
        kind = rng.choice(("linear", "linear", "linear", "relu", "method", "add", "cat", "param"))
        if (kind == "add" and not equal) or (kind == "cat" and width > 64):
            kind = "linear"
        second = rng.choice(equal) if kind == "add" else rng.randrange(values)
        if kind == "linear":
            out_width = rng.choice((8, 16, 32, 64))
            self.layers[name] = nn.Linear(width, out_width)
        elif kind == "relu":
            out_width, self.layers[name] = width, nn.ReLU()
        elif kind == "param":
            out_width = width
            # A parameter may be read twice: by this operator and by later ones of the same width.
            shared = [n for n, p in self.named_parameters(recurse=False) if p.shape[0] == width]
            if shared and rng.random() < 0.5:
                name = rng.choice(shared)
            else:
                self.register_parameter(name, nn.Parameter(torch.randn(width)))
        else:
            out_width = width + self.widths[second] if kind == "cat" else width
        self.steps.append((kind, name, first, second))
        self.widths.append(out_width)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the unread values: x is (rows, 8), y and z (rows, 16)."""
        values, read = [x, y, z], set()
        for number, (kind, name, first, second) in enumerate(self.steps):
            a, b = values[first], values[second]
            read.add(first)
            if kind in ("linear", "relu"):
                values.append(self.layers[name](a))
            elif kind == "method":
                values.append(a.tanh() if number % 2 else a.sigmoid())
            elif kind == "param":
                values.append(torch.mul(a, getattr(self, name)))
            else:
                read.add(second)
                by_keyword = number % 3 == 0
                if kind == "add":
                    values.append(torch.add(input=a, other=b) if by_keyword else a + b)
                else:
                    values.append(torch.cat(tensors=[a, b], dim=1))
        leaves = [v for i, v in enumerate(values) if i not in read and i > 2]
        return tuple(leaves) if self.tupled or len(leaves) > 1 else leaves[0]


def random_module(seed: int, ops: int) -> Built:
    """Return a module of exactly `ops` operators, the same for the same `seed` and `ops`.

    Linear, ReLU, methods, add, concatenation and products with parameters; no embeddings.
    """
    torch.manual_seed(seed)
    module = RandomModule(seed, ops)
    return module, (torch.randn(ROWS, 8), torch.randn(ROWS, 16), torch.randn(ROWS, 16))


class RandomSparse(nn.Module):
    """Embedding tables and dense layers, drawn from a seed: the use case of sparse_nn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        tables = rng.randint(2, 6)
        # Tables of one size more often leave memory for the dense layers beside them.
        sizes = rng.choice(((500,), (500,), (300, 600), (50, 200, 800)))
        self.tables = nn.ModuleList([nn.EmbeddingBag(rng.choice(sizes), 16) for _ in range(tables)])
        self.bottom = nn.ModuleList([nn.Linear(16, 16) for _ in range(rng.randint(1, 2))])
        self.mixed = rng.random() < 0.3
        """Whether there are dense layers between the tables."""
        self.between = nn.ModuleList([nn.Linear(16, 16) for _ in range(tables)])
        self.top = nn.ModuleList(
            [nn.Linear(16 * (tables + 1), 32), nn.ReLU(), nn.Linear(32, 1)][: rng.randint(1, 3)]
        )

    def forward(self, dense: Tensor, rows: Tensor, other_rows: Tensor) -> Tensor:
        """Return the top layer's output; `rows` and `other_rows` are int64 (batch, 2)."""
        for layer in self.bottom:
            dense = layer(dense)
        looked_up = []
        for number, (table, layer) in enumerate(zip(self.tables, self.between, strict=True)):
            vectors = table(rows if number % 2 else other_rows)
            looked_up.append(layer(vectors) if self.mixed else vectors)
        out = torch.cat([dense, *looked_up], dim=1)
        for layer in self.top:
            out = layer(out)
        return out


def random_sparse(seed: int) -> Built:
    """Return a module of embedding tables and dense layers, the same for the same `seed`."""
    torch.manual_seed(seed)
    module = RandomSparse(seed)
    rows = torch.randint(0, 50, (ROWS, 2))
    return module, (torch.randn(ROWS, 16), rows, torch.flip(rows, (0,)))
