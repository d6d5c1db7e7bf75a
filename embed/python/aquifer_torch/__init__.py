"""PyTorch's tensors in memory of Aquifer.

    import aquifer_torch
    aquifer_torch.enable()      # before the first CUDA tensor

AQUIFER_ALLOC_CONF, else PYTORCH_CUDA_ALLOC_CONF, configures it. The README says what PyTorch does not let an allocator do.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import pickle
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import warnings

import torch

__all__ = [
    "Error",
    "available_after",
    "empty_cache",
    "enable",
    "is_enabled",
    "library_path",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "on_oom",
    "reset_peak_memory_stats",
    "set_limit",
    "snapshot",
    "stats",
    "tag",
    "tag_calls",
    "trim_to",
]

_NAME = "libaquifer_c.so"
_HERE = pathlib.Path(__file__).resolve().parent
_CALL = re.compile(r"(.*) \((.*):(\d+)\)")
_OOM_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p)

_library = _shim = None
_thread = threading.local()
_kept = []  # what native code refers to


class Error(RuntimeError):
    """Aquifer could not be loaded, or refused a request."""


def library_path():
    """The library's path: AQUIFER_LIBRARY, or beside this package, or in the target folder of the checkout that it is in."""
    chosen = os.environ.get("AQUIFER_LIBRARY")
    targets = [pathlib.Path(os.environ["CARGO_TARGET_DIR"])] if "CARGO_TARGET_DIR" in os.environ else []
    targets += [folder / "target" for folder in _HERE.parents if (folder / "Cargo.lock").is_file()]
    candidates = [pathlib.Path(chosen)] if chosen else [_HERE / _NAME, *(target / "release" / _NAME for target in targets)]
    for path in candidates:
        if path.is_file():
            return path
    looked = ", ".join(map(str, candidates))
    raise Error(f"no library at {looked}: build it with `cargo build --release -p aquifer-capi`, or set AQUIFER_LIBRARY")


def enable(plain=False):
    """Makes Aquifer the allocator of CUDA tensors. Call it before the first one is made. Once is enough.

    The first call builds a small C++ library with this PyTorch (about a minute; kept in the cache folder). Where that fails, or with
    `plain`, it uses PyTorch's pluggable allocator instead, which lacks `torch.cuda.memory_stats()` and `MemPool`, and says so.
    """
    global _library, _shim
    if _library is not None:
        return
    if torch.version.cuda is None:
        raise Error(f"PyTorch {torch.__version__} is built without CUDA: install one with CUDA")
    if torch.cuda.is_initialized():
        raise Error("PyTorch has chosen its allocator already: call aquifer_torch.enable() before the first CUDA tensor")
    path = str(library_path())
    library = _declare(ctypes.CDLL(path))
    if library.aquifer_check_options():
        raise Error(library.aquifer_last_error().decode())
    compiler = _compiler()
    shim = None
    if not plain:
        try:
            shim = _build("aquifer_torch_shim", _HERE / "shim.cpp", _cuda_includes(), ["-lc10_cuda", "-ltorch_cuda"], compiler)
        except Error as error:
            warnings.warn(
                "aquifer_torch: falling back to PyTorch's pluggable allocator, without torch.cuda.memory_stats() and MemPool: "
                f"{error}. It needs CUDA's headers, which `pip install nvidia-cuda-runtime nvidia-cuda-crt` brings.",
                stacklevel=2,
            )
    if shim is None:
        shim = _build("aquifer_torch_plain", _HERE / "plain.cpp", [], ["-ltorch_cpu"], compiler)
        _connect(shim, path)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(shim._name, "aquifer_torch_malloc", "aquifer_torch_free")
        address = lambda function: ctypes.cast(function, ctypes.c_void_p).value
        native = allocator.allocator()
        native.set_record_stream_fn(address(library.aquifer_record_stream))
        native.set_reset_fn(address(shim.aquifer_torch_empty_cache))
        native.set_memory_fraction_fn(address(shim.aquifer_torch_set_memory_fraction))
        native.set_begin_allocate_to_pool(address(shim.aquifer_torch_begin_allocate_to_pool))
        native.set_end_allocate_to_pool_fn(address(shim.aquifer_torch_end_allocate_to_pool))
        native.set_release_pool(address(shim.aquifer_torch_release_pool))
        torch.cuda.memory.change_current_allocator(allocator)
        _kept.append(allocator)
    else:
        _connect(shim, path)
    _raise(_text_function(shim, "aquifer_torch_enable")())
    _library, _shim = library, shim
    if "history:" in os.environ.get("AQUIFER_ALLOC_CONF", ""):
        tag_calls()


def is_enabled():
    """Whether CUDA tensors come from Aquifer."""
    return _library is not None


def stats(device=None):
    """The statistics, under the names of `torch.cuda.memory_stats()`."""
    length = _checked(_enabled().aquifer_stats_json(_index(device), None, 0))
    buffer = ctypes.create_string_buffer(length + 256)
    _checked(_library.aquifer_stats_json(_index(device), buffer, len(buffer)))
    return json.loads(buffer.value)


def snapshot(path, device=None):
    """Saves a snapshot for PyTorch's memory viewer; `path` ends in .pickle, .pkl or .json. `history:100000` in AQUIFER_ALLOC_CONF adds the
    last 100000 events, with the calls that allocated (`tag_calls`)."""
    _status(_enabled().aquifer_save_snapshot(_index(device), os.fsencode(path)))
    file = pathlib.Path(os.fsdecode(path))
    form = json if file.suffix.lower() == ".json" else pickle
    saved = form.loads(file.read_bytes())
    blocks = [block for segment in saved["segments"] for block in segment["blocks"]]
    found = [_to_frames(entry) for entry in itertools.chain(*saved["device_traces"], saved["segments"], blocks)]
    if any(found):
        text = form.dumps(saved)
        whole = file.with_name(f".{file.name}.frames")
        whole.write_bytes(text if isinstance(text, bytes) else text.encode())
        os.replace(whole, file)


def _to_frames(entry):
    """Makes the name that `tag_calls` gave an entry a call stack."""
    calls = [_CALL.fullmatch(call) for call in entry.get("user_metadata", "").split(" < ")]
    if not all(calls):
        return False
    entry["frames"] = [{"name": name, "filename": file, "line": int(line)} for name, file, line in (call.groups() for call in calls)]
    entry["user_metadata"] = ""
    return True


@contextlib.contextmanager
def tag(name):
    """Names what this thread allocates within it, in snapshots and reports of refusals."""
    _enabled()
    before = getattr(_thread, "tag", "")
    _set_tag(name)
    try:
        yield
    finally:
        _set_tag(before)


def _set_tag(name):
    _thread.tag = name
    function = getattr(_shim, "aquifer_torch_set_tag", _library.aquifer_set_tag)
    function.argtypes = [ctypes.c_char_p]
    function(name.encode())


def tag_calls(value=True):
    """Names allocations without a tag by the Python calls that make them; on from the start with `history:` in AQUIFER_ALLOC_CONF. The
    pluggable allocator cannot."""
    _enabled()
    if hasattr(_shim, "aquifer_torch_tag_calls"):
        _shim.aquifer_torch_tag_calls(int(value))


def empty_cache(device=None):
    """Gives unused memory of a device, or of all, back."""
    _status(_enabled().aquifer_empty_cache(-1 if device is None else _index(device)))


def trim_to(bytes, device=None):
    """Gives unused memory back until at most so many bytes are held."""
    _status(_enabled().aquifer_trim_to(_index(device), bytes))


def set_limit(bytes, device=None):
    """Limits the bytes held; `None` removes the limit."""
    _status(_enabled().aquifer_set_limit(_index(device), 2**64 - 1 if bytes is None else bytes))


def memory_allocated(device=None):
    """Bytes in live tensors, as they are rounded."""
    return stats(device)["allocated_bytes.all.current"]


def memory_reserved(device=None):
    """Bytes held from the device."""
    return stats(device)["reserved_bytes.all.current"]


def max_memory_allocated(device=None):
    """Peak of `memory_allocated`."""
    return stats(device)["allocated_bytes.all.peak"]


def max_memory_reserved(device=None):
    """Peak of `memory_reserved`."""
    return stats(device)["reserved_bytes.all.peak"]


def available_after(graph_bytes=0, device=None):
    """Bytes that tensors can still take, in all, once a CUDA graph keeps `graph_bytes`: to size a cache before the capture.

    `torch.cuda.mem_get_info()` leaves out the unused memory held here. What a graph will keep is `max_memory_allocated()` after one pass of its
    work without a capture, less `memory_allocated()` before it, with `reset_peak_memory_stats()` in between. Call `empty_cache()` before the
    capture, during which cached memory does not move.
    """
    return _enabled().aquifer_available_after(_index(device), graph_bytes)


def reset_peak_memory_stats(device=None):
    """Makes peaks start from now."""
    _status(_enabled().aquifer_reset_peak(_index(device)))


def on_oom(callback):
    """Calls `callback(report)` before an allocation fails for lack of memory; `None` removes it."""
    function = _OOM_CALLBACK() if callback is None else _OOM_CALLBACK(lambda report, _: callback(report.decode()))
    _enabled().aquifer_on_oom(function, None)
    _kept.append(function)  # another thread may be calling the one before


def _declare(library):
    size, number, pointer = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
    results = {
        "stats_json": size,
        "last_error": ctypes.c_char_p,
        "on_oom": None,
        "available_after": number,
    }
    arguments = {
        "last_error": [],
        "check_options": [],
        "on_oom": [_OOM_CALLBACK, pointer],
        "stats_json": [ctypes.c_int, ctypes.c_char_p, size],
        "save_snapshot": [ctypes.c_int, ctypes.c_char_p],
        "available_after": [ctypes.c_int, number],
        "trim_to": [ctypes.c_int, number],
        "set_limit": [ctypes.c_int, number],
    }
    for name in {*results, *arguments, "empty_cache", "reset_peak"}:
        function = getattr(library, f"aquifer_{name}")
        function.restype = results.get(name, ctypes.c_int)
        function.argtypes = arguments.get(name, [ctypes.c_int])
    return library


def _compiler():
    """The command of the C++ compiler, and the environment that it runs in. Services and notebooks often have a PATH without the system's."""
    path = os.pathsep.join(filter(None, [os.environ.get("PATH"), os.defpath]))
    chosen = shlex.split(os.environ.get("CXX", ""))
    found = [shutil.which(name, path=path) for name in (chosen[:1] or ["g++", "c++", "clang++"])]
    found = [name for name in found if name]
    if not found:
        raise Error(f"no C++ compiler {chosen[0] if chosen else 'g++'} on the path {path}: install one (g++ 11 or newer), or set CXX")
    return [found[0], *chosen[1:]], {**os.environ, "PATH": path}


def _build(name, source, includes, libraries, compiler=None):
    """Builds a C++ library with this PyTorch and loads it. The cache folder keeps it for the same source, PyTorch and compiler."""
    command, environment = compiler or _compiler()
    home = pathlib.Path(torch.__file__).resolve().parent
    headers = [home / "include", home / "include" / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"], *includes]
    abi = int(torch.compiled_with_cxx11_abi())
    command = [*command, "-std=c++20", "-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [f"-I{folder}" for folder in headers] + [str(source), f"-L{home / 'lib'}", "-lc10", *libraries, "-ldl"]
    texts = [file.read_text() for file in (source, *sorted(source.parent.glob("*.h")))]
    about = "\0".join([torch.__version__, *command, *texts])
    file = f"{name}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    with contextlib.ExitStack() as stack:
        try:
            folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "aquifer_torch"
            if (folder / file).is_file():
                return ctypes.CDLL(str(folder / file))
            folder.mkdir(parents=True, exist_ok=True)
            building = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        except (OSError, RuntimeError) as error:  # no home, or one that cannot be written
            warnings.warn(f"aquifer_torch: {name} is built again at every start: {error}. Set XDG_CACHE_HOME.", stacklevel=3)
            folder = building = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with contextlib.suppress(OSError):  # not every file system can lock
            fcntl.flock(stack.enter_context(open(folder / "lock", "w")), fcntl.LOCK_EX)
        if not (folder / file).is_file():  # another process may have built it meanwhile
            done = subprocess.run([*command, "-o", str(building / file)], env=environment, capture_output=True, text=True, errors="replace")
            if done.returncode:
                text = done.stderr.strip().splitlines()
                reason = next((line for line in text if "error:" in line), text[0] if text else f"it ended with {done.returncode}")
                raise Error(f"{command[0]} did not build {source.name}: {reason}")
            os.replace(building / file, folder / file)
        return ctypes.CDLL(str(folder / file))


def _cuda_includes():
    """Folders with CUDA's headers: of a toolkit, or of NVIDIA's wheels."""
    site = pathlib.Path(torch.__file__).parent.parent
    compiler = shutil.which("nvcc")
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), compiler and pathlib.Path(compiler).parent.parent, "/usr/local/cuda"]
    folders = [*site.glob("nvidia/cu*/include"), site / "nvidia" / "cuda_runtime" / "include"]
    folders += [pathlib.Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    return [str(folder) for folder in folders if (folder / "cuda_runtime_api.h").is_file()]


def _connect(shim, path):
    connect = _text_function(shim, "aquifer_torch_connect")
    connect.argtypes = [ctypes.c_char_p]
    _raise(connect(os.fsencode(path)))


def _text_function(shim, name):
    function = getattr(shim, name)
    function.restype = ctypes.c_char_p
    return function


def _raise(error):
    if error:
        raise Error(error.decode())


def _enabled():
    if _library is None:
        raise Error("call aquifer_torch.enable() first")
    return _library


def _index(device):
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _status(status):
    if status:
        raise Error(_library.aquifer_last_error().decode())


def _checked(length):
    if not length:
        raise Error(_library.aquifer_last_error().decode())
    return length
