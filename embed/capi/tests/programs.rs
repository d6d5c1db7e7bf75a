//! C and C++ programs that call the library on the stand-in driver, which watches what they do with its memory.
#![cfg(target_os = "linux")]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// A folder with a built program and the stand-in under the driver's names. Cargo builds both libraries beside the
/// tests.
struct Program {
    folder: PathBuf,
    libraries: PathBuf,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Program {
    fn folder(source: &str) -> PathBuf {
        env::temp_dir().join(format!("aquifer-capi-{}-{source}", std::process::id()))
    }

    /// Builds a program of the tests, or one that was written to its folder before. `None`, with a
    /// message, where there is no compiler.
    fn build(compiler: &str, source: &str, options: &[&str]) -> Option<Program> {
        let libraries = env::current_exe().expect("a path").parent().expect("a folder").to_owned();
        let folder = Program::folder(source);
        fs::create_dir_all(&folder).expect("a folder");
        for name in ["libcuda.so", "libcuda.so.1"] {
            symlink(libraries.join("libaquifer_standin.so"), folder.join(name)).expect("a link");
        }
        let program = Program { folder, libraries };
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(compiler);
        command.args(options).args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"]).arg(program.folder.join("program"));
        let written = program.folder.join(source);
        let source = if written.is_file() { written } else { package.join("tests").join(source) };
        command.arg("-I").arg(package.join("include")).arg(source);
        command.arg("-L").arg(&program.libraries).args(["-laquifer_c", "-lpthread", "-ldl"]);
        match command.output() {
            Err(error) => {
                eprintln!("SKIPPED: {compiler} is missing ({error})");
                None
            }
            Ok(output) => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                Some(program)
            }
        }
    }

    /// Runs it and returns what it printed to stdout and stderr.
    fn run(&self, arguments: &[&str]) -> (String, String) {
        let (succeeded, out, err) = self.output(arguments);
        assert!(succeeded, "{arguments:?}:\n{out}{err}");
        (out, err)
    }

    fn output(&self, arguments: &[&str]) -> (bool, String, String) {
        let mut path = self.folder.clone().into_os_string();
        path.push(":");
        path.push(&self.libraries);
        let output = Command::new(self.folder.join("program"))
            .args(arguments)
            .current_dir(&self.folder)
            .env("LD_LIBRARY_PATH", path)
            .env("AQUIFER_STANDIN_LIBRARY", self.libraries.join("libaquifer_standin.so"))
            .env("AQUIFER_STANDIN_DEVICES", "1GiB,seed=5;1GiB,seed=6")
            .env_remove("AQUIFER_ALLOC_CONF")
            .output()
            .expect("the program runs");
        let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), out, err)
    }
}

#[test]
fn a_c_program() {
    let Some(program) = Program::build("cc", "program.c", &["-std=c11"]) else { return };
    for what in [
        "threads",
        "elsewhere",
        "forget",
        "oom",
        "reports",
        "pools",
        "graphs",
        "sleeps",
        "devices",
        "ort",
        "forked",
        "at_the_end",
    ] {
        let (_, err) = program.run(&[what]);
        assert_eq!(err, "", "{what}");
    }
    let (succeeded, _, err) = program.output(&["careless"]);
    assert!(!succeeded && err.contains("violations: "), "{err}");
    let (_, err) = program.run(&["wrong"]);
    assert!(err.contains("aquifer_free: ") && err.contains("aquifer_record_stream: "), "{err}");
}

/// What the program of the README takes from NVIDIA's header, as that declares it.
const CUDA_H: &str = "
#include <stddef.h>
#include <stdint.h>
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
enum { CU_STREAM_NON_BLOCKING = 1, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1 };
#define cuStreamBeginCapture cuStreamBeginCapture_v2
#define cuGraphInstantiate cuGraphInstantiateWithFlags
#define cuMemcpyDtoDAsync cuMemcpyDtoDAsync_v2
#define cuMemcpyDtoH cuMemcpyDtoH_v2
int cuInit(unsigned), cuDevicePrimaryCtxRetain(CUcontext *, int), cuCtxSetCurrent(CUcontext);
int cuStreamCreate(CUstream *, unsigned), cuStreamSynchronize(CUstream);
int cuStreamBeginCapture(CUstream, unsigned), cuStreamEndCapture(CUstream, CUgraph *);
int cuGraphInstantiate(CUgraphExec *, CUgraph, unsigned long long), cuGraphLaunch(CUgraphExec, CUstream);
int cuGraphExecDestroy(CUgraphExec), cuGraphDestroy(CUgraph);
int cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream);
int cuMemcpyDtoDAsync(CUdeviceptr, CUdeviceptr, size_t, CUstream), cuMemcpyDtoH(void *, CUdeviceptr, size_t);
";

#[test]
fn the_graph_of_the_readme() {
    let readme = include_str!("../README.md");
    let start = readme.find("#include <cuda.h>").expect("the program");
    let code = readme[start..].split("```").next().unwrap_or_default();
    let folder = Program::folder("readme.c");
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join("readme.c"), code).expect("a file");
    fs::write(folder.join("cuda.h"), CUDA_H).expect("a file");
    let folder = folder.to_str().expect("a path").to_owned();
    let [headers, driver] = [format!("-I{folder}"), format!("{folder}/libcuda.so")];
    let Some(program) = Program::build("cc", "readme.c", &["-std=c11", &headers, "-Wl,--no-as-needed", &driver]) else {
        return;
    };
    assert_eq!(program.run(&[]), ("the last byte is 7\n".to_owned(), String::new()));
}

#[test]
fn a_cpp_program_frees_memory_as_it_exits() {
    let Some(program) = Program::build("c++", "exit.cpp", &["-std=c++17"]) else { return };
    assert_eq!(program.run(&[]), ("0 memory\n0 memory\n".to_owned(), String::new()));
}
