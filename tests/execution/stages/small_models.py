"""Small models in plain torch for cutting: encoder and decoder, tied, partly untraceable."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    """A residual block whose forward branches on values, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if float(out.detach().sum()) > 1e9:
            return x
        return x + torch.tanh(out)


class CrossBlock(nn.Module):
    """A decoder block, which also reads the result of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.cross = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        read: Tensor = self.cross(memory).mean(dim=1, keepdim=True)
        return x + torch.tanh(self.own(x)) * read


class Encoder(nn.Module):
    def __init__(self, embedding: nn.Embedding, layers: int) -> None:
        super().__init__()
        self.embed = embedding
        self.block = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.block:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    def __init__(self, embedding: nn.Embedding, layers: int) -> None:
        super().__init__()
        self.embed = embedding
        self.block = nn.ModuleList(CrossBlock() for _ in range(layers))

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for block in self.block:
            x = block(x, memory)
        return x


class EncoderDecoder(nn.Module):
    """As in T5: one embedding for the encoder, the decoder and the head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        shared = nn.Embedding(11, WIDTH)
        self.shared = shared
        self.enc = Encoder(shared, layers)
        self.dec = Decoder(nn.Embedding(11, WIDTH), layers)
        self.dec.embed.weight = shared.weight
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = shared.weight

    def forward(self, ids: Tensor, target: Tensor) -> dict[str, Tensor]:
        memory = self.enc(ids)
        return {"logits": self.head(self.dec(target, memory)), "memory": memory}


def encoder_decoder(layers: int = 2) -> tuple[EncoderDecoder, tuple[Tensor, Tensor]]:
    """Return a seeded encoder and decoder, and its inputs."""
    torch.manual_seed(0)
    model = EncoderDecoder(layers)
    return model, (torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 3)))


def tensors(result: Any) -> list[Any]:  # noqa: ANN401 - what a model returns
    """Return the leaves of a result, in order."""
    return torch.utils._pytree.tree_leaves(result)


def assert_same(actual: Any, expected: Any) -> None:  # noqa: ANN401 - what a model returns
    """Assert that two results are bit-identical with the same structure."""
    left, right = (torch.utils._pytree.tree_flatten(r) for r in (actual, expected))
    assert left[1] == right[1]
    for a, b in zip(left[0], right[0], strict=True):
        if isinstance(b, Tensor):
            assert torch.equal(a, b)
        else:
            assert type(a) is type(b)
            assert a == b


def gradients(model: nn.Module, result: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the gradients of the mean of all real-valued tensors of `result`, by name."""
    model.zero_grad()
    reals = [t for t in tensors(result) if isinstance(t, Tensor) and t.is_floating_point()]
    loss = torch.stack([t.float().square().mean() for t in reals]).sum()
    torch.autograd.backward(loss)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model: nn.Module, actual: Any, expected: Any) -> None:  # noqa: ANN401
    """Assert that both results give the parameters of `model` bit-identical gradients."""
    left, right = gradients(model, actual), gradients(model, expected)
    assert list(left) == list(right)
    assert left
    for name, gradient in right.items():
        assert torch.equal(left[name], gradient), name
