"""Checks dry runs of PyTorch programs: `python check.py [NAME…]`, with the interpreter that `build` was given.

AQUIFER_STRESS names the program, AQUIFER_DRYRUN_LIBRARY the library, and AQUIFER_LIBRARY that of aquifer_torch.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "python" / "examples"
GIB = 2**30


def dry(*options, program, code=0, **environment):
    """The output and the report of a program, its report in one line."""
    command = [os.environ["AQUIFER_STRESS"], "run", "--library", os.environ["AQUIFER_DRYRUN_LIBRARY"], *options, "--", sys.executable]
    command += ["-c", "import torch\n" + program] if isinstance(program, str) else map(str, program)
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True)
    assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout, " ".join(done.stderr.split())


def gib(pattern, text):
    return float(re.search(pattern.replace("GIB", r"([\d.]+) GiB"), text)[1])


TRAIN = """
layers = [torch.nn.Linear(4096, 4096, device="cuda") for _ in range(40)]
x = torch.randn(64, 4096, device="cuda")
for layer in layers: x = layer(x)
x.sum().backward()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


def figures_are_those_of_pytorch():
    for options, environment in [([], {}), ([], {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}), (["--config", "backing:expandable"], {})]:
        said, report = dry("--device", "sim:rtx4090", *options, program=TRAIN, **environment)
        allocated, reserved = (int(number) / GIB for number in said.split())
        assert abs(gib("peak: GIB allocated", report) - allocated) < 0.01, (said, report)
        assert abs(gib("allocated, GIB held", report) - reserved) < 0.01, (said, report)
        assert "Which card: RTX 4060 (8 GB)" in report and "on Simulated RTX 4090" in report, report
        assert ("as recorded" in report) == bool(options or environment), report


def figures_are_those_of_an_h200():
    if not importlib.metadata.version("torch").startswith("2.11."):
        return print("  skipped: they are of PyTorch 2.11")
    for options, held, calls in [([], 4.60, 88), (["--config", "backing:expandable"], 3.99, 78)]:
        said, report = dry("--device", "sim:h200", *options, program=[EXAMPLES / "programs.py", "mlp", "default"])
        assert gib("allocated, GIB held", report) == held and f'"calls": {calls},' in said, (said, report)


def aquifer_serves_where_options_ask_for_it():
    said, report = dry("--device", "sim:24GiB", "--config", "limit_mb:8192", program=TRAIN)
    assert "5.0" in said or int(said.split()[0]) > 5 * GIB, said
    assert "with Aquifer" in report and "with PyTorch" not in report and "mlp" not in report, report
    if not importlib.util.find_spec("aquifer_torch"):
        _, report = dry("--device", "sim:24GiB", "--config", "", program="", code=1, PYTHONPATH="")
        assert "takes the package aquifer_torch" in report and "Traceback" not in report, report


def what_does_not_fit_is_refused_and_explained():
    _, report = dry("--device", "sim:1GiB", program=TRAIN, code=1)
    for part in ("OutOfMemoryError", "What ran out: The program was refused 64.00 MiB", "Who held it: ", "What fits: not this device"):
        assert part in report, (part, report)
    assert "Which card" not in report, report
    handled = TRAIN + "\ntry: torch.empty(1 << 40, device='cuda')\nexcept torch.OutOfMemoryError: print('went on')\ntorch.ones(1, device='cuda')"
    said, report = dry("--device", "sim:24GiB", program=handled)
    assert "went on" in said and "Which card: " in report and "What ran out: " in report, report


def loops_on_values_end():
    loops = """
ones = lambda: bool((torch.ones(3, device="cuda") > 0).all())
print(sum(1 for _ in iter(ones, True)), ones(), torch.ones(1, device="cuda").item(), torch.ones(5, device="cuda").tolist())
"""
    for fill, expected in [("1000", "999 False"), ("7", "6 False"), ("1", "0 True")]:
        said, report = dry("--device", "sim:24GiB", "--fill", fill, program=loops)
        assert said.strip() == f"{expected} 0.0 [0.0, 0.0, 0.0, 0.0, 0.0]", said
        assert "read from the device" in report, report


def generation_ends_at_its_length():
    if not importlib.util.find_spec("transformers"):
        return print("  skipped: transformers is not installed")
    generate = """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)).cuda()
for new in (20, 5): print(model.generate(torch.ones(2, 8, dtype=torch.long).cuda(), max_new_tokens=new, do_sample=True).shape)
"""
    said, _ = dry("--device", "sim:24GiB", program=generate)
    assert said.split("\n")[:2] == ["torch.Size([2, 28])", "torch.Size([2, 13])"], said


def what_is_not_simulated_says_so():
    programs = {
        "with torch.cuda.graph(torch.cuda.CUDAGraph()): torch.ones(1, device='cuda')": "CUDA graphs",
        "torch.linalg.cholesky(torch.ones(2, 2, device='cuda'))": "cuSOLVER",
        "torch.fft.fft(torch.ones(2, device='cuda'))": "cuFFT",
        "torch.ones(1, device='cuda').share_memory_().untyped_storage()._share_cuda_()": "memory of other processes",
    }
    for program, what in programs.items():
        _, report = dry("--device", "sim:24GiB", program=program, code=1)
        assert f"aquifer: a dry run does not simulate {what}: " in report, (what, report)
    _, report = dry("--device", "sim:24GiB", program="torch.ones(1, device='cuda')", code=1, PYTORCH_ALLOC_CONF="backend:cudaMallocAsync")
    assert "does not simulate the driver's pools: cudaDeviceGetDefaultMemPool" in report and "callback" not in report, report


def the_sanitizer_of_pytorch_finds_missing_waits():
    start = """
zeros, stream, wait = lambda: torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream, lambda s: s.wait_stream(torch.cuda.current_stream())
host, memory, side, other = torch.ones(1 << 20, pin_memory=True), zeros(), stream(), stream()
"""
    # What is wrong, the program, and whether the sanitizer finds it.
    programs = [
        ("zeroed on another stream", "with torch.cuda.stream(side): memory + 1", True),
        ("uploaded on another stream", "wait(side)\nwith torch.cuda.stream(side): memory.copy_(host, non_blocking=True)\nmemory + 1", True),
        ("written on two streams", "wait(side); wait(other)\nfor s in (side, other):\n  with torch.cuda.stream(s): memory.zero_()", True),
        ("freed in use", "wait(side)\nwith torch.cuda.stream(side): memory + 1\nmemory = memory.data_ptr()\nassert zeros().data_ptr() == memory", False),
        ("host memory written during its upload", "memory.copy_(host, non_blocking=True); host.zero_()", False),
        ("right", "wait(side)\nwith torch.cuda.stream(side): memory + 1\ntorch.cuda.current_stream().wait_stream(side)\nmemory + 1", False),
    ]
    for name, program, is_found in programs:
        _, report = dry("--device", "sim:24GiB", program=start + program, code=int(is_found), TORCH_CUDA_SANITIZER="1")
        assert ("data race" in report) == is_found, (name, report)


def usual_layers_run():
    layers = """
F = torch.nn.functional
for dtype in (torch.float32, torch.bfloat16):
    new = dict(device="cuda", dtype=dtype)
    x = torch.nn.Conv2d(3, 8, 3, **new)(torch.randn(2, 3, 32, 32, requires_grad=True, **new))
    torch.nn.BatchNorm2d(8, **new)(x).sum().backward()
    torch.nn.LSTM(8, 8, **new)(torch.randn(4, 2, 8, requires_grad=True, **new))[0].sum().backward()
    for causal in (False, True):
        q = torch.randn(2, 4, 64, 32, requires_grad=True, **new)
        F.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward()
    F.cross_entropy(torch.randn(4, 9, requires_grad=True, **new), torch.zeros(4, dtype=torch.long, device="cuda")).backward()
scaler, model = torch.amp.GradScaler(), torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
with torch.autocast("cuda"): loss = model(torch.randn(4, 8).cuda(non_blocking=True)).sum()
scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
assert optimizer.state, "the step was not left out"
pinned = torch.ones(4).pin_memory(); assert pinned.is_pinned() and pinned.cuda().cpu().sum() == 0
with torch.cuda.stream(torch.cuda.Stream()): torch.ones(4, device="cuda").record_stream(torch.cuda.current_stream())
torch.cuda.synchronize()
with torch.profiler.profile(profile_memory=True): torch.ones(4, device="cuda").sum()
print(torch.nonzero(torch.ones(4, device="cuda")).shape, torch.cuda.get_device_capability(), torch.cuda.device_count())
"""
    for device, capability in [("sim:h100", "(9, 0)"), ("sim:a100", "(8, 0)"), ("sim:rtx4090", "(8, 9)"), ("sim:gb10", "(12, 1)")]:
        said, report = dry("--device", device, program=layers)
        assert said.strip() == f"torch.Size([0, 1]) {capability} 1" and "Which card: RTX 4060" in report, (said, report)


def each_process_is_reported():
    workers = """
import multiprocessing, subprocess, sys
subprocess.run([sys.executable, "-c", "import torch; torch.ones(1 << 28, device='cuda')"], check=True)
loader = torch.utils.data.DataLoader(torch.arange(64.0), batch_size=8, num_workers=2, pin_memory=True)
print(sum(1 for batch in loader if batch.cuda(non_blocking=True).shape == (8,)))
"""
    said, report = dry("--device", "sim:24GiB", program=workers)
    assert said.strip() == "8" and report.count("dry run: ") == 2 and "peak: 1.00 GiB allocated" in report, (said, report)


def a_module_of_the_environment_is_still_imported():
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "sitecustomize.py").write_text("print('imported')")
        path = os.pathsep.join([folder, str(EXAMPLES.parent)])
        said, report = dry("--device", "sim:24GiB", program="torch.ones(1, device='cuda')", PYTHONPATH=path)
    assert said.strip() == "imported" and "Who held it: 4 bytes" in report, (said, report)


def readings_and_snapshots_are_written():
    with tempfile.TemporaryDirectory() as folder:
        for name in ("memory.pickle", "memory.json"):
            path = os.path.join(folder, name)
            program = "import time\nx = torch.ones(1 << 28, device='cuda')\ntime.sleep(5)"
            _, report = dry("--device", "sim:24GiB", "--live", "--snapshot", path, program=program)
            assert "cuda:0 holds 1.00 GiB of 24.00 GiB" in report, report
            explained = subprocess.run([os.environ["AQUIFER_STRESS"], "explain", path], capture_output=True, text=True)
            assert "1.00 GiB" in explained.stdout, explained.stderr


CHECKS = [
    figures_are_those_of_pytorch,
    figures_are_those_of_an_h200,
    aquifer_serves_where_options_ask_for_it,
    what_does_not_fit_is_refused_and_explained,
    loops_on_values_end,
    generation_ends_at_its_length,
    what_is_not_simulated_says_so,
    the_sanitizer_of_pytorch_finds_missing_waits,
    usual_layers_run,
    each_process_is_reported,
    a_module_of_the_environment_is_still_imported,
    readings_and_snapshots_are_written,
]

if __name__ == "__main__":
    for check in CHECKS:
        if check.__name__ in sys.argv[1:] or len(sys.argv) == 1:
            print(check.__name__, flush=True)
            check()
    print("all passed")
