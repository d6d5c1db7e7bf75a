//! Requests that cannot be served as the caller made them, for all crates of Aquifer.

use crate::label::DeviceMismatch;

/// A request that cannot be served as the caller made it. Nothing was done. The errors of all
/// crates contain this one.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The caller passed a stream or memory of another device. Use one of the device that is
    /// needed, or copy the memory there.
    #[error("the {what} belongs to {devices}")]
    WrongDevice {
        /// What was passed.
        what: &'static str,
        /// Its device, and the one that was needed.
        devices: Box<DeviceMismatch>,
    },
    /// The caller asked for a range that is reversed or reaches beyond the end. Check it against
    /// the length.
    #[error("the range {start}..{end} is out of bounds for {len} elements")]
    OutOfBounds {
        /// First element asked for.
        start: u64,
        /// Element after the last.
        end: u64,
        /// Elements that there are.
        len: u64,
    },
    /// The caller asked for a length whose size in bytes overflows. Ask for less.
    #[error("{len} elements of {size} bytes are more bytes than this machine can address")]
    LengthOverflow {
        /// Elements asked for.
        len: u64,
        /// Size of one.
        size: u64,
    },
    /// The device, or the driver, cannot do what the caller asked for. Do it another way, or use
    /// another device.
    #[error("not supported here: this needs {what}")]
    Unsupported {
        /// What is missing.
        what: &'static str,
    },
}

crate::debug_as_display!(RequestError);

impl RequestError {
    /// The caller passed a stream or memory of the device with the identity `is`, where the device
    /// `needed` was needed.
    #[doc(hidden)]
    #[cold]
    pub fn wrong_device(what: &'static str, is: u32, needed: u32) -> RequestError {
        RequestError::WrongDevice { what, devices: DeviceMismatch::between(is, needed) }
    }

    /// The caller asked for the elements of `range`, which are not all within `len`.
    #[doc(hidden)]
    #[cold]
    pub fn out_of_bounds(range: std::ops::Range<usize>, len: usize) -> RequestError {
        RequestError::OutOfBounds { start: range.start as u64, end: range.end as u64, len: len as u64 }
    }
}
