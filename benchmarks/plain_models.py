"""Known architectures in plain `torch.nn`, narrow, on small inputs, for `fx.symbolic_trace`.

Each has the operators of its paper in the same order; widths are reduced to make runs short. Batch
normalisation is folded into the convolutions, as for inference, except in `resnet`, whose buffers
test how each side counts them. The caller chooses the depth: torch's cost_aware takes a minute at
45 to 60 operators, its kl_based at about 100.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.torch_families import Built

__all__ = ["LARGER", "SMALL"]


def _conv(channels: Sequence[int], kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    """Return a convolution from ``channels[0]`` to ``channels[1]``, and its ReLU."""
    padding = kernel // 2
    return [nn.Conv2d(channels[0], channels[1], kernel, stride, padding), nn.ReLU()]


def alexnet() -> Built:
    """Return AlexNet (Krizhevsky et al. 2012) at 1/8 of its channels: 22 operators."""
    features = [*_conv((3, 8), 11, 4), nn.MaxPool2d(3, 2), *_conv((8, 24), 5), nn.MaxPool2d(3, 2)]
    features += [*_conv((24, 48)), *_conv((48, 32)), *_conv((32, 32)), nn.MaxPool2d(3, 2)]
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    head += [nn.Dropout(), nn.Linear(128, 256), nn.ReLU()]
    head += [nn.Dropout(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 100)]
    return nn.Sequential(*features, *head), (torch.randn(1, 3, 96, 96),)


def vgg11() -> Built:
    """Return VGG-11 (Simonyan and Zisserman 2014) at 1/8 of its channels: 30 operators."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (8, 0, 16, 0, 32, 32, 0, 64, 64, 0, 64, 64, 0):
        if width:
            layers += _conv((channels, width))
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Dropout()]
    layers += [nn.Linear(512, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 100)]
    return nn.Sequential(*layers), (torch.randn(1, 3, 64, 64),)


class BasicBlock(nn.Module):
    """Two convolutions with batch norm and a skip: 7 operators, 9 if the skip has a convolution."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.conv_1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.shortcut: nn.Sequential | None = None
        if channels != width:
            convolved = nn.Conv2d(channels, width, 1, 2, bias=False)
            self.shortcut = nn.Sequential(convolved, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, width, h, w)."""
        out = self.norm_2(self.conv_2(self.relu(self.norm_1(self.conv_1(x)))))
        shortcut = x if self.shortcut is None else self.shortcut(x)
        result: Tensor = self.relu(out + shortcut)
        return result


def resnet(blocks: Sequence[int]) -> Built:
    """Return a ResNet (He et al. 2015) of basic blocks; ``(2, 2, 2, 2)`` is ResNet-18's depth."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 8
    for stage, count in enumerate(blocks):
        for _ in range(count):
            layers.append(BasicBlock(channels, 8 << stage))
            channels = 8 << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100)]
    return nn.Sequential(*layers), (torch.randn(1, 3, 64, 64),)


class Inception(nn.Module):
    """The four branches of GoogLeNet's module and their concatenation: 14 operators."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Sequential(*_conv((channels, 8), 1))
        self.three = nn.Sequential(*_conv((channels, 12), 1), *_conv((12, 16)))
        self.five = nn.Sequential(*_conv((channels, 2), 1), *_conv((2, 4), 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), *_conv((channels, 4), 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, 32, h, w)."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


def googlenet(modules: int) -> Built:
    """Return GoogLeNet (Szegedy et al. 2014) with `modules` inception modules."""
    layers = [*_conv((3, 8), 7, 2), nn.MaxPool2d(3, 2, 1), *_conv((8, 24)), nn.MaxPool2d(3, 2, 1)]
    layers += [Inception(24 if number == 0 else 32) for number in range(modules)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(32, 100)]
    return nn.Sequential(*layers), (torch.randn(1, 3, 64, 64),)


class UNet(nn.Module):
    """Encoder, decoder, and a skip from each level of one to the same level of the other."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        widths = [8 << level for level in range(levels + 1)]
        pairs = list(zip([3, *widths], widths, strict=False))
        self.down = nn.ModuleList([nn.Sequential(*_conv((a, b)), *_conv((b, b))) for a, b in pairs])
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[:-1]])
        self.up = nn.ModuleList(
            [nn.Sequential(*_conv((2 * w, w)), *_conv((w, w))) for w in widths[:-1]]
        )
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, 2, h, w)."""
        skips = []
        for number, level in enumerate(self.down):
            x = level(x if number == 0 else self.pool(x))
            skips.append(x)
        for grow, up, skip in list(zip(self.grow, self.up, skips, strict=False))[::-1]:
            x = up(torch.cat([skip, grow(x)], dim=1))
        out: Tensor = self.head(x)
        return out


def unet(levels: int) -> Built:
    """Return a U-Net (Ronneberger et al. 2015): 5 + 11 `levels` operators."""
    return UNet(levels), (torch.randn(1, 3, 32, 32),)


class EncoderBlock(nn.Module):
    """Post-norm multi-head attention and MLP, with explicit reshapes: 24 operators."""

    def __init__(self, dim: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out, self.up, self.down = (
            nn.Linear(dim, dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim),
        )  # fmt: skip
        self.norm_1, self.norm_2, self.gelu = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.GELU()
        self.split = (1, tokens, heads, dim // heads)
        self.joined = (1, tokens, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return (1, tokens, dim) from the same shape."""
        query, key, value = (
            layer(x).reshape(self.split).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(2, 3)) * (self.split[3] ** -0.5)
        mixed = torch.matmul(torch.softmax(scores, dim=-1), value)
        x = self.norm_1(x + self.out(mixed.transpose(1, 2).reshape(self.joined)))
        result: Tensor = self.norm_2(x + self.down(self.gelu(self.up(x))))
        return result


class Encoder(nn.Module):
    """Token embedding, learned positions (a parameter of the root), blocks, pooler."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 32)
        self.positions = nn.Parameter(torch.randn(16, 32))
        self.blocks = nn.ModuleList([EncoderBlock(32, 4, 16) for _ in range(blocks)])
        self.pooler = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (1, 16, 32) from int64 tokens (1, 16)."""
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.pooler(x)
        return out


def encoder(blocks: int) -> Built:
    """Return a transformer encoder as BERT's (Devlin et al. 2018): 4 + 24 `blocks` operators."""
    return Encoder(blocks), (torch.randint(0, 200, (1, 16)),)


class DLRM(nn.Module):
    """Four embedding bags, bottom and top MLP, dot products of every pair: 21 operators."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, 16) for rows in (400, 300, 200, 100)])
        bottom = [nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)]
        self.bottom = nn.Sequential(*bottom, nn.ReLU())
        top = [nn.Linear(41, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)]
        self.top = nn.Sequential(*top, nn.Sigmoid())

    def forward(self, dense: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Return (batch, 1) from dense (batch, 13) and int64 rows (batch, 2) of each table."""
        looked_up = [table(rows) for table, rows in zip(self.tables, (a, b, c, d), strict=True)]
        low = self.bottom(dense)
        vectors = torch.stack([low, *looked_up], dim=1)
        products = torch.matmul(vectors, vectors.transpose(1, 2))
        out: Tensor = self.top(torch.cat([low, torch.flatten(products, 1)], dim=1))
        return out


def dlrm() -> Built:
    """Return a small DLRM (Naumov et al. 2019): the tables hold most of the bytes."""
    rows = tuple(torch.randint(0, 100, (4, 2)) for _ in range(4))
    return DLRM(), (torch.randn(4, 13), *rows)


class MixerBlock(nn.Module):
    """An MLP over tokens and one over channels, each with its skip: 12 operators."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channels = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, dim) from the same shape."""
        x = x + self.tokens(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.norm_2(x))
        return out


def mixer(blocks: int) -> Built:
    """Return an MLP-Mixer (Tolstikhin et al. 2021): 6 + 12 `blocks` operators."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 32, 8, 8)
            self.blocks = nn.ModuleList([MixerBlock(16, 32) for _ in range(blocks)])
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 100)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.flatten(self.stem(x), 2).transpose(1, 2)
            for block in self.blocks:
                x = block(x)
            out: Tensor = self.head(torch.mean(self.norm(x), dim=1))
            return out

    return Mixer(), (torch.randn(1, 3, 32, 32),)


SMALL: dict[str, Callable[[], Built]] = {
    "alexnet": alexnet,
    "vgg11": vgg11,
    "resnet, 3 blocks": lambda: resnet((1, 1, 1)),
    "googlenet, 2 modules": lambda: googlenet(2),
    "u-net, 2 levels": lambda: unet(2),
    "encoder, 1 block": lambda: encoder(1),
    "dlrm": dlrm,
    "mlp-mixer, 2 blocks": lambda: mixer(2),
}
"""At most 40 operators each: small enough for torch's cost_aware."""

LARGER: dict[str, Callable[[], Built]] = {
    "resnet-18": lambda: resnet((2, 2, 2, 2)),
    "googlenet, 4 modules": lambda: googlenet(4),
    "u-net, 4 levels": lambda: unet(4),
    "encoder, 3 blocks": lambda: encoder(3),
    "mlp-mixer, 5 blocks": lambda: mixer(5),
}
"""At most 90 operators each: small enough for torch's kl_based."""
