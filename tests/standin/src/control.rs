//! The exported functions that steer the stand-in, for tests: C ABI, names `standin_*`, used
//! through [`crate::load`].
//!
//! They make no driver call: nothing is counted, no virtual time passes, no fault strikes. Text
//! goes into a caller's buffer with a closing NUL, cut to fit; how long it is in full is returned,
//! so that a caller can come again with more room.

use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer_device::{AccessKind, Code, DevicePtr, Driver as _, HostPtr, RawStream};
use aquifer_sim::SimConfig;

use crate::abi::{In, Out, needed, string, write_text};
use crate::environment;
use crate::fail::{self, Order};
use crate::process::{Device, Process};
use crate::user_objects;

/// Changes whenever these functions do, so that a loader does not talk to another version's
/// library.
pub(crate) const PROTOCOL: u32 = 4;

/// Separates entries of a list in text.
pub(crate) const SEPARATOR: char = '\u{1e}';

/// A number that a device can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u32)]
pub enum Number {
    /// Calls of the simulated device so far, failed ones included.
    CallsMade = 0,
    /// Virtual time since its start, in ns.
    NowNs = 1,
    /// Bytes of the device that this process holds.
    HeldBytes = 3,
    /// Bytes of pinned host memory.
    PinnedBytes = 4,
    /// Streams that were created and not destroyed.
    Streams = 5,
    /// How often the primary context is retained.
    Retained = 6,
    /// Devices whose plain memory the device was allowed to reach.
    Peers = 7,
    /// Events created so far for which a waiting host would spin, not sleep.
    SpinningEvents = 8,
    /// Objects other than device memory that were made and not given back: streams, events,
    /// captures, graphs, modules, pinned memory.
    LiveObjects = 9,
}

impl Number {
    const ALL: [Number; 9] = [
        Number::CallsMade,
        Number::NowNs,
        Number::HeldBytes,
        Number::PinnedBytes,
        Number::Streams,
        Number::Retained,
        Number::Peers,
        Number::SpinningEvents,
        Number::LiveObjects,
    ];

    fn of(self, device: &Device) -> u64 {
        let life = device.life();
        match self {
            Number::CallsMade => life.sim.calls_made(),
            Number::NowNs => life.sim.now_ns(),
            Number::HeldBytes => life.sim.held_bytes(),
            Number::PinnedBytes => life.pinned.bytes(),
            Number::Streams => life.streams.len() as u64,
            Number::Retained => (*device.primary.retained.lock()).into(),
            Number::Peers => life.peers.lock().len() as u64,
            Number::SpinningEvents => life.spinning_events.load(Ordering::Relaxed),
            Number::LiveObjects => {
                let live = life.sim.live_objects();
                let counts = [live.streams, live.events, live.captures, live.graphs, live.modules, live.host];
                counts.into_iter().sum::<usize>() as u64
            }
        }
    }
}

/// What is mapped at an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[repr(C)]
pub struct Mapped {
    /// Where the mapping starts.
    pub ptr: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Devices that may touch it: bit n for ordinal n, as far as there are bits.
    pub devices: u64,
    /// Network cards may touch it.
    pub rdma: bool,
    /// It can be exported.
    pub exportable: bool,
}

/// What a control function answers: 0, or a code.
type Answer = Result<(), Code>;

fn run(body: impl FnOnce() -> Answer) -> u32 {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(crate::abi::UNKNOWN));
    outcome.map_or_else(|code| code.0, |()| 0)
}

fn device(ordinal: u32) -> Result<Arc<Device>, Code> {
    let found = i32::try_from(ordinal).ok().and_then(|ordinal| Process::get().device(ordinal));
    found.ok_or(Code::INVALID_DEVICE)
}

/// A caller's buffer for text.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Buffer {
    pub(crate) start: *mut c_char,
    pub(crate) capacity: usize,
    /// How long the text is in full, in bytes, without the closing NUL.
    pub(crate) length: usize,
}

impl Buffer {
    /// Whether text of this length would be cut.
    fn cuts(&self, text: &str) -> bool {
        text.len() >= self.capacity
    }

    /// # Safety
    /// `start` must be null or writable for `capacity` bytes.
    unsafe fn put(&mut self, text: &str) {
        self.length = text.len();
        // SAFETY: passed on to the caller.
        unsafe { write_text(self.start, self.capacity, text) };
    }
}

/// Declares control functions.
macro_rules! control {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// Pointers must be null or valid, text must end with NUL, and buffers must have their
        /// capacity.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
            run(|| -> Answer { $body })
        }
    )*};
}

control! {
    /// The version of these functions.
    fn standin_protocol(version: Out<'_, u32>) {
        needed(version)?.write(PROTOCOL);
        Ok(())
    }

    /// What is wrong with the environment; `INVALID_VALUE` then.
    fn standin_check_environment(error: Option<&mut Buffer>) {
        match Process::get().environment() {
            Ok(_) => Ok(()),
            Err(text) => {
                // SAFETY: the caller vouches for the buffer.
                unsafe { needed(error)?.put(text) };
                Err(Code::INVALID_VALUE)
            }
        }
    }

    /// Adds a device as configured, and tells its ordinal. `INVALID_VALUE` and why, if it cannot be
    /// understood.
    fn standin_add_device(config: *const c_char, ordinal: Out<'_, u32>, error: Option<&mut Buffer>) {
        // SAFETY: the caller vouches for the text.
        let config = unsafe { string(config) }?;
        let out = needed(ordinal)?;
        match environment::device(config, None) {
            Ok(config) => {
                out.write(Process::get().add_device(config).ok_or(Code::OUT_OF_MEMORY)?);
                Ok(())
            }
            Err(text) => {
                // SAFETY: the caller vouches for the buffer.
                unsafe { needed(error)?.put(&text) };
                Err(Code::INVALID_VALUE)
            }
        }
    }

    /// Removes a device that was added. Its contexts are destroyed.
    fn standin_remove_device(ordinal: u32) {
        if Process::get().remove_device(ordinal) { Ok(()) } else { Err(Code::INVALID_DEVICE) }
    }

    /// Adds faults, as settings of a simulated device. `INVALID_VALUE` and why, if they cannot be
    /// understood.
    fn standin_inject(ordinal: u32, faults: *const c_char, error: Option<&mut Buffer>) {
        let life = device(ordinal)?.life();
        // SAFETY: the caller vouches for the text.
        let faults = unsafe { string(faults) }?;
        let wrong = match SimConfig::parse(&format!(",{faults}")) {
            Ok(config) if !config.faults.is_empty() => {
                config.faults.into_iter().for_each(|fault| life.sim.inject(fault));
                return Ok(());
            }
            Ok(_) => format!("{faults:?} names no fault"),
            Err(wrong) => wrong.to_string(),
        };
        // SAFETY: the caller vouches for the buffer.
        unsafe { needed(error)?.put(&wrong) };
        Err(Code::INVALID_VALUE)
    }

    /// Removes all faults. A lost device stays lost.
    fn standin_clear_faults(ordinal: u32) {
        device(ordinal)?.life().sim.clear_faults();
        Ok(())
    }

    /// What the race detector found, separated by the record separator (0x1E). `take` other than 0
    /// forgets what is returned whole.
    fn standin_violations(ordinal: u32, take: u32, text: Option<&mut Buffer>) {
        let device = device(ordinal)?;
        let buffer = needed(text)?;
        let separator = SEPARATOR.to_string();
        let mut found = device.violations(false).join(&separator);
        if take != 0 && !buffer.cuts(&found) {
            found = device.violations(true).join(&separator);
        }
        // SAFETY: the caller vouches for the buffer.
        unsafe { buffer.put(&found) };
        Ok(())
    }

    /// Lets virtual time pass.
    fn standin_advance(ordinal: u32, ns: u64) {
        device(ordinal)?.life().sim.advance(Duration::from_nanos(ns));
        Ok(())
    }

    /// Keeps a stream from starting later work for a while from the end of its present work.
    fn standin_stall(ordinal: u32, stream: u64, ns: u64) {
        let stalled = device(ordinal)?.life().sim.stall(RawStream(stream), Duration::from_nanos(ns));
        stalled.map_err(crate::abi::code)
    }

    /// The bytes that another process holds from now on.
    fn standin_set_other_process_bytes(ordinal: u32, bytes: u64) {
        device(ordinal)?.life().sim.set_other_process_bytes(bytes);
        Ok(())
    }

    /// The bytes that the driver keeps unused from now on, for its pool and for graphs that
    /// allocate.
    fn standin_set_kept_bytes(ordinal: u32, pool: u64, graphs: u64) {
        device(ordinal)?.life().sim.set_kept_bytes(pool, graphs);
        Ok(())
    }

    /// A number; see [`Number`].
    fn standin_number(ordinal: u32, which: u32, number: Out<'_, u64>) {
        let device = device(ordinal)?;
        let which = Number::ALL.into_iter().find(|known| *known as u32 == which).ok_or(Code::INVALID_VALUE)?;
        needed(number)?.write(which.of(&device));
        Ok(())
    }

    /// How often a function of the CUDA driver, by symbol, got as far as this device.
    fn standin_calls(ordinal: u32, function: *const c_char, calls: Out<'_, u64>) {
        let life = device(ordinal)?.life();
        // SAFETY: the caller vouches for the text.
        let function = unsafe { string(function) }?;
        crate::exports::find(function).ok_or(Code::INVALID_VALUE)?;
        needed(calls)?.write(life.calls(function));
        Ok(())
    }

    /// What is mapped at an address; `INVALID_VALUE` for nothing.
    fn standin_mapping(ordinal: u32, ptr: u64, mapped: Out<'_, Mapped>) {
        let found = device(ordinal)?.life().sim.mapping_at(DevicePtr(ptr)).ok_or(Code::INVALID_VALUE)?;
        let bits = found.devices.iter().filter_map(|&device| 1_u64.checked_shl(device));
        needed(mapped)?.write(Mapped {
            ptr: found.ptr.0,
            bytes: found.bytes,
            devices: bits.fold(0, |all, bit| all | bit),
            rdma: found.options.rdma,
            exportable: found.options.exportable.is_some(),
        });
        Ok(())
    }

    /// Tells that the host touches pinned memory now, for the race detector.
    fn standin_host_access(ordinal: u32, ptr: usize, bytes: usize, writes: u32) {
        let kind = if writes == 0 { AccessKind::Read } else { AccessKind::Write };
        device(ordinal)?.life().sim.host_access(HostPtr(ptr), bytes, kind).map_err(crate::abi::code)
    }

    /// Keeps destructors of the device's user objects from running, unless `hold` is 0: that ends
    /// it, and waits for those that are due.
    fn standin_destructors(ordinal: u32, hold: u32) {
        let life = device(ordinal)?.life();
        if hold != 0 {
            user_objects::hold(ordinal);
            return Ok(());
        }
        life.settle_user_objects();
        user_objects::end_hold(ordinal);
        user_objects::wait(ordinal);
        Ok(())
    }

    /// Makes the nth call (from 1) of a function, or of `any`, fail in the calling thread.
    fn standin_fail(function: *const c_char, nth: u64, code: u32) {
        // SAFETY: the caller vouches for the text.
        let function = unsafe { string(function) }?;
        fail::add(Order::new(function, nth, Code(code)).ok_or(Code::INVALID_VALUE)?);
        Ok(())
    }

    /// How many such orders of the calling thread are not carried out yet. They are forgotten if
    /// `clear` is not null.
    fn standin_orders_left(left: Out<'_, u64>, clear: In<'_, u32>) {
        needed(left)?.write(fail::left() as u64);
        if clear.is_some() {
            fail::clear();
        }
        Ok(())
    }
}
