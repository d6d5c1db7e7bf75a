"""What the package promises, on a GPU or on a stand-in for the CUDA runtime. `python check.py` checks the allocator, `python check.py plain` the
pluggable one, and `python check.py gpu` also what needs kernels that run: contents and graphs. It ends with tensors alive, and must exit with 0
all the same."""

import os
import pathlib
import sys
import tempfile
import threading

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import aquifer_torch

MIB = 1 << 20
PLAIN = "plain" in sys.argv[1:]
ON_GPU = "gpu" in sys.argv[1:]


def raises(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def out_of_memory():
    reports = []
    aquifer_torch.on_oom(reports.append)
    text = raises(torch.OutOfMemoryError, lambda: torch.empty(1 << 42, dtype=torch.uint8, device="cuda"))
    aquifer_torch.on_oom(None)
    assert text.startswith("CUDA out of memory") and reports and reports[0].strip()[:40] in text, text
    aquifer_torch.set_limit(aquifer_torch.memory_reserved() + 64 * MIB)
    raises(torch.OutOfMemoryError, lambda: torch.empty(128 * MIB, dtype=torch.uint8, device="cuda"))
    aquifer_torch.set_limit(None)
    torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")


def statistics():
    before = aquifer_torch.memory_allocated()
    x = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
    assert aquifer_torch.memory_allocated() - before == 10 * MIB
    assert aquifer_torch.stats()["allocated_bytes.all.current"] == aquifer_torch.memory_allocated()
    if not PLAIN:
        assert torch.cuda.memory_allocated() == aquifer_torch.memory_allocated()
        assert torch.cuda.max_memory_reserved() == aquifer_torch.max_memory_reserved()
        theirs, ours = torch.cuda.memory_stats(), aquifer_torch.stats()
        # A PyTorch older than an entry has no place for it.
        assert all(theirs[name] == ours[name] for name in ours if name in theirs) and len(theirs) > 100
        assert "Allocated memory" in torch.cuda.memory_summary()
        assert torch.cuda.get_allocator_backend() == "aquifer"
        torch.cuda.set_per_process_memory_fraction(0.5)
        torch.cuda.set_per_process_memory_fraction(1.0)
    del x
    torch.cuda.empty_cache() if not PLAIN else aquifer_torch.empty_cache()
    aquifer_torch.reset_peak_memory_stats()
    assert aquifer_torch.max_memory_allocated() == aquifer_torch.memory_allocated()
    with tempfile.TemporaryDirectory() as folder:
        aquifer_torch.snapshot(f"{folder}/snapshot.pickle")
        assert os.path.getsize(f"{folder}/snapshot.pickle") > 100
        raises(aquifer_torch.Error, lambda: aquifer_torch.snapshot(f"{folder}/snapshot.txt"))


def streams_and_threads():
    def work():
        side = torch.cuda.Stream()
        kept = []
        with torch.cuda.stream(side):
            for i in range(200):
                x = torch.empty(MIB // 4, device="cuda")
                y = x + 1
                y.record_stream(torch.cuda.default_stream())
                kept = [*kept[-20:], y]

    before = aquifer_torch.memory_allocated()
    threads = [threading.Thread(target=work) for _ in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    torch.cuda.synchronize()
    assert aquifer_torch.memory_allocated() == before


def pools():
    if PLAIN:
        raises(RuntimeError, torch.cuda.MemPool)
        return
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    y = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")  # not from the pool
    assert torch.cuda.memory_reserved() > before
    assert pool.use_count() == 1
    del pool
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    del y


def forked():
    child = os.fork()
    if child == 0:
        try:
            torch.empty(10, device="cuda")
        except RuntimeError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def contents():
    """Tensors of many sizes on four streams, read on another stream after a wait, keep what was written."""
    side = [torch.cuda.Stream() for _ in range(4)]
    main = torch.cuda.current_stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(2000):
        stream = side[i % 4]
        with torch.cuda.stream(stream):
            x = torch.full((1000 + 7919 * (i % 97),), i, dtype=torch.int64, device="cuda")
            y = x * 2 + 1
        main.wait_stream(stream)
        y.record_stream(main)
        wrong += (y != 2 * i + 1).sum()
        del x, y
        if i % 500 == 499:
            torch.cuda.empty_cache()
    assert wrong.item() == 0


def graphs():
    """A captured training step gives what the same step gives without a graph, also after its cache is emptied."""

    def model():
        torch.manual_seed(7)
        layers = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
        return layers, torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(layers, optimizer, x):
        optimizer.zero_grad(set_to_none=True)
        loss = layers(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    inputs = [torch.randn(256, 512, device="cuda") for _ in range(6)]
    layers, optimizer = model()
    expected = [step(layers, optimizer, x).item() for x in [*inputs[:3], *inputs]]

    layers, optimizer = model()
    x = inputs[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for warm in inputs[:3]:
            x.copy_(warm)
            step(layers, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step(layers, optimizer, x)
    found = []
    for given in inputs:
        x.copy_(given)
        graph.replay()
        found.append(loss.item())
        torch.cuda.empty_cache()
        filler = torch.full((1 << 22,), float("nan"), device="cuda")
        del filler
    assert all(abs(a - b) <= 1e-5 * abs(a) for a, b in zip(expected[3:], found)), (expected, found)
    del graph, loss, layers, optimizer, inputs, x, warm, given
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= before, (torch.cuda.memory_allocated(), before)


aquifer_torch.enable(plain=PLAIN)
aquifer_torch.enable()
checks = [statistics, out_of_memory, streams_and_threads, pools]
if ON_GPU:
    checks += [contents, *([] if PLAIN else [graphs])]
for check in (*checks, forked):
    check()
    print(f"{check.__name__}: ok")
alive = [torch.empty(MIB, device="cuda") for _ in range(10)]
