//! How a call of the program is answered: here, or by the driver.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_allocator::AllocError;
use aquifer_device::{DeviceError, fork};

use crate::driver::{NOT_INITIALIZED, OUT_OF_MEMORY, UNKNOWN};
use crate::report::{self, Why};

/// Why a call was not served here.
#[derive(Debug)]
pub(crate) enum Instead {
    /// The driver is to answer.
    Driver(Why),
    /// This is the answer.
    Code(u32),
}

/// What serving a call gives.
pub(crate) type Served<T = ()> = Result<T, Instead>;

impl From<AllocError> for Instead {
    fn from(error: AllocError) -> Instead {
        if error.is_out_of_memory() {
            report::refused(&error);
            return Instead::Code(OUT_OF_MEMORY);
        }
        tell(&error);
        Instead::Code(error.device().map_or(UNKNOWN, |error| error.code.0))
    }
}

impl From<DeviceError> for Instead {
    fn from(error: DeviceError) -> Instead {
        Instead::from(AllocError::from(error))
    }
}

/// Writes the first error that the driver's code alone would not explain. Those after it are mostly
/// the same one again.
fn tell(error: &AllocError) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| eprintln!("aquifer: {error}"));
}

/// The answer in a forked child. The first call there writes why.
#[cold]
fn forked() -> u32 {
    static ONCE: AtomicBool = AtomicBool::new(false);
    if !ONCE.swap(true, Ordering::Relaxed) {
        let text = format!("aquifer: {}\n", fork::ADVICE);
        // Not with `eprintln`: a thread of the parent may have held its lock.
        // SAFETY: the bytes are readable.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    }
    NOT_INITIALIZED
}

/// Turns a code of the driver's into a result.
pub(crate) fn check(code: u32) -> Served {
    if code == 0 { Ok(()) } else { Err(Instead::Code(code)) }
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Answers a call with `serve`, or with `pass` where the driver is to answer. In a child that was
/// forked after a GPU was opened, neither is called: the answer is the one that CUDA has for that.
///
/// A driver might call functions that it exports by name and find those here, while Aquifer calls
/// it. Such calls go back to it.
pub(crate) fn answer(serve: impl FnOnce() -> Served, pass: impl FnOnce(Why) -> u32) -> u32 {
    if fork::is_child() {
        return forked();
    }
    if INSIDE.replace(true) {
        return pass(Why::Inside);
    }
    let served = catch_unwind(AssertUnwindSafe(serve));
    INSIDE.set(false);
    match served {
        Ok(Ok(())) => 0,
        Ok(Err(Instead::Code(code))) => code,
        Ok(Err(Instead::Driver(why))) => pass(why),
        Err(_) => UNKNOWN,
    }
}
