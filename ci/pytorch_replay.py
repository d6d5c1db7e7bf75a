"""Replays allocation traces on PyTorch's caching allocator, one JSON object a trace on standard output. Keys that `replay` has, too, mean
the same.

Times have the interpreter in them: `empty_ns_per_op` is the same loop over the same events with calls that do nothing, so that
the allocator took about `ns_per_op - empty_ns_per_op`. Uses of a block by other streams are recorded by waiting for those streams at
its free, since the raw interface has no `record_stream`; with one stream that changes nothing.
"""

import argparse
import gzip
import json
import statistics
import time

import torch


def events(path):
    """The trace as (kind, slot, bytes, stream), ids replaced by slots."""
    slots, free, out, made = {}, [], [], 0
    opened = gzip.open(path, "rt") if path.endswith(".gz") else open(path)
    with opened as lines:
        for line in lines:
            fields = line.split()
            if not fields or fields[0].startswith("#") or fields[0] == "i":
                continue
            kind, block = fields[0], fields[1]
            if kind == "a":
                if not free:
                    free.append(made)
                    made += 1
                slots[block] = free.pop()
                out.append(("a", slots[block], int(fields[2]), int(fields[3])))
            elif kind == "f":
                slot = slots.pop(block)
                free.append(slot)
                out.append(("f", slot, 0, int(fields[2])))
            elif kind == "r":
                out.append(("r", slots[block], 0, int(fields[2])))
    return out


def play(program, alloc, free, streams, slots):
    """One pass; returns seconds and the number of requests refused. What is left is freed after the clock has stopped."""
    users, ooms = {}, 0
    start = time.perf_counter()
    for kind, slot, size, stream in program:
        if kind == "a":
            try:
                slots[slot] = alloc(size, streams[stream])
            except torch.OutOfMemoryError:
                ooms += 1
        elif kind == "f":
            ptr = slots.pop(slot, None)
            if ptr is not None:
                for user in users.pop(slot, ()):
                    user.synchronize()
                free(ptr)
        else:
            users.setdefault(slot, []).append(streams[stream])
    elapsed = time.perf_counter() - start
    for ptr in slots.values():
        free(ptr)
    slots.clear()
    return elapsed, ooms


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("traces", nargs="+")
    arguments.add_argument("--repeat", type=int, default=5)
    args = arguments.parse_args()
    cache = torch.cuda.memory
    for path in args.traces:
        program = events(path)
        count = 1 + max(stream for *_, stream in program)
        streams = [torch.cuda.default_stream()] + [torch.cuda.Stream() for _ in range(count - 1)]
        torch.cuda.empty_cache()
        cache.reset_peak_memory_stats()
        alloc, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
        call = lambda size, stream: alloc(size, stream.cuda_stream)
        empty = [play(program, lambda size, stream: stream.cuda_stream or 1, lambda ptr: None, streams, {})[0] for _ in range(3)]
        passes, reserved = [], 0
        for number in range(args.repeat):
            passes.append(play(program, call, free, streams, {}))
            reserved = reserved or cache.max_memory_reserved()
        later = [seconds for seconds, _ in passes[1:]] or [passes[0][0]]
        ops = sum(kind != "r" for kind, *_ in program)
        print(json.dumps({
            "trace": path.rsplit("/", 1)[-1].removesuffix(".gz").removesuffix(".trace"),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "allocator": cache.get_allocator_backend(),
            "events": ops,
            "streams": len(streams),
            "first_pass_ns_per_op": round(passes[0][0] * 1e9 / ops, 1),
            "ns_per_op": round(statistics.median(later) * 1e9 / ops, 1),
            "seconds": round(sum(seconds for seconds, _ in passes), 6),
            "empty_ns_per_op": round(statistics.median(empty) * 1e9 / ops, 1),
            "first_pass_peak_reserved_bytes": reserved,
            "ooms": passes[0][1],
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        }), flush=True)


if __name__ == "__main__":
    main()
