//! What the process writes: each finding when it is met first, and a summary when it ends.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

use serde_json::Value;

use crate::call::{find_questions, with_judge};
use crate::judge::Judge;

/// A forked child has a copy of the judge, and no device.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

fn file() -> Option<&'static PathBuf> {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    FILE.get_or_init(|| std::env::var_os("AQUIFER_CHECK").filter(|file| !file.is_empty()).map(PathBuf::from)).as_ref()
}

/// Whether calls are to be judged. The first one that is has the summary written at the end: after
/// the driver was started, so that it comes before the driver's own end.
pub(crate) fn is_wanted() -> bool {
    static ONCE: Once = Once::new();
    extern "C" fn end() {
        if let Some((repeated, summary)) = with_judge(Judge::summary) {
            repeated.iter().for_each(|finding| write(&finding.row()));
            write(&summary);
        }
    }
    extern "C" fn in_child() {
        IS_CHILD.store(true, Ordering::Relaxed);
    }
    if file().is_none() || IS_CHILD.load(Ordering::Relaxed) {
        return false;
    }
    ONCE.call_once(|| {
        find_questions();
        // SAFETY: the function does not unwind, and this library is never unloaded.
        unsafe { libc::atexit(end) };
        // SAFETY: as above; the function only stores to an atomic.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    true
}

/// Appends a line to the file.
pub(crate) fn write(line: &Value) {
    static FAILED: Once = Once::new();
    let Some(path) = file().filter(|_| !IS_CHILD.load(Ordering::Relaxed)) else { return };
    // In one write, so that lines of several processes do not mix.
    let append = |mut file: std::fs::File| file.write_all(format!("{line}\n").as_bytes());
    if let Err(error) = OpenOptions::new().append(true).create(true).open(path).and_then(append) {
        FAILED.call_once(|| eprintln!("aquifer: findings cannot be written: {}: {error}", path.display()));
    }
}

/// Says once that calls are not judged as they should be.
pub(crate) fn broken() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| eprintln!("aquifer: the checker failed at a call, and may miss what comes after it"));
}
