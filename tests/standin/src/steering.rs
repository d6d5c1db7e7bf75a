//! Steering a device of the loaded stand-in, and how the library's control functions are called.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::time::Duration;

use aquifer_device::Code;

use crate::control::{Buffer, Mapped, Number, SEPARATOR};
use crate::loader::{Functions, Refused, Standin, Text};

/// Room for text at first.
const TEXT_BYTES: usize = 4096;

/// A device of the stand-in, for a test to steer.
#[derive(Debug)]
pub struct StandinDevice {
    pub(crate) standin: &'static Standin,
    pub(crate) ordinal: u32,
    /// It was added, and is not the environment's.
    pub(crate) removed_on_drop: bool,
}

impl Drop for StandinDevice {
    fn drop(&mut self) {
        if self.removed_on_drop {
            // SAFETY: takes no pointers.
            unsafe { (self.standin.functions.standin_remove_device)(self.ordinal) };
        }
    }
}

impl StandinDevice {
    /// Its ordinal, by which CUDA programs open it.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn functions(&self) -> &'static Functions {
        &self.standin.functions
    }

    /// Adds faults, as settings of a simulated device:
    /// `fault=cuMemAlloc#3:out_of_memory,lost_at=9`. They count calls from now on, and end with the
    /// contexts of the device.
    ///
    /// # Errors
    /// When they cannot be understood.
    pub fn inject(&self, faults: &str) -> Result<(), Refused> {
        let faults = text_argument("standin_inject", faults)?;
        with_text("standin_inject", |text| {
            // SAFETY: text and buffer are valid during the call.
            unsafe { (self.functions().standin_inject)(self.ordinal, faults.as_ptr(), text) }
        })
        .map(|_| ())
    }

    /// Removes all faults. A lost device stays lost.
    pub fn clear_faults(&self) {
        // SAFETY: takes no pointers.
        self.must("standin_clear_faults", unsafe { (self.functions().standin_clear_faults)(self.ordinal) });
    }

    /// What the race detector found and was not taken yet, oldest first.
    pub fn violations(&self) -> Vec<String> {
        self.found(false)
    }

    /// Takes what the race detector found, oldest first.
    pub fn take_violations(&self) -> Vec<String> {
        self.found(true)
    }

    fn found(&self, take: bool) -> Vec<String> {
        let found = with_text("standin_violations", |text| {
            // SAFETY: the buffer is valid during the call.
            unsafe { (self.functions().standin_violations)(self.ordinal, take.into(), text) }
        });
        let found = self.expect(found);
        found.split(SEPARATOR).filter(|text| !text.is_empty()).map(str::to_owned).collect()
    }

    /// Lets virtual time pass, as a host that computes does.
    pub fn advance(&self, time: Duration) {
        // SAFETY: takes no pointers.
        self.must("standin_advance", unsafe { (self.functions().standin_advance)(self.ordinal, nanoseconds(time)) });
    }

    /// Keeps a stream, by the driver's handle, from starting later work for `time` from the end of
    /// its present work.
    ///
    /// # Errors
    /// When the stream is not live.
    pub fn stall(&self, stream: u64, time: Duration) -> Result<(), Refused> {
        // SAFETY: takes no pointers.
        answer("standin_stall", unsafe { (self.functions().standin_stall)(self.ordinal, stream, nanoseconds(time)) })
    }

    /// The bytes that another process holds from now on.
    pub fn set_other_process_bytes(&self, bytes: u64) {
        let set = self.functions().standin_set_other_process_bytes;
        // SAFETY: takes no pointers.
        self.must("standin_set_other_process_bytes", unsafe { set(self.ordinal, bytes) });
    }

    /// A number that only the simulated device knows.
    pub fn number(&self, which: Number) -> u64 {
        let number = out("standin_number", |number: Option<&mut MaybeUninit<u64>>| {
            // SAFETY: the pointer is valid during the call.
            unsafe { (self.functions().standin_number)(self.ordinal, which as u32, number) }
        });
        self.expect(number)
    }

    /// How often a function of the CUDA driver, by symbol such as `cuMemAlloc_v2`, got as far as
    /// this device.
    ///
    /// # Errors
    /// When there is no such function.
    pub fn calls(&self, function: &str) -> Result<u64, Refused> {
        let function = text_argument("standin_calls", function)?;
        out("standin_calls", |calls: Option<&mut MaybeUninit<u64>>| {
            // SAFETY: the pointers are valid during the call.
            unsafe { (self.functions().standin_calls)(self.ordinal, function.as_ptr(), calls) }
        })
    }

    /// What is mapped at an address.
    pub fn mapping_at(&self, ptr: u64) -> Option<Mapped> {
        let mapped = out("standin_mapping", |mapped: Option<&mut MaybeUninit<Mapped>>| {
            // SAFETY: the pointer is valid during the call.
            unsafe { (self.functions().standin_mapping)(self.ordinal, ptr, mapped) }
        });
        mapped.ok()
    }

    /// Keeps destructors of user objects from running until [`StandinDevice::run_destructors`]: as
    /// late as a driver may run them.
    pub fn hold_destructors(&self) {
        // SAFETY: takes no pointers.
        self.must("standin_destructors", unsafe { (self.functions().standin_destructors)(self.ordinal, 1) });
    }

    /// Waits until the destructors of all user objects without references have run, on a thread of
    /// the driver. What launches that are done hold is released first.
    pub fn run_destructors(&self) {
        // SAFETY: takes no pointers.
        self.must("standin_destructors", unsafe { (self.functions().standin_destructors)(self.ordinal, 0) });
    }

    /// Tells the race detector that the host touches pinned memory now, which CUDA cannot be
    /// told.
    pub fn host_access(&self, ptr: usize, bytes: usize, writes: bool) {
        let tell = self.functions().standin_host_access;
        // SAFETY: takes no pointers; the address is only looked up.
        self.must("standin_host_access", unsafe { tell(self.ordinal, ptr, bytes, writes.into()) });
    }

    /// Panics where a function fails that only a device which is gone can fail.
    fn must(&self, what: &'static str, code: u32) {
        self.expect(answer(what, code));
    }

    fn expect<T>(&self, outcome: Result<T, Refused>) -> T {
        outcome.unwrap_or_else(|refused| panic!("device {} of the stand-in: {refused}", self.ordinal))
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The outcome of a control function.
pub(crate) fn answer(what: &'static str, code: u32) -> Result<(), Refused> {
    match code {
        0 => Ok(()),
        code => Err(Refused { what, code: Code(code), text: String::new() }),
    }
}

pub(crate) fn text_argument(what: &'static str, text: &str) -> Result<CString, Refused> {
    CString::new(text).map_err(|error| Refused { what, code: Code::INVALID_VALUE, text: error.to_string() })
}

/// The result of a control function, which it stores if it succeeds.
pub(crate) fn out<T: Default>(
    what: &'static str,
    call: impl FnOnce(Option<&mut MaybeUninit<T>>) -> u32,
) -> Result<T, Refused> {
    let mut result = MaybeUninit::new(T::default());
    answer(what, call(Some(&mut result)))?;
    // SAFETY: initialised above.
    Ok(unsafe { result.assume_init() })
}

/// Calls a control function with room for text, again with more while it says that there was too
/// little.
pub(crate) fn with_text(what: &'static str, mut call: impl FnMut(Text<'_>) -> u32) -> Result<String, Refused> {
    let mut room = vec![0_u8; TEXT_BYTES];
    loop {
        let mut buffer = Buffer { start: room.as_mut_ptr().cast(), capacity: room.len(), length: 0 };
        let code = call(Some(&mut buffer));
        let length = buffer.length;
        if length < room.len() {
            room.truncate(length);
            let text = String::from_utf8_lossy(&room).into_owned();
            return answer(what, code).map(|()| text.clone()).map_err(|refused| Refused { text, ..refused });
        }
        room = vec![0; length + 1];
    }
}
