"""What `aquifer-stress run --device sim:…` does in each Python process of the program: it records PyTorch's memory, and saves that at the end.

Python imports the first module of this name at its start.
"""

import atexit
import importlib.machinery
import json
import os
import pickle
import sys
import threading
import time

LIVE = os.environ.get("AQUIFER_LIVE")
ENTRIES = 1_000_000  # of the history


class Finder:
    """Prepares modules when they have been imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        prepare = {"torch": prepare_torch, "transformers.generation.utils": prepare_generation}.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if prepare else None
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_prepare(module):
                execute(module)
                prepare(module)

            spec.loader.exec_module = execute_and_prepare
        return spec


def prepare_torch(torch):
    version = torch.version.cuda
    if version is None or not version.startswith("13."):
        raise ImportError(f"a dry run simulates CUDA 13, which this PyTorch is not built for, but for {version or 'none'}: take a wheel for CUDA 13")
    # It is not simulated; PyTorch has kernels of its own for all that it does.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("AQUIFER_DRYRUN_ALLOCATOR") == "aquifer":
        try:
            import aquifer_torch
        except ModuleNotFoundError:
            raise SystemExit("aquifer: a dry run with Aquifer's options takes the package aquifer_torch, which is not installed: see embed/python") from None
        aquifer_torch.enable()
    torch.cuda._lazy_call(lambda: is_native(torch) and torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python"))
    atexit.register(save, torch, os.getpid())
    if LIVE:
        threading.Thread(target=show, args=(torch,), daemon=True).start()


def prepare_generation(utils):
    """Ends `generate` at its greatest length, which it would read from the device."""
    criterion, mixin, is_long = utils.MaxLengthCriteria, utils.GenerationMixin, []
    judge, is_unfinished = criterion.__call__, getattr(mixin, "_has_unfinished_sequences", None)

    def judge_and_note(self, tokens, *rest, **named):
        is_long[:] = [tokens.shape[-1] >= self.max_length]
        return judge(self, tokens, *rest, **named)

    def is_short(self, *rest, **named):
        return not is_long.pop() if is_long else is_unfinished(self, *rest, **named)

    if is_unfinished:
        criterion.__call__, mixin._has_unfinished_sequences = judge_and_note, is_short


def aquifer():
    """The package, where PyTorch's memory comes from it."""
    package = sys.modules.get("aquifer_torch")
    return package if package and package.is_enabled() else None


def is_native(torch):
    """Whether PyTorch's own allocator serves."""
    return not aquifer() and torch.cuda.get_allocator_backend() == "native"


def save(torch, process):
    if os.getpid() != process or not torch.cuda.is_initialized():  # a forked child has no device
        return
    form = os.environ["AQUIFER_DRYRUN_FORMAT"]
    path = os.path.join(os.environ["AQUIFER_DRYRUN_SNAPSHOTS"], f"{process}.{form}")
    if package := aquifer():
        package.snapshot(path)
    elif is_native(torch):
        snapshot = torch.cuda.memory._snapshot()
        with open(path, "wb") as file:
            file.write(json.dumps(snapshot).encode() if form == "json" else pickle.dumps(snapshot))


def show(torch):
    """Writes readings of memory, as the interposer does."""
    path = os.path.join(LIVE, str(os.getpid()))
    while True:
        time.sleep(0.5)
        if not torch.cuda.is_initialized():
            continue
        of = torch.cuda.memory_stats().get
        reserved, limit = of("reserved_bytes.all.current", 0), torch.cuda.mem_get_info()[1]
        stranded = of("inactive_split_bytes.all.current", 0) / max(reserved, 1)
        figures = [0, limit, reserved, of("allocated_bytes.all.current", 0), f"{stranded:.4f}", of("allocation.all.allocated", 0), of("num_ooms", 0)]
        with open(path + ".new", "w") as file:
            print(*figures, file=file)
        os.replace(path + ".new", path)


def import_next():
    """Imports the module of this name that the environment has, if any."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)


sys.meta_path.insert(0, Finder)
import_next()
