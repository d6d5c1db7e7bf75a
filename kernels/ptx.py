"""Compiles kernels/cuda/*.cu to kernels/ptx/*.ptx; see ci/ptx, which calls it with the compilers in place.

--check compares with the committed files instead of writing them. Either way the assembler verifies the text for each
architecture below: it must take it, and must not spill registers to memory.
"""

import ctypes
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

HERE = pathlib.Path(__file__).parent
PACKAGES = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
TARGET = "compute_75"
ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]
OPTIONS = [f"--gpu-architecture={TARGET}", "--std=c++17", f"--include-path={HERE / 'cuda'}"]


def compiler():
    folder = PACKAGES / "cuda_nvrtc" / "lib"
    # The compiler opens this one by name alone.
    for builtins in folder.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.12"))


def text(nvrtc, kind, program):
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
    return buffer.value.decode()


def compile_ptx(nvrtc, source):
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None
    )
    if code != 0:
        sys.exit(f"{source.name}: nvrtcCreateProgram returned {code}")
    options = (ctypes.c_char_p * len(OPTIONS))(*[option.encode() for option in OPTIONS])
    code = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    log = text(nvrtc, "ProgramLog", program)
    if code != 0 or "warning" in log:
        sys.exit(f"{source.name}: {log}")
    return tidy(text(nvrtc, "PTX", program))


def tidy(ptx):
    """Without the compiler's comments, which name its build, its own constants, and blank lines."""
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"\.global [^;]*2nv6target[^;]*;", "", ptx)
    lines = [line.rstrip() for line in ptx.splitlines() if line.strip()]
    return "// Made by ci/ptx from kernels/cuda; do not edit.\n" + "\n".join(lines) + "\n"


def verify(path):
    assembler = PACKAGES / "cuda_nvcc" / "bin" / "ptxas"
    assembler.chmod(assembler.stat().st_mode | 0o111)
    worst = 0
    for architecture in ARCHITECTURES:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as out:
            command = [assembler, f"-arch={architecture}", "-v", "-o", out.name, path]
            run = subprocess.run(command, capture_output=True, text=True)
        said = run.stdout + run.stderr
        if run.returncode != 0:
            sys.exit(f"{path.name} for {architecture}: {said}")
        spills = re.findall(r"([1-9]\d*) bytes spill", said)
        frames = re.findall(r"([1-9]\d*) bytes stack frame", said)
        if spills or frames:
            sys.exit(f"{path.name} for {architecture} spills registers:\n{said}")
        worst = max([worst] + [int(count) for count in re.findall(r"Used (\d+) registers", said)])
    return worst


def main():
    check = "--check" in sys.argv[1:]
    nvrtc = compiler()
    different = []
    sources = sorted((HERE / "cuda").glob("*.cu"))
    for source in sources:
        ptx = compile_ptx(nvrtc, source)
        path = HERE / "ptx" / f"{source.stem}.ptx"
        if check and (not path.exists() or path.read_text() != ptx):
            different.append(path.name)
            continue
        if not check:
            path.write_text(ptx)
        entries = ptx.count(".entry ")
        print(f"{path.name}: {len(ptx)} bytes, {entries} kernels, at most {verify(path)} registers, no spills")
    stray = {path.stem for path in (HERE / "ptx").glob("*.ptx")} - {source.stem for source in sources}
    if stray:
        sys.exit(f"PTX without a source: {sorted(stray)}")
    if different:
        sys.exit(f"PTX differs from its source, run ci/ptx and commit: {different}")


main()
