//! How a function of the CUDA driver's C ABI is declared: its name, the CUDA version that brought
//! it, and a body that answers with a code.
//!
//! Invariants: no panic leaves the library (it becomes `CUDA_ERROR_UNKNOWN`); a null pointer where
//! a value must go is `CUDA_ERROR_INVALID_VALUE`; nothing is written through an output pointer
//! unless the function succeeds, except where CUDA documents otherwise; no code leaves the library
//! that bindings could not know.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use aquifer_device::{Code, DeviceError};

use crate::fail;
use crate::process::{Device, Life, Process};
use crate::{thread, user_objects};

/// The result of a call: nothing, or the code that it fails with.
pub(crate) type Answer<T = ()> = Result<T, Code>;

/// Where a result goes. A C caller passes a pointer; null means none.
pub(crate) type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Where an argument comes from. A C caller passes a pointer; null means none.
pub(crate) type In<'a, T> = Option<&'a T>;

/// A value that a call replaces.
pub(crate) type InOut<'a, T> = Option<&'a mut T>;

/// A pointer to an object of the driver, which callers only pass around.
pub(crate) type Handle = u64;

const _: () = assert!(size_of::<Handle>() == size_of::<*const ()>(), "handles stand for pointers");

/// Codes that only this library answers with.
pub(crate) const NOT_INITIALIZED: Code = Code(3);
pub(crate) const INVALID_CONTEXT: Code = Code(201);
pub(crate) const NO_BINARY_FOR_GPU: Code = Code(209);
pub(crate) const INVALID_PTX: Code = Code(218);
pub(crate) const UNSUPPORTED_PTX_VERSION: Code = Code(222);
pub(crate) const NOT_FOUND: Code = Code(500);
pub(crate) const LAUNCH_OUT_OF_RESOURCES: Code = Code(701);
pub(crate) const CONTEXT_IS_DESTROYED: Code = Code(709);
pub(crate) const CAPTURE_WRONG_THREAD: Code = Code(908);
pub(crate) const UNKNOWN: Code = Code(999);

/// An exported function of the CUDA driver.
pub(crate) struct Entry {
    /// The symbol, version suffix included.
    pub(crate) name: &'static str,
    /// The CUDA version that brought it, as `1000 * major + 10 * minor`.
    pub(crate) since: u32,
    /// The function's address.
    pub(crate) address: fn() -> u64,
}

/// Declares functions of the C ABI, and lists them in `ENTRIES`.
///
/// `since NAME(call, argument: type, …) { body }`: the body sees the call and evaluates to an
/// [`Answer`].
macro_rules! abi {
    ($($(#[$doc:meta])* $since:literal $name:ident($call:ident $(, $arg:ident: $type:ty)* $(,)?) $body:block)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// Pointers must be null or point to what the CUDA driver's documentation of this
            /// function asks for.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
                $crate::abi::answer(stringify!($name), |$call: &$crate::abi::Call| -> $crate::abi::Answer { $body })
            }
        )*

        /// What this file exports.
        pub(crate) const ENTRIES: &[$crate::abi::Entry] = &[$($crate::abi::Entry {
            name: stringify!($name),
            since: $since,
            address: || ($name as *const ()).expose_provenance() as u64,
        }),*];
    };
}
pub(crate) use abi;

/// Answers a call with the code of the body's result, 0 for success. Host functions must not call
/// the driver (CUDA driver API, documentation of `cuLaunchHostFunc`).
pub(crate) fn answer(name: &'static str, body: impl FnOnce(&Call) -> Answer) -> u32 {
    // NVML is not the driver.
    if name.starts_with("nvml") {
        return carry_out(name, body, |code| code);
    }
    if !thread::begin_call() {
        return Code::NOT_PERMITTED.0;
    }
    let answer = carry_out(name, body, presentable);
    if thread::end_call() {
        user_objects::call_ended();
    }
    answer
}

/// Carries a call out; `shown` says which code the caller gets.
fn carry_out(name: &'static str, body: impl FnOnce(&Call) -> Answer, shown: fn(Code) -> Code) -> u32 {
    let run = || fail::strike(name).and_then(|()| body(&Call { name }));
    // What a panic may leave half done is the simulated device's own state, which it repairs no
    // better or worse than the caller could: the tests that see the code fail anyway.
    let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or(Err(UNKNOWN));
    outcome.map_or_else(|code| shown(code).0, |()| 0)
}

/// Bindings may hold codes in an enumeration, where a value that is not in it would be undefined
/// behaviour.
fn presentable(code: Code) -> Code {
    if crate::errors::is_known(code) { code } else { UNKNOWN }
}

/// A call in progress.
pub(crate) struct Call {
    name: &'static str,
}

impl Call {
    /// The function's name.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// The process's driver, once `cuInit` succeeded.
    pub(crate) fn process(&self) -> Answer<&'static Process> {
        let process = Process::get();
        if process.is_started() { Ok(process) } else { Err(NOT_INITIALIZED) }
    }

    /// A device by ordinal.
    pub(crate) fn device(&self, ordinal: i32) -> Answer<Arc<Device>> {
        self.process()?.device(ordinal).ok_or(Code::INVALID_DEVICE)
    }

    /// What the calling thread's current context stands for.
    pub(crate) fn life(&self) -> Answer<Arc<Life>> {
        let life = self.process()?.current()?.life()?;
        life.count(self.name);
        Ok(life)
    }

    /// As [`Call::life`], for a call that CUDA counts among the potentially unsafe ones while
    /// something captures; see [`crate::capture`].
    pub(crate) fn guarded_life(&self) -> Answer<Arc<Life>> {
        let life = self.life()?;
        life.forbid_in_capture()?;
        Ok(life)
    }
}

/// A pointer that must not be null.
pub(crate) fn needed<T>(pointer: Option<T>) -> Answer<T> {
    pointer.ok_or(Code::INVALID_VALUE)
}

/// Stores a result where the caller wants it.
pub(crate) fn offer<T>(out: Out<'_, T>, value: T) {
    if let Some(out) = out {
        out.write(value);
    }
}

/// The code of a failed call of the simulated device.
pub(crate) fn code(error: DeviceError) -> Code {
    error.code
}

/// Flags with bits that do not exist are refused.
pub(crate) fn check_flags(flags: u32, known: u32) -> Answer {
    if flags & !known == 0 { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

/// A caller's C string.
///
/// # Safety
/// `text` must be null or point to a string that ends with NUL.
pub(crate) unsafe fn string<'a>(text: *const c_char) -> Answer<&'a str> {
    if text.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller vouches for the string.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Code::INVALID_VALUE)
}

/// A caller's array. Null is an array of no elements, and nothing else.
///
/// # Safety
/// `first` must be null or point to `count` elements.
pub(crate) unsafe fn array<'a, T>(first: *const T, count: usize) -> Answer<&'a [T]> {
    match (first.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Code::INVALID_VALUE),
        // SAFETY: not null, and the caller vouches for the elements.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(first, count) }),
    }
}

/// Copies text with a closing NUL into a caller's buffer, cut to fit.
///
/// # Safety
/// `buffer` must be null or writable for `capacity` bytes.
pub(crate) unsafe fn write_text(buffer: *mut c_char, capacity: usize, text: &str) {
    if buffer.is_null() || capacity == 0 {
        return;
    }
    let mut bytes = text.as_bytes()[..text.len().min(capacity - 1)].to_vec();
    bytes.push(0);
    // SAFETY: there are at most as many bytes as the buffer has, which the caller vouches for.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), bytes.len()) };
}
