"""Training programs with the memory habits of real ones. `python programs.py NAME ALLOCATOR` trains and prints figures as JSON; `compare.py` runs
all of them. ALLOCATOR is `aquifer`, `plain` (Aquifer through the pluggable allocator), or anything else for PyTorch's own.
"""

import json
import random
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

DEVICE = "cuda"
STEPS = 40


def train(model, batches):
    """One step for each batch; yields after each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        model(batch).mean().backward()
        optimizer.step()
        yield


def mlp():
    """Always the same sizes."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(4096, 4096), nn.GELU())]
    model = nn.Sequential(*layers).to(DEVICE)
    return train(model, (torch.randn(2048, 4096, device=DEVICE) for _ in range(STEPS)))


class Transformer(nn.Module):
    def __init__(self, width=1024, depth=8, heads=16, words=32000):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            batch, length, width = x.shape
            parts = block["qkv"](block["norm1"](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            weights = (parts[0] @ parts[1].transpose(-1, -2)).softmax(-1)
            x = x + block["out"]((weights @ parts[2]).transpose(1, 2).reshape(batch, length, width))
            x = x + block["down"](F.gelu(block["up"](block["norm2"](x))))
        return self.head(x).log_softmax(-1)


def transformer():
    """Another sequence length in each step."""
    lengths = [random.randint(64, 1024) for _ in range(STEPS)]
    return train(Transformer().to(DEVICE), (torch.zeros(8, n, dtype=torch.long, device=DEVICE) for n in lengths))


class Graphs(nn.Module):
    def __init__(self, width=256, depth=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))

    def forward(self, graph):
        x, source, target = graph
        for layer in self.layers:
            received = torch.zeros_like(x).index_add(0, target, x.index_select(0, source))
            x = F.relu(layer(torch.cat([x, received], 1)))
        return x


def gnn():
    """Graphs of random sizes."""

    def graphs():
        for _ in range(STEPS):
            nodes = random.randint(5_000, 150_000)
            edges = nodes * random.randint(4, 12)
            ends = [torch.zeros(edges, dtype=torch.long, device=DEVICE) for _ in range(2)]
            yield torch.randn(nodes, 256, device=DEVICE), *ends

    return train(Graphs().to(DEVICE), graphs())


def cnn():
    """Batches and images of random sizes; a validation batch now and then."""
    torch.backends.cudnn.enabled = False
    widths = [3, 64, 128, 256, 256, 512]
    layers = []
    for i, (width, next_width) in enumerate(zip(widths, widths[1:])):
        layers += [nn.Conv2d(width, next_width, 3, padding=1, stride=1 + i % 2), nn.BatchNorm2d(next_width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)).to(DEVICE)

    def batches():
        for step in range(STEPS):
            size = random.choice([96, 128, 160, 192])
            if step % 8 == 7:
                with torch.no_grad():
                    model(torch.randn(256, 3, 192, 192, device=DEVICE))
            yield torch.randn(random.randint(8, 96), 3, size, size, device=DEVICE)

    return train(model, batches())


def two_streams():
    """Activations on a second stream, which the first one uses."""
    side = torch.cuda.Stream()
    model, encoder = Transformer(depth=4).to(DEVICE), nn.Linear(1024, 1024).to(DEVICE)

    def batches():
        for _ in range(STEPS):
            length = random.randint(64, 768)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), torch.no_grad():
                encoded = encoder(torch.randn(8 * length, 1024, device=DEVICE))
                tokens = encoded[:, 0].long().view(8, length)
            torch.cuda.current_stream().wait_stream(side)
            tokens.record_stream(torch.cuda.current_stream())
            yield tokens

    return train(model, batches())


PROGRAMS = {program.__name__: program for program in (mlp, transformer, gnn, cnn, two_streams)}


def main(name, allocator):
    if allocator in ("aquifer", "plain"):
        import aquifer_torch

        aquifer_torch.enable(plain=allocator == "plain")
        memory = aquifer_torch
    else:
        memory = torch.cuda
    random.seed(1)
    # Time of the processor, because other load does not count there.
    times, before = [], time.process_time()
    for _ in PROGRAMS[name]():
        torch.cuda.synchronize()
        now = time.process_time()
        times.append(now - before)
        before = now
    stats = memory.stats() if memory is not torch.cuda else torch.cuda.memory_stats()
    figures = {
        "reserved": stats["reserved_bytes.all.peak"],
        "requested": stats["requested_bytes.all.peak"],
        "allocations": stats["allocation.all.allocated"],
        "calls": stats["num_device_alloc"] + stats["num_device_free"],
        "step_ms": statistics.median(times[5:]) * 1000,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
