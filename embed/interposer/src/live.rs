//! The memory of the process while it runs, for others to watch.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::panic::catch_unwind;
use std::path::Path;
use std::sync::Once;
use std::thread;
use std::time::Duration;

use crate::gpu;
use crate::options::options;

/// The time between two readings.
const INTERVAL: Duration = Duration::from_millis(500);

/// Writes the first readings and starts the thread that writes more, if the environment asks for
/// them. Without such a thread there are no more, and the program runs on.
pub(crate) fn begin() {
    static ONCE: Once = Once::new();
    if let Some(folder) = &options().live {
        ONCE.call_once(|| {
            let _ = write(folder);
            without_signals(|| {
                let _ = thread::Builder::new().name("aquifer-live".into()).spawn(|| {
                    // Fails when the reader has ended and removed the folder.
                    while catch_unwind(|| write(folder)).is_ok_and(|written| written.is_ok()) {
                        thread::sleep(INTERVAL);
                    }
                });
            });
        });
    }
}

/// Starts a thread that gets no signals: they are the program's, and its handlers expect its
/// threads.
fn without_signals(start: impl FnOnce()) {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the set is written here.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: the first set was written above; the other is written here.
    let is_blocked = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) } == 0;
    start();
    if is_blocked {
        // SAFETY: the set was written when the signals were blocked.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
}

/// Replaces the file at once, so that a reader finds the former readings or these.
fn write(folder: &Path) -> io::Result<()> {
    let file = folder.join(std::process::id().to_string());
    let new = file.with_extension("new");
    fs::write(&new, readings())?;
    fs::rename(new, file)
}

/// A line for each device: its ordinal, limit, bytes reserved and allocated, the share of what is
/// reserved that is free beside live blocks and cannot go back, allocations and refusals since the
/// start.
fn readings() -> String {
    let mut lines = String::new();
    for gpu in gpu::served() {
        let (stats, found) = (gpu.allocator.stats(), gpu.allocator.fragmentation(0));
        let stranded = found.free_bytes.saturating_sub(found.releasable_bytes);
        #[expect(clippy::cast_precision_loss, reason = "a ratio to display")]
        let share = stranded as f64 / found.reserved_bytes.max(1) as f64;
        // Writing to a string cannot fail.
        let _ = writeln!(
            lines,
            "{} {} {} {} {share:.4} {} {}",
            gpu.ordinal,
            gpu.allocator.limit().unwrap_or_else(|| gpu.device.info().total_bytes),
            stats.reserved_bytes.all.current,
            stats.allocated_bytes.all.current,
            stats.allocation.all.allocated,
            stats.num_ooms
        );
    }
    lines
}
