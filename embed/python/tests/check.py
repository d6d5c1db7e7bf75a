"""What the package promises, on a GPU or on a stand-in for the CUDA runtime. `python check.py` checks the allocator, `python check.py plain` the
pluggable one, `python check.py build` also how the C++ library is built, `python check.py capture` also the memory of graphs, on a runtime that
captures, and `python check.py gpu` also what needs kernels that run: contents and results of graphs. It ends with tensors alive, and must exit
with 0 all the same."""

import json
import os
import pathlib
import subprocess
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
    def request(size):
        return lambda: torch.empty(size, dtype=torch.uint8, device="cuda")

    reports, observed = [], []
    aquifer_torch.on_oom(reports.append)
    if not PLAIN:
        torch._C._cuda_attach_out_of_memory_observer(lambda *told: observed.append(told))
    text = raises(torch.OutOfMemoryError, request(1 << 42))
    aquifer_torch.on_oom(None)
    assert text.startswith("CUDA out of memory. Tried to allocate 4096.00 GiB"), text
    assert reports and reports[0].strip().splitlines()[-1] in text, text
    for text in text, raises(torch.OutOfMemoryError, request(1 << 62)):
        assert text.startswith("CUDA out of memory. Tried to allocate") and text.splitlines()[0].count("out of memory") == 1, text
    if not PLAIN:
        free, total = torch.cuda.mem_get_info()
        assert [told[:2] for told in observed] == [(0, 1 << 42), (0, 1 << 62)], observed
        assert all(told[2] == total and 0 < told[3] <= total for told in observed), observed
    aquifer_torch.set_limit(aquifer_torch.memory_reserved() + 64 * MIB)
    raises(torch.OutOfMemoryError, request(128 * MIB))
    aquifer_torch.set_limit(None)
    request(128 * MIB)()


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
    available = aquifer_torch.available_after()
    assert aquifer_torch.available_after(30 * MIB) == available - 30 * MIB
    assert torch.cuda.mem_get_info()[0] <= available < torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1e-4)
    raises(torch.OutOfMemoryError, lambda: torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
    torch.cuda.set_per_process_memory_fraction(1.0)
    raises(RuntimeError, lambda: torch._C._cuda_setMemoryFraction(2.0, 0))
    del x
    before = aquifer_torch.memory_reserved()
    torch.cuda.empty_cache()
    assert aquifer_torch.memory_reserved() < before
    aquifer_torch.reset_peak_memory_stats()
    assert aquifer_torch.max_memory_allocated() == aquifer_torch.memory_allocated()
    with tempfile.TemporaryDirectory() as folder:
        aquifer_torch.snapshot(f"{folder}/snapshot.pickle")
        assert os.path.getsize(f"{folder}/snapshot.pickle") > 100
        raises(aquifer_torch.Error, lambda: aquifer_torch.snapshot(f"{folder}/snapshot.txt"))


def names():
    """Tags from Python, and the calls that allocated, in snapshots."""
    with aquifer_torch.tag("weights"):
        kept = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")]
    aquifer_torch.tag_calls()
    kept.append(torch.empty(5 * MIB, dtype=torch.uint8, device="cuda"))
    aquifer_torch.tag_calls(False)
    with tempfile.TemporaryDirectory() as folder:
        aquifer_torch.snapshot(f"{folder}/snapshot.json")
        segments = json.loads(pathlib.Path(f"{folder}/snapshot.json").read_text())["segments"]
    blocks = {block["requested_size"]: block for segment in segments for block in segment["blocks"]}
    assert blocks[3 * MIB]["user_metadata"] == "weights", blocks[3 * MIB]
    if not PLAIN:
        frame = blocks[5 * MIB]["frames"][0]
        assert (frame["name"], frame["filename"]) == ("names", "tests/check.py") and frame["line"] > 0, frame
    del kept


def before_the_first_tensor():
    """What is wrong is said at once, in one sentence."""
    program = "import sys, torch; sys.path.insert(0, sys.argv[1]); import aquifer_torch\n{}\naquifer_torch.enable()"
    for first, options, said in (
        ("torch.empty(1, device='cuda')", "", "call aquifer_torch.enable() before the first CUDA tensor"),
        ("", "granul_mb:4", "unknown option `granul_mb`; did you mean `granule_mb`?"),
    ):
        command = [sys.executable, "-c", program.format(first), str(pathlib.Path(aquifer_torch.__file__).parent.parent)]
        done = subprocess.run(command, env={**os.environ, "AQUIFER_ALLOC_CONF": options}, capture_output=True, text=True)
        assert said in done.stderr.strip().splitlines()[-1], done.stderr
    program = program.format("") + "\nassert torch.cuda.get_per_process_memory_fraction() == 0.5"
    command = [sys.executable, "-c", program, str(pathlib.Path(aquifer_torch.__file__).parent.parent)]
    if not PLAIN:
        subprocess.run(command, env={**os.environ, "PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.5"}, check=True)


def generic_functions():
    """Those of `torch.accelerator`."""
    accelerator = torch.accelerator
    x, unused = [torch.empty(10 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    del unused
    assert accelerator.memory_allocated() == aquifer_torch.memory_allocated() >= 10 * MIB
    assert accelerator.max_memory_allocated() == aquifer_torch.max_memory_allocated() >= 20 * MIB
    assert accelerator.max_memory_reserved() == aquifer_torch.max_memory_reserved() >= 20 * MIB
    theirs, ours = accelerator.memory_stats(), aquifer_torch.stats()
    assert all(theirs[name] == ours[name] for name in ours if name in theirs) and len(theirs) > 100
    before = accelerator.memory_reserved()
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == aquifer_torch.memory_reserved() < before
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == accelerator.memory_allocated()
    accelerator.reset_accumulated_memory_stats()
    assert accelerator.memory_stats()["num_device_alloc"] == 0
    del x


def profiled():
    """The profiler hears of memory that is allocated, freed and refused."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        x = torch.empty(7 * MIB, dtype=torch.uint8, device="cuda")
        y = torch.zeros(9 * MIB, dtype=torch.uint8, device="cuda")
        del x, y
        raises(torch.OutOfMemoryError, lambda: torch.empty(1 << 42, dtype=torch.uint8, device="cuda"))
    bytes = {event.key: event.device_memory_usage for event in profiler.key_averages()}
    found = [bytes.get(name) for name in ("aten::zeros", "[memory]", "[OutOfMemory]")]
    assert found == [9 * MIB, -16 * MIB, 0] and bytes["aten::empty"] >= 7 * MIB, bytes


def unsupported():
    """What PyTorch asks of its own allocator alone raises, and says what to use."""
    memory = torch.cuda.memory
    calls = [torch.cuda.memory_snapshot, memory._snapshot, memory._record_memory_history]
    if not PLAIN:
        memory._record_memory_history(enabled=None)  # ends what never began
        assert not torch._C._cuda_isHistoryEnabled()
        calls += [torch.cuda.MemPool().snapshot]
        raises(RuntimeError, lambda: memory.caching_allocator_enable(False))
    for call in calls:
        text = raises(RuntimeError, call)
        assert PLAIN or "aquifer_torch.snapshot(path)" in text, text
    x = torch.empty(1, device="cuda")
    raises(RuntimeError, x.untyped_storage()._share_cuda_)
    for call in (aquifer_torch.memory_allocated, aquifer_torch.stats, aquifer_torch.empty_cache):
        raises(aquifer_torch.Error, lambda: call(-2))


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
    torch.cuda.empty_cache()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    del x
    before = torch.cuda.memory_reserved()
    y = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")  # not from the pool
    assert torch.cuda.memory_reserved() > before
    assert pool.use_count() == 1
    torch.cuda.empty_cache()  # of the pool, too
    assert torch.cuda.memory_reserved() <= before
    del pool, y


def tensor(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def held():
    """MiB held, without what is unused."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return aquifer_torch.memory_reserved() // MIB


def captured_memory():
    """Memory of a graph is given to nobody else as long as the graph lives, and goes back with it."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    first = torch.cuda.CUDAGraph()  # for which PyTorch allocates what it keeps for all
    with torch.cuda.graph(first):
        tensor(1)
    first.replay()
    first.reset()
    before = held()
    with torch.cuda.graph(graph):
        temporary, output = tensor(40), tensor(8)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forked = tensor(24)
            temporary.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        own = {x.data_ptr() for x in (temporary, output, forked)}
        del temporary, forked
    for _ in range(3):
        others = [tensor(mib) for mib in (40, 24, 8) for _ in range(3)]
        assert own.isdisjoint(x.data_ptr() for x in others)
        raises(torch.OutOfMemoryError, lambda: torch.empty(1 << 42, dtype=torch.uint8, device="cuda"))
        graph.replay()
    del others
    assert held() >= before + 72
    graph.reset()
    assert held() >= before + 8, "the output lives on"
    del output
    assert held() == before


def shared_memory_of_graphs():
    """Graphs that share a pool need as much as the largest one."""
    before = held()
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for mib in (8, 64, 32):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool):
            tensor(mib)
    assert before + 64 <= held() <= before + 68, held()
    for graph in graphs:
        graph.replay()
    del graphs, graph
    assert held() == before


def captures_and_threads():
    """What other threads allocate during a capture is not the graph's."""
    before, kept = held(), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            kept.extend(tensor(mib) for mib in range(5, 15))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        tensor(8)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    del graph
    assert len(kept) == 10 and held() == before + sum(range(5, 15)) + sum(range(5, 15)) % 2, held()
    kept.clear()
    assert held() == before


def failed_captures():
    """A capture that fails leaves its stream and the allocator as they were. PyTorch 2.11 keeps its pool for good, with its own allocator, too."""
    before, stream = held(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()

    def breaks():
        with torch.cuda.graph(graph, stream=stream):
            tensor(8)
            torch.cuda.synchronize()

    def lacks():
        with torch.cuda.graph(graph, stream=stream):
            tensor(1 << 22)

    raises(RuntimeError, breaks)
    with torch.cuda.stream(stream):
        blocks = [tensor(mib) for mib in range(60, 80)]
    del blocks, graph
    aquifer_torch.empty_cache()
    graph = torch.cuda.CUDAGraph()
    raises(torch.OutOfMemoryError, lacks)
    del graph
    assert held() <= before + 16, (held(), before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tensor(8)
    graph.replay()


def graphed_callables():
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(layers, (x,))
    for _ in range(3):
        graphed(x).sum().backward()


def forked():
    child = os.fork()
    if child == 0:
        for call in (lambda: torch.empty(10, device="cuda"), torch.accelerator.memory_stats, aquifer_torch.memory_allocated):
            try:
                call()
                os._exit(2)
            except RuntimeError as error:
                if "fork" not in str(error):
                    os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def built():
    """The C++ library builds without a PATH, as in services and notebooks, and once for processes that start together."""
    code = "import warnings; warnings.filterwarnings('error', message='aquifer_torch'); import aquifer_torch; aquifer_torch.enable(plain=%s)" % PLAIN
    package = pathlib.Path(aquifer_torch.__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PATH": "", "XDG_CACHE_HOME": cache, "PYTHONPATH": str(package)}
        start = lambda **more: subprocess.Popen([sys.executable, "-c", code], env={**environment, **more}, stderr=subprocess.PIPE, text=True)
        ends = [(process.communicate()[1], process.returncode) for process in [start(), start()]]
        assert all(code == 0 for _, code in ends), ends
        folder = pathlib.Path(cache) / "aquifer_torch"
        assert len(list(folder.glob("*.so"))) == 1 and len(list(folder.iterdir())) == 2, list(folder.iterdir())
        text = start(CXX="no-such-compiler -O3").communicate()[1]
        assert "aquifer_torch.Error: no C++ compiler no-such-compiler" in text, text
        text = start(XDG_CACHE_HOME="/proc/none").communicate()[1]
        assert "is built again at every start" in text, text


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
checks = [statistics, names, before_the_first_tensor, generic_functions, out_of_memory, profiled, unsupported, streams_and_threads, pools]
if "build" in sys.argv[1:]:
    checks += [built]
if ON_GPU or "capture" in sys.argv[1:]:
    checks += [captured_memory, shared_memory_of_graphs, captures_and_threads, failed_captures, graphed_callables]
if ON_GPU:
    checks += [contents, graphs]
for check in (*checks, forked):
    check()
    print(f"{check.__name__}: ok")
alive = [torch.empty(MIB, device="cuda") for _ in range(10)]
