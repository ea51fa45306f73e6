"""python -m tests.oracles.torch_zoo --minutes 30 --seed 0

Random networks of PyTorch, exported by both of its exporters, trained by jaxonnx and by PyTorch. Of
each: the outputs; the set of trained tensors is `named_parameters()`, by value, with ties as ties;
the gradient of every parameter; five steps of Adam, of one batch and of two that
count unequally; what an untouched save keeps. A network that
differs is made smaller until each block is needed; the table counts the differences by block.
`--transformers` takes the architectures of transformers with tiny configurations instead.
Needs torch and onnxscript (and transformers); what compares is `zoo_compare`, which does not.
"""

import argparse
import contextlib
import copy
import io
import itertools
import logging
import os
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import jax
import numpy as np
import onnx
import torch
from torch import nn

from tests.oracles import zoo_blocks, zoo_recurrent, zoo_sequences, zoo_vectors
from tests.oracles.zoo_blocks import LENGTH, SIDE, C
from tests.oracles.zoo_compare import LEARNING_RATE, STEPS, Finding, Golden, compare, unequal

BATCH = 3
WORDS = 19
OPSETS = {"legacy": (13, 14, 17, 20), "dynamo": (18, 20, 23), "unoptimized": (18, 20, 23)}
"""The versions that are drawn, by exporter; "unoptimized" is `dynamo=True, optimize=False`."""
NOT_EXPORTED = (
    *(RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError),
    *(NotImplementedError, AssertionError, ImportError),
)
"""What exporters raise about networks that they cannot export."""
BLOCKS = {
    "image": zoo_blocks.BLOCKS,
    "sequence": zoo_sequences.BLOCKS | zoo_recurrent.BLOCKS,
    "vector": zoo_vectors.BLOCKS,
}


class Tokens(nn.Module):
    """Embeddings, blocks over the sequence, and an output layer that may be the embedding."""

    def __init__(self, blocks: list[nn.Module], tied: bool, scaled: bool):
        super().__init__()
        self.embed = nn.Embedding(WORDS, C)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(C, WORDS, bias=False)
        self.factor = C**0.5 if scaled else 1.0
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids) * self.factor))


class Spec(NamedTuple):
    """A network, and how it is exported; as text "legacy 17 image conv:4 prelu:7 fresh".

    Attributes:
      exporter, opset: of the export.
      kind: "image", "sequence", "vector", "tokens" or "tied" (tokens with one embedding).
      blocks: names of blocks with the seeds of their numbers.
      fresh: parameters are as PyTorch initializes them, ones and zeros among them.
    """

    exporter: str
    opset: int
    kind: str
    blocks: tuple[tuple[str, int], ...]
    fresh: bool = False

    def __str__(self) -> str:
        blocks = " ".join(f"{name}:{seed}" for name, seed in self.blocks)
        return f"{self.exporter} {self.opset} {self.kind} {blocks}{' fresh' * self.fresh}"

    @classmethod
    def parse(cls, text: str) -> Self:
        exporter, opset, kind, *blocks = text.split()
        pairs = [b.split(":") for b in blocks if b != "fresh"]
        return cls(
            exporter, int(opset), kind, tuple((a, int(b)) for a, b in pairs), "fresh" in blocks
        )

    @classmethod
    def draw(cls, number: int, seed: int) -> Self:
        rng = random.Random(f"{seed} {number}")
        exporter = rng.choice(("legacy", "legacy", "dynamo", "unoptimized"))
        kind = rng.choice(("image", "image", "sequence", "sequence", "vector", "tokens", "tied"))
        names = sorted(BLOCKS[kind if kind in BLOCKS else "sequence"])
        count = rng.randint(1, 4)
        blocks = tuple((rng.choice(names), rng.randrange(100)) for _ in range(count))
        return cls(exporter, rng.choice(OPSETS[exporter]), kind, blocks, rng.random() < 0.15)


def build(spec: Spec) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return the network in evaluation mode, and its input."""
    torch.manual_seed(len(spec.blocks))
    kind = spec.kind if spec.kind in BLOCKS else "sequence"
    blocks = [BLOCKS[kind][name](random.Random(seed)) for name, seed in spec.blocks]
    if spec.kind == kind:
        shape = {"image": (C, SIDE, SIDE), "sequence": (LENGTH, C), "vector": (C,)}[kind]
        net, x = nn.Sequential(*blocks), torch.randn(BATCH, *shape)
        net.append(nn.Flatten(1)).append(nn.Linear(int(np.prod(shape)), 4))
    else:
        net = Tokens(blocks, spec.kind == "tied", bool(spec.blocks and spec.blocks[0][1] % 2))
        x = torch.randint(0, WORDS, (BATCH, LENGTH))
    if not spec.fresh:
        move(net)
    return net.eval(), (x,)


@torch.no_grad()
def move(net: nn.Module) -> None:
    """Move the parameters so that all their numbers are different, and running statistics."""
    parameters = [*net.parameters()]
    for p in parameters:
        p += 0.1 * torch.randn_like(p)
    for _ in range(20):
        flat = torch.cat([p.reshape(-1) for p in parameters]).numpy()
        _, first = np.unique(flat, return_index=True)
        again = torch.ones(len(flat), dtype=torch.bool)
        again[torch.from_numpy(first)] = False
        if not again.any():
            break
        for p, part in zip(parameters, again.split([p.numel() for p in parameters]), strict=True):
            p += part.view_as(p) * 1e-3 * torch.randn_like(p)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 1.5)


def export(
    net: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    exporter: str,
    opset: int,
    dynamic: bool = True,
) -> bytes:
    """Return the file that an exporter writes, of a network in evaluation mode."""
    names = [f"x{i}" for i in range(len(inputs))]
    if exporter == "legacy":
        buffer = io.BytesIO()
        torch.onnx.export(
            net,
            inputs,
            buffer,
            dynamo=False,
            opset_version=opset,
            input_names=names,
            dynamic_axes={n: {0: "batch"} for n in names} if dynamic else None,
            training=torch.onnx.TrainingMode.PRESERVE,
        )
        return buffer.getvalue()
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        net,
        inputs,
        dynamo=True,
        optimize=exporter == "dynamo",
        opset_version=opset,
        input_names=names,
        verbose=False,
        dynamic_shapes=tuple({0: batch} for _ in inputs) if dynamic else None,
    )
    return program.model_proto.SerializeToString()


def first(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def golden(net: nn.Module, inputs: tuple[torch.Tensor, ...], steps: bool) -> Golden:
    """Return what PyTorch says of the network, which it trains if `steps`."""
    params = dict(net.named_parameters())
    arrays = {name: p.detach().numpy().copy() for name, p in params.items()}
    buffers = {n: b.numpy().copy() for n, b in net.named_buffers() if b.is_floating_point()}
    output = first(net(*inputs))
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    loss = nn.functional.mse_loss(output, target)
    found = torch.autograd.grad(loss, [*params.values()], allow_unused=True)
    gradients = {n: g.numpy() for n, g in zip(params, found, strict=True) if g is not None}
    losses, accumulated = [], []
    if steps:
        if len(output) == len(inputs[0]):
            accumulated = accumulate(copy.deepcopy(net), inputs, target.numpy())
        net.train()
        optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(first(net(*inputs)), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        net.eval()
    return Golden(
        {f"x{i}": x.numpy() for i, x in enumerate(inputs)},
        target.numpy(),
        output.detach().numpy(),
        arrays,
        buffers,
        gradients,
        np.array(losses),
        np.array(accumulated),
    )


def accumulate(net: nn.Module, inputs: tuple[torch.Tensor, ...], target: np.ndarray) -> list[float]:
    """Return the losses of steps of Adam on sums over two batches that are divided once."""
    net.train()
    optimizer, losses = torch.optim.Adam(net.parameters(), LEARNING_RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        counts = []
        for number in (0, 1):
            wanted, weight = map(torch.from_numpy, unequal(target, number))
            output = first(net(*inputs))
            if target.ndim == 3:
                flat = output.flatten(0, 1), wanted.flatten()
                total, count = nn.functional.cross_entropy(*flat, reduction="sum"), wanted >= 0
            else:
                total = ((output - wanted).square().flatten(1).mean(1) * weight).sum()
                count = weight
            total.backward()
            counts.append(count.sum().item())
            losses.append(total.item() / counts[-1])
        for p in net.parameters():
            if p.grad is not None:
                p.grad /= sum(counts)
        optimizer.step()
    return losses


def examine(spec: Spec, steps: bool = False, run: bool = True) -> list[Finding] | None:
    """Return the findings of a network; None if its exporter refuses it."""
    net, inputs = build(spec)
    content = exported(net, inputs, spec.exporter, spec.opset)
    if content is None:
        return None
    found = [*compare(content, golden(net, inputs, steps), run)]
    jax.clear_caches()
    return found


def exported(net, inputs, exporter: str, opset: int) -> bytes | None:
    for dynamic in (True, False):
        with silence(), contextlib.suppress(*NOT_EXPORTED):
            return export(net, inputs, exporter, opset, dynamic)
    return None


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what is written to both outputs, also from C++: exporters show whole graphs."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            for number, old in enumerate(kept, start=1):
                os.dup2(old, number)
                os.close(old)


def unexplained(found: list[Finding] | None) -> list[Finding]:
    return [f for f in found or () if not f.why]


STATIC = ("frozen", "trained", "untied", "size", "save", "load")
"""Kinds of findings that are made without running anything."""


def shrink(spec: Spec, kind: str) -> Spec:
    """Return a network with no block that a finding of this kind does without."""
    place = 0
    while place < len(spec.blocks):
        smaller = spec._replace(blocks=spec.blocks[:place] + spec.blocks[place + 1 :])
        found = examine(smaller, kind in ("adam", "accumulated"), kind not in STATIC)
        if any(f.kind == kind for f in unexplained(found)):
            spec = smaller
        else:
            place += 1
    return spec


class Table:
    """What was found, by kind and place: a tensor of a block, or the blocks that it needs."""

    def __init__(self) -> None:
        self.networks: Counter[str] = Counter()
        self.rows: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self.explained: Counter[str] = Counter()

    def count(self, found: list[Finding] | None) -> None:
        if found is None:
            self.networks["not exported"] += 1
            return
        self.networks["networks"] += 1
        self.networks["alike"] += not unexplained(found)
        self.explained.update({f"{f.kind}: {f.why}" for f in found if f.why})

    def add(self, kind: str, place: str, source: str, detail: str) -> None:
        cases = self.rows.setdefault((kind, place), [])
        cases.append((source, " ".join(detail.split())[:200]))
        if len(cases) == 1:
            print(f"{kind}: {place}\n    {source}\n    {cases[0][1]}", flush=True)

    def show(self, seconds: float) -> None:
        counts = ", ".join(f"{count} {what}" for what, count in self.networks.most_common())
        print(f"\n{counts} in {seconds:.0f} s")
        print("\n| difference | place | networks | example |\n|---|---|---|---|")
        for (kind, place), cases in sorted(self.rows.items(), key=lambda row: -len(row[1])):
            source, detail = cases[0]
            print(f"| {kind} | {place} | {len(cases)} | `{source}`: {detail} |")
        for why, count in self.explained.most_common():
            print(f"explained: {why}: {count}")


def run_random(table: Table, seed: int, numbers: Iterable[int]) -> None:
    for number in numbers:
        spec = Spec.draw(number, seed)
        found = examine(spec, steps=number % 4 == 0)
        table.count(found)
        shrunk = set()
        for finding in unexplained(found):
            block = re.match(r"(?:blocks\.)?(\d+)\.(.*)", finding.tensor)
            if block and finding.kind in STATIC and int(block[1]) < len(spec.blocks):
                name = spec.blocks[int(block[1])][0]
                small = spec._replace(blocks=(spec.blocks[int(block[1])],))
                table.add(finding.kind, f"{name}: {block[2]}", str(small), finding.detail)
            elif finding.kind not in shrunk:
                shrunk.add(finding.kind)
                small = shrink(spec, finding.kind)
                names = ", ".join(sorted({name for name, _ in small.blocks})) or small.kind
                detail = f"{finding.tensor} {finding.detail}"
                table.add(finding.kind, names, str(small), detail)


def show_network(spec: Spec, write: Path | None) -> None:
    found = examine(spec, steps=True)
    print("the exporter refuses it" if found is None else f"{len(found)} findings")
    for finding in found or ():
        print(": ".join(finding))
    if write and found is not None:
        net, inputs = build(spec)
        model = onnx.ModelProto.FromString(exported(net, inputs, spec.exporter, spec.opset) or b"")
        for node in model.graph.node:  # the exporting machine's file names
            del node.metadata_props[:]
        onnx.save(model, write.with_suffix(".onnx"))
        golden(net, inputs, steps=True).save(write.with_suffix(".npz"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.oracles.torch_zoo", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first network")
    parser.add_argument(
        "--network", help='one network, as the table has it: "legacy 17 image conv:4"'
    )
    parser.add_argument("--write", type=Path, help="with --network: PATH.onnx and PATH.npz")
    parser.add_argument("--transformers", nargs="?", const=".*", metavar="PATTERN")
    chosen = parser.parse_args()
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    began, table = time.monotonic(), Table()
    if chosen.network:
        show_network(Spec.parse(chosen.network), chosen.write)
        return

    def in_time(items: Iterable) -> Iterator:
        for item in items:
            if time.monotonic() - began > 60 * chosen.minutes:
                return
            yield item

    if chosen.transformers:
        from tests.oracles.zoo_transformers import run_architectures

        run_architectures(table, chosen.transformers, in_time)
    else:
        run_random(table, chosen.seed, in_time(itertools.count(chosen.start)))
    table.show(time.monotonic() - began)


if __name__ == "__main__":
    main()
