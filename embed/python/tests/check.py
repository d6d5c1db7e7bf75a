"""What the package promises, on a GPU or on a stand-in for the CUDA runtime. `python check.py` checks the allocator, `python check.py plain` the
pluggable one. It ends with tensors alive, and must exit with 0 all the same."""

import os
import pathlib
import sys
import tempfile
import threading

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import aquifer_torch

MIB = 1 << 20
PLAIN = sys.argv[1:] == ["plain"]


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
        assert {name: theirs[name] for name in ours} == ours and "Allocated memory" in torch.cuda.memory_summary()
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


aquifer_torch.enable(plain=PLAIN)
aquifer_torch.enable()
for check in (statistics, out_of_memory, streams_and_threads, pools, forked):
    check()
    print(f"{check.__name__}: ok")
alive = [torch.empty(MIB, device="cuda") for _ in range(10)]
