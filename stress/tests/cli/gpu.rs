//! The program on a machine with a GPU: the stand-in for NVIDIA's driver, under the driver's name
//! in a folder of the test.
#![cfg(target_os = "linux")]

use std::io::Write;

use super::*;

/// A folder with a driver, removed at the end.
struct Driver(PathBuf);

impl Driver {
    fn new(name: &str) -> Driver {
        let built = Path::new(env!("CARGO_BIN_EXE_aquifer-stress")).parent().unwrap();
        let library = built.join("deps/libaquifer_standin.so");
        let folder = std::env::temp_dir().join(format!("aquifer-stress-{}-{name}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        std::os::unix::fs::symlink(library, folder.join("libcuda.so.1")).unwrap();
        Driver(folder)
    }

    /// Runs the program where this driver has a GPU of 4 GiB.
    fn run(&self, args: &[&str]) -> Output {
        let mut program = program(args);
        program.env_remove("CUDA_VISIBLE_DEVICES").env("LD_LIBRARY_PATH", &self.0);
        program.env("AQUIFER_STANDIN_DEVICES", "4GiB").output().unwrap()
    }

    fn rows(&self, code: i32, args: &[&str]) -> Vec<Value> {
        let output = self.run(&[args, &["--json"]].concat());
        let rows = rows_of(code, &output);
        assert!(errors(&output).contains("stand-in driver"), "the driver was not found: {}", errors(&output));
        rows
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn commands_with_devices_of_several_sizes_simulate_them_by_default() {
    let (driver, file) = (Driver::new("sizes"), data("fsdp_start.trace"));
    for args in [&["fit", &file][..], &["compare", "--config", "", "--repeat", "1", &file], &[]] {
        let output = driver.run(args);
        let said = errors(&output);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {said}");
        assert!(said.contains("device sim:80GiB: ") && said.contains("devices of several sizes"), "{args:?}: {said}");
        assert!(!said.contains("cuda"), "{args:?}: {said}");
    }
    let output = driver.run(&["demo", "--device", "cuda:0"]);
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    assert!(errors(&output).contains("demo simulates devices"), "{}", errors(&output));
    // The default size is no device that was asked for.
    let row = &rows_of(0, &driver.run(&["explain", "--json", "--device", "cuda:0", &file]))[0];
    let answer = row["answers"][0]["answer"].as_str().unwrap();
    assert!(answer.starts_with("In the recording, no request was refused."), "{answer}");
}

/// A GPU has one size, so limits replace smaller ones. The result is that of simulated devices.
#[test]
fn fit_uses_limits_on_a_gpu() {
    let (driver, file) = (Driver::new("fits"), data("fsdp_start.trace"));
    let small = driver.0.join("small.trace");
    std::fs::write(&small, "a 0 3000000 0\na 1 5000000 0\nf 0 0\na 2 7000000 0\nf 1 0\nf 2 0\n").unwrap();
    let small = small.display().to_string();
    let fit = |device: &str| rows_of(0, &driver.run(&["fit", "--json", "--device", device, &small])).remove(0);
    let (there, here) = (fit("cuda:0"), fit("sim:4GiB"));
    assert_eq!(there, here);
    let compared = driver.rows(0, &["compare", "--device", "cuda:0", "--config", "", "--repeat", "1", &small]);
    assert_eq!(compared[0]["smallest_device_bytes"], there["smallest_device_bytes"]);
    let output = driver.run(&["fit", "--device", "cuda:0", &file]);
    assert_eq!(output.status.code(), Some(3), "{}", errors(&output));
    assert!(errors(&output).contains("GiB that are free on cuda:0"), "{}", errors(&output));
}

#[test]
fn other_commands_use_the_gpu_unless_it_is_hidden() {
    let driver = Driver::new("choice");
    let args = ["oom", "--way", "too_big", "--json"];
    assert!(rows_of(0, &driver.run(&args)).iter().all(|row| row["device"] == "cuda:0"));
    let hidden = program(&args).env("LD_LIBRARY_PATH", &driver.0).output().unwrap();
    assert!(rows_of(0, &hidden).iter().all(|row| row["device"] == "sim:80GiB"));
    assert!(errors(&hidden).contains("CUDA_VISIBLE_DEVICES"), "{}", errors(&hidden));
}

#[test]
fn oom_leaves_some_memory_of_a_gpu_alone() {
    let driver = Driver::new("oom");
    let rows = driver.rows(0, &["oom"]);
    assert_eq!(rows.len(), 9);
    for row in rows.iter().filter(|row| row["skipped"].is_null()) {
        assert!(row["refused"] == true || ["pending", "reclaimers"].iter().any(|way| row["way"] == *way), "{row}");
        assert!(bytes(row, "reserved_bytes_before") <= (4 << 30) - (256 << 20), "{row}");
    }
}

#[test]
fn on_a_gpu_requests_to_the_driver_are_timed() {
    let driver = Driver::new("measured");
    let file = Scratch::new("measured.trace", b"a 0 30000000 0\nf 0 0\na 1 512 0\nf 1 0\na 0 30000000 0\nf 0 0\n");
    let row = &driver.rows(0, &["replay", "--config", "backing:segments", file.path()])[0];
    let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
    assert_eq!((bytes(row, "allocs"), bytes(row, "driver_allocs")), (3, 2));
    let (all, worst) = (number("driver_allocs_measured_us"), number("worst_alloc_measured_us"));
    assert!(worst > 0.0 && worst < all && all <= 2.0 * worst + 0.02, "{row}");
    assert!(row["driver_time_modelled_us"].is_null() && row["worst_alloc_us"].is_null(), "{row}");
}

/// A replacement of PyTorch for `ci/pytorch_replay.py`: every block has memory of its own.
const TORCH: &str = r#"
import types
__version__ = "made up"
class OutOfMemoryError(Exception):
    pass
class Stream:
    cuda_stream = 7
    def synchronize(self):
        pass
live, peak = {}, 0
def alloc(size, stream):
    global peak
    address = max(live, default=0) + 512
    live[address] = size
    peak = max(peak, sum(live.values()))
    return address
_C = types.SimpleNamespace(
    _cuda_cudaCachingAllocator_raw_alloc=alloc, _cuda_cudaCachingAllocator_raw_delete=lambda address: live.pop(address))
memory = types.SimpleNamespace(
    reset_peak_memory_stats=lambda: None, max_memory_reserved=lambda: peak, get_allocator_backend=lambda: "native")
cuda = types.SimpleNamespace(
    memory=memory, Stream=Stream, default_stream=Stream, empty_cache=lambda: None, get_device_name=lambda: "none",
    memory_stats=dict)
"#;

/// Runs `ci/gpu-run` on a bundle of this program.
#[test]
fn a_run_on_a_gpu_leaves_the_rows_of_every_step() {
    if ["bash", "tar", "setsid", "python3"].iter().any(|tool| Command::new(tool).arg("--version").output().is_err()) {
        eprintln!("skipped: ci/gpu-run needs bash, tar, setsid and python3");
        return;
    }
    let driver = Driver::new("run");
    let bundle = &driver.0;
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    std::fs::create_dir(bundle.join("traces")).unwrap();
    std::fs::write(bundle.join("torch.py"), TORCH).unwrap();
    std::fs::write(bundle.join("VERSION"), "of-the-test").unwrap();
    let link = |from: PathBuf, name: &str| std::os::unix::fs::symlink(from, bundle.join(name)).unwrap();
    link(env!("CARGO_BIN_EXE_aquifer-stress").into(), "aquifer-stress");
    let trace: String = (0..500)
        .map(|n| {
            format!("a {n} {} 0\n{}", 1000 * n + 1, if n < 3 { String::new() } else { format!("f {} 0\n", n - 3) })
        })
        .collect();
    let file = std::fs::File::create(bundle.join("traces/small.trace.gz")).unwrap();
    flate2::write::GzEncoder::new(file, flate2::Compression::fast()).write_all(trace.as_bytes()).unwrap();
    for script in ["gpu-run", "pytorch_replay.py"] {
        std::fs::copy(project.join("ci").join(script), bundle.join(script)).unwrap();
    }
    let run = Command::new("bash")
        .arg(bundle.join("gpu-run"))
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env("LD_LIBRARY_PATH", bundle)
        .env("PYTHONPATH", bundle)
        .env("AQUIFER_STANDIN_DEVICES", "24GiB")
        .env("GPU_SMALL", "1")
        .env("GPU_STEPS", "replay pytorch")
        .output()
        .unwrap();
    let summary = std::fs::read_to_string(bundle.join("out/summary.txt")).unwrap();
    assert!(run.status.success() && summary.contains("all steps passed"), "{summary}{}", errors(&run));
    assert!(summary.contains("of-the-test"), "{summary}");
    let unpacked = Command::new("tar").current_dir(bundle).args(["-xzf", "out/results.tgz"]).status().unwrap();
    assert!(unpacked.success());
    let rows = |step: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(bundle.join(format!("{step}.txt"))).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let replayed = rows("replay");
    assert_eq!(replayed.iter().map(|row| &row["config"]).collect::<Vec<_>>(), ["", "backing:segments"]);
    // The figures of both have the same names.
    let torch = &rows("pytorch")[0];
    for key in ["ns_per_op", "first_pass_ns_per_op", "seconds"] {
        let measured = |row: &Value, key: &str| row[key].as_f64().is_some_and(|time| time > 0.0);
        assert!(measured(torch, key), "{key} in {torch}");
        assert!(replayed.iter().all(|row| measured(row, key) && measured(row, &format!("pool_{key}"))), "{key}");
    }
    assert!(replayed.iter().all(|row| row["events"] == torch["events"] && row["trace"] == torch["trace"]), "{torch}");
}
