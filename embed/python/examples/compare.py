"""Runs the programs and the pairs under PyTorch's allocator, its expandable segments, and Aquifer, and prints tables.

    python compare.py [--repeat N] [NAME ...]        NAME: a program, or `pairs`

On a machine without a GPU, a stand-in for the CUDA runtime may be preloaded: FAKE=/path/to/libfakecuda.so.
"""

import argparse
import ctypes
import json
import os
import pathlib
import subprocess
import sys

import programs

HERE = pathlib.Path(__file__).resolve().parent
ALLOCATORS = {
    "default": {},
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "aquifer": {},
    "plain": {},
}


def run(file, *arguments):
    environment = {key: value for key, value in os.environ.items() if key not in ("FAKE", "PYTORCH_CUDA_ALLOC_CONF")}
    environment.update(ALLOCATORS[arguments[-1]])
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), environment.get("PYTHONPATH", "")])
    if "FAKE" in os.environ:
        environment["LD_PRELOAD"] = os.environ["FAKE"]
    command = [sys.executable, "-W", "ignore", str(file), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def pairs(allocator):
    import aquifer_torch
    import torch

    if allocator in ("aquifer", "plain"):
        aquifer_torch.enable(plain=allocator == "plain")
    torch.empty(1, device="cuda")
    includes = aquifer_torch._cuda_includes()
    library = aquifer_torch._build("aquifer_pairs", HERE / "pairs.cpp", includes, ["-lc10_cuda"])
    library.hot.restype = library.churn.restype = ctypes.c_double
    rows = {f"hot {name}": library.hot(ctypes.c_size_t(size), 200_000) for name, size in (("512 B", 512), ("1 MiB", 1 << 20))}
    rows |= {f"churn {n}": library.churn(ctypes.c_size_t(n), 200_000) for n in (100, 1000, 10000)}
    print(json.dumps(rows))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("names", nargs="*", default=[*programs.PROGRAMS, "pairs"])
    options = parser.parse_args()
    if options.names[0] == "one":
        return pairs(options.names[1])
    gib = 2**30
    print("| program | allocator | reserved GiB | of requested | device allocs + frees | CPU ms a step |\n| --- | --- | --- | --- | --- | --- |")
    for name in options.names:
        if name == "pairs":
            continue
        requested = None  # as PyTorch's own allocator counts it
        for allocator in ALLOCATORS:
            found = [run(HERE / "programs.py", name, allocator) for _ in range(options.repeat)]
            one, step = found[0], min(figures["step_ms"] for figures in found)
            requested = requested or one["requested"]
            print(
                f"| {name} | {allocator} | {one['reserved'] / gib:.2f} | {one['reserved'] / requested:.3f} | {one['calls']} | {step:.1f} |",
                flush=True,
            )
    if "pairs" in options.names:
        found = {allocator: [run(__file__, "one", allocator) for _ in range(options.repeat)] for allocator in ALLOCATORS}
        print("\n| ns per pair | " + " | ".join(ALLOCATORS) + " |\n| --- |" + " --- |" * len(ALLOCATORS))
        for row in found["default"][0]:
            print(f"| {row} | " + " | ".join(f"{min(one[row] for one in found[a]):.0f}" for a in ALLOCATORS) + " |")


if __name__ == "__main__":
    main()
