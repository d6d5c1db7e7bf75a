//! Files of snapshots: their formats, and errors that leave nothing behind.

use std::fs::{self, OpenOptions};

use aquifer_device::Device;
use aquifer_sim::{SimConfig, SimDriver};

use super::*;
use crate::{Allocator, Config, TagScope};

/// A snapshot with a named block and a history.
fn snapshot() -> Snapshot {
    let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
    let allocator = Allocator::new(&device, Config::parse("history:100").unwrap()).unwrap();
    let _name = TagScope::new("weights");
    let _block = allocator.alloc_bytes(3 << 20, device.default_stream()).unwrap();
    drop(allocator.alloc_bytes(512, device.default_stream()).unwrap());
    allocator.snapshot()
}

/// A directory that is removed in the end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("aquifer-save-{}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Directory(path)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned()).collect();
        names.sort_unstable();
        names
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A disk that has room for so many bytes.
struct Disk(usize);

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = bytes.len().min(self.0);
        self.0 -= written;
        if written == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(written) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn written(snapshot: &Snapshot, format: FileFormat) -> Vec<u8> {
    let mut bytes = Vec::new();
    snapshot.write(format, &mut bytes).unwrap();
    bytes
}

#[test]
fn the_ending_names_the_format() {
    let directory = Directory::new("endings");
    let snapshot = snapshot();
    for (name, format) in [
        ("a.pickle", FileFormat::Pickle),
        ("b.pkl", FileFormat::Pickle),
        ("c.json", FileFormat::Json),
        ("d.x.JSON", FileFormat::Json),
    ] {
        snapshot.save(directory.0.join(name)).unwrap();
        assert_eq!(fs::read(directory.0.join(name)).unwrap(), written(&snapshot, format), "{name}");
    }
    assert_eq!(directory.names(), ["a.pickle", "b.pkl", "c.json", "d.x.JSON"]);
}

#[test]
fn other_endings_are_errors_that_name_the_known_ones() {
    for name in ["nowhere/a.txt", "nowhere/pickle", "nowhere/a.json.gz", "nowhere/.json", "nowhere/..", ""] {
        let error = snapshot().save(name).unwrap_err();
        assert!(matches!(&error, SaveError::UnknownEnding { path } if path == Path::new(name)), "{error}");
        let expected = format!("cannot save a snapshot as {name}: the name must end in .pickle, .pkl or .json");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_file_is_replaced() {
    let directory = Directory::new("replaced");
    let path = directory.0.join("s.json");
    fs::write(&path, "longer than any snapshot ".repeat(1000)).unwrap();
    let snapshot = snapshot();
    snapshot.save(&path).unwrap();
    assert_eq!(fs::read(&path).unwrap(), written(&snapshot, FileFormat::Json));
    assert_eq!(directory.names(), ["s.json"]);
}

#[test]
fn a_missing_directory_is_an_error() {
    let error = snapshot().save("/nonexistent/s.pickle").unwrap_err();
    assert!(matches!(&error, SaveError::Create { cause, .. } if cause.kind() == io::ErrorKind::NotFound), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("cannot save a snapshot as /nonexistent/s.pickle: no file can be created"), "{text}");
}

#[test]
fn a_directory_of_that_name_is_an_error_and_nothing_is_left() {
    let directory = Directory::new("named");
    let path = directory.0.join("s.pickle");
    fs::create_dir(&path).unwrap();
    let error = snapshot().save(&path).unwrap_err();
    assert!(matches!(error, SaveError::Rename { .. }), "{error}");
    assert_eq!(directory.names(), ["s.pickle"]);
}

#[test]
fn a_disk_that_is_full_at_any_byte_is_an_error() {
    let snapshot = snapshot();
    for format in [FileFormat::Pickle, FileFormat::Json] {
        let bytes = written(&snapshot, format).len();
        for room in 0..bytes {
            let error = snapshot.write(format, Disk(room)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{format:?} {room}");
        }
        snapshot.write(format, Disk(bytes)).unwrap();
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_device_that_is_always_full_is_an_error() {
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    for format in [FileFormat::Pickle, FileFormat::Json] {
        assert_eq!(snapshot().write(format, full()).unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}

#[test]
fn the_same_program_gives_the_same_file_but_for_times() {
    let timeless = || {
        let mut snapshot = snapshot();
        snapshot.device_traces.iter_mut().flatten().for_each(|entry| entry.time_us = 0);
        snapshot
    };
    let (one, two) = (timeless(), timeless());
    for format in [FileFormat::Pickle, FileFormat::Json] {
        assert_eq!(written(&one, format), written(&one, format));
        assert_eq!(written(&one, format), written(&two, format));
    }
}
