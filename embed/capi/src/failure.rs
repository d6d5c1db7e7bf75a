//! Failures, as C callers see them: a status, and a text for each thread.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use aquifer::Error;
use aquifer::device::ErrorKind;
use aquifer_device::fork;

use crate::{AQUIFER_DEVICE_ERROR, AQUIFER_FORKED, AQUIFER_INVALID, AQUIFER_OK, AQUIFER_OUT_OF_MEMORY, AQUIFER_PANIC};

/// Why a function failed.
pub(crate) struct Failure {
    pub(crate) status: c_int,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn invalid(text: impl Into<String>) -> Failure {
        Failure { status: AQUIFER_INVALID, text: text.into() }
    }
}

impl<E: Into<Error>> From<E> for Failure {
    #[cold]
    fn from(error: E) -> Failure {
        let error = error.into();
        let status = match error.device() {
            _ if error.is_out_of_memory() => AQUIFER_OUT_OF_MEMORY,
            Some(device) if device.kind == ErrorKind::Forked => AQUIFER_FORKED,
            Some(_) => AQUIFER_DEVICE_ERROR,
            None => AQUIFER_INVALID,
        };
        Failure { status, text: error.to_string() }
    }
}

thread_local! {
    /// The status of the thread's last failure. It needs no destructor, so it is there until the thread is gone.
    static STATUS: Cell<c_int> = const { Cell::new(AQUIFER_OK) };
    /// Its text.
    static TEXT: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Runs the body of an exported function, but not in a forked child, where a lock of this library may never be released. A failure or a panic
/// is kept for `aquifer_last_error`, and the function returns `failed`.
pub(crate) fn guarded<R>(failed: R, body: impl FnOnce() -> Result<R, Failure>) -> R {
    if fork::is_child() {
        keep(Failure { status: AQUIFER_FORKED, text: fork::ADVICE.to_owned() });
        return failed;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(returned)) => returned,
        Ok(Err(failure)) => {
            keep(failure);
            failed
        }
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
            keep(Failure { status: AQUIFER_PANIC, text: format!("a panic within Aquifer: {text}") });
            failed
        }
    }
}

/// As [`guarded`], for functions that return a status.
pub(crate) fn status(body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    let done = guarded(None, || body().map(Some));
    done.map_or_else(last_status, |()| AQUIFER_OK)
}

/// As [`guarded`], for functions without a result: their failures also go to stderr, except those of a forked child, which frees what it
/// inherited as it exits.
pub(crate) fn printed(function: &str, body: impl FnOnce() -> Result<(), Failure>) {
    guarded((), || body().inspect_err(|failure| eprintln!("{function}: {}", failure.text)));
}

#[cold]
fn keep(failure: Failure) {
    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    STATUS.set(failure.status);
    // Fails while the thread ends, after its destructors ran.
    let _ = TEXT.try_with(|last| last.replace(Some(text)));
}

pub(crate) fn last_status() -> c_int {
    STATUS.get()
}

pub(crate) fn last_text() -> *const c_char {
    let text = TEXT.try_with(|last| last.borrow().as_deref().map(CStr::as_ptr));
    text.ok().flatten().unwrap_or(c"".as_ptr())
}
