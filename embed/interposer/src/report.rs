//! What the process tells when it ends: how much memory there was, and what was not served.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Once, OnceLock};

use aquifer_allocator::snapshot::BlockState;
use aquifer_allocator::{AllocError, Bytes};

use crate::gpu::{self, Gpu};
use crate::options::{Report, options};

/// Why the driver answers a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// An option says so.
    Option,
    /// The stream captures.
    Capture,
    /// The context is not the primary one of its device, or it was reset.
    Context,
    /// The pool is the program's.
    Pool,
    /// The driver does not know the stream.
    Stream,
    /// The arguments are wrong.
    Invalid,
    /// Aquifer's own call.
    Inside,
    /// The memory was not allocated here.
    Foreign,
}

const REASONS: [(Why, &str); 4] = [
    (Why::Option, "AQUIFER_PASS names the function"),
    (Why::Capture, "the stream was being captured"),
    (Why::Context, "the context was not the device's primary one, or was reset"),
    (Why::Pool, "the pool was the program's own"),
];

static PASSED: [AtomicU64; REASONS.len()] = [const { AtomicU64::new(0) }; REASONS.len()];
static FIRST_REFUSAL: OnceLock<String> = OnceLock::new();

/// Counts an allocation that the driver makes.
pub(crate) fn passed(why: Why) {
    if let Some(place) = REASONS.iter().position(|(reason, _)| *reason == why) {
        PASSED[place].fetch_add(1, Ordering::Relaxed);
    }
}

/// Keeps the error of the first request that was refused for lack of memory.
pub(crate) fn refused(error: &AllocError) {
    if options().report.is_some() {
        FIRST_REFUSAL.get_or_init(|| error.to_string());
    }
}

pub(crate) fn snapshot_file() -> Option<&'static Path> {
    options().snapshot.as_deref()
}

/// Has the report written when the process ends. The first allocation asks for it, after the driver
/// was started: so it comes before the driver's own end.
pub(crate) fn at_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn end() {
        // There is nowhere to report this.
        let _ = catch_unwind(write);
    }
    if options().report.is_some() || snapshot_file().is_some() {
        ONCE.call_once(|| {
            // SAFETY: the function does not unwind, and this library is never unloaded.
            unsafe { libc::atexit(end) };
        });
    }
}

fn write() {
    // A child after `fork` has the parent's counts, and no memory.
    if aquifer_device::fork::is_child() {
        return;
    }
    for (place, gpu) in gpu::opened().enumerate() {
        if let Some(path) = snapshot_file().map(|path| numbered(path, place, gpu.ordinal))
            && let Err(error) = gpu.allocator.snapshot().save(&path)
        {
            eprintln!("aquifer: {error}");
        }
    }
    let written = match &options().report {
        None => Ok(()),
        Some(Report::Stderr) => std::io::stderr().write_all(text().as_bytes()),
        Some(Report::File(path)) => OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .and_then(|mut file| file.write_all(text().as_bytes())),
    };
    if let Err(error) = written {
        eprintln!("aquifer: the report could not be written: {error}");
    }
}

/// The file of a device's snapshot: the one that was named, and for every device after the first
/// one its ordinal before the extension.
fn numbered(path: &Path, place: usize, ordinal: u32) -> PathBuf {
    match path.extension() {
        Some(extension) if place > 0 => path.with_extension(format!("{ordinal}.{}", extension.to_string_lossy())),
        _ => path.to_owned(),
    }
}

fn text() -> String {
    let program = std::env::current_exe().unwrap_or_default();
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let mut text = format!("Aquifer: memory of {name} (process {})\n", std::process::id());
    for gpu in gpu::opened() {
        describe(&mut text, gpu);
    }
    if gpu::opened().next().is_none() {
        text.push_str("  no allocation was served\n");
    }
    for ((_, reason), count) in REASONS.iter().zip(&PASSED) {
        let count = count.load(Ordering::Relaxed);
        if count > 0 {
            let _ = writeln!(text, "  allocations left to the driver because {reason}: {count}");
        }
    }
    if let Some(refusal) = FIRST_REFUSAL.get() {
        let _ = writeln!(text, "  the first refusal:\n    {}", refusal.replace('\n', "\n    "));
    }
    text
}

fn describe(text: &mut String, gpu: &Gpu) {
    const SHOWN: usize = 5;
    let stats = gpu.allocator.stats();
    let of = |bytes| Bytes(bytes).to_string();
    let _ = writeln!(
        text,
        "  cuda:{} ({}): allocations served {}, refused for lack of memory {}\n    \
         peak: allocated {}, reserved {}\n    at the end: allocated {}, reserved {}",
        gpu.ordinal,
        gpu.device.info().name,
        stats.allocation.all.allocated,
        stats.num_ooms,
        of(stats.allocated_bytes.all.peak),
        of(stats.reserved_bytes.all.peak),
        of(stats.allocated_bytes.all.current),
        of(stats.reserved_bytes.all.current),
    );
    let snapshot = gpu.allocator.snapshot();
    let mut owners: BTreeMap<(u64, u32), u64> = BTreeMap::new();
    for (segment, block) in snapshot.blocks().filter(|(_, block)| block.state == BlockState::ActiveAllocated) {
        *owners.entry((block.size, segment.stream)).or_default() += 1;
    }
    let mut owners: Vec<_> = owners.into_iter().collect();
    owners.sort_by_key(|((bytes, _), count)| std::cmp::Reverse(bytes * count));
    for ((bytes, stream), count) in owners.iter().take(SHOWN) {
        let total = of(bytes * count);
        let _ = writeln!(text, "      {total}: {count} × {}, stream {stream}", of(*bytes));
    }
    if owners.len() > SHOWN {
        let rest: u64 = owners[SHOWN..].iter().map(|((bytes, _), count)| bytes * count).sum();
        let _ = writeln!(text, "      {}: other sizes", of(rest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_has_a_snapshot_of_its_own() {
        assert_eq!(numbered("a/x.pickle".as_ref(), 0, 3), Path::new("a/x.pickle"));
        assert_eq!(numbered("a/x.pickle".as_ref(), 1, 3), Path::new("a/x.3.pickle"));
    }
}
