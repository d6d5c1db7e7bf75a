//! The memory of the process while it runs, for others to watch.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Once;
use std::thread;
use std::time::Duration;

use crate::gpu;
use crate::options::options;

/// The time between two readings.
const INTERVAL: Duration = Duration::from_millis(500);

/// Starts the thread that writes the readings, if the environment asks for them. Without such a
/// thread there are none, and the program runs on.
pub(crate) fn begin() {
    static ONCE: Once = Once::new();
    if let Some(folder) = &options().live {
        ONCE.call_once(|| {
            let _ = thread::Builder::new().name("aquifer-live".into()).spawn(|| {
                // Fails when the reader has ended and removed the folder.
                while write(folder).is_ok() {
                    thread::sleep(INTERVAL);
                }
            });
        });
    }
}

/// Replaces the file at once, so that a reader finds the former readings or these.
fn write(folder: &Path) -> io::Result<()> {
    let file = folder.join(std::process::id().to_string());
    let new = file.with_extension("new");
    fs::write(&new, readings())?;
    fs::rename(new, file)
}

/// A line for each device: its ordinal and its bytes, bytes reserved and allocated, external
/// fragmentation from 0 to 1, allocations and refusals since the start.
fn readings() -> String {
    let mut lines = String::new();
    for gpu in gpu::opened() {
        let (stats, external) = (gpu.allocator.stats(), gpu.allocator.fragmentation(0).external);
        // Writing to a string cannot fail.
        let _ = writeln!(
            lines,
            "{} {} {} {} {external:.4} {} {}",
            gpu.ordinal,
            gpu.device.info().total_bytes,
            stats.reserved_bytes.all.current,
            stats.allocated_bytes.all.current,
            stats.allocation.all.allocated,
            stats.num_ooms
        );
    }
    lines
}
