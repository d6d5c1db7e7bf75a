//! Copies of more than one range: rows of a matrix, and many copies at once.

use crate::driver::{DevicePtr, HostPtr};

/// One end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Device memory.
    Device(DevicePtr),
    /// Page-locked host memory that the driver allocated or registered. Ordinary memory is refused: such a copy would silently
    /// wait.
    Host(HostPtr),
}

/// Rows to be copied, of `width` bytes each. One end at least must be on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy2d {
    /// Where the first row goes.
    pub dst: Place,
    /// From the start of a row to the start of the next in bytes, at least `width`.
    pub dst_pitch: u64,
    /// Where the first row is.
    pub src: Place,
    /// From the start of a row to the start of the next in bytes, at least `width`.
    pub src_pitch: u64,
    /// Length of a row in bytes.
    pub width: u64,
    /// Number of rows.
    pub height: u64,
}

/// One of many copies. One end at least must be on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyPart {
    /// Where the bytes go.
    pub dst: Place,
    /// Where they are.
    pub src: Place,
    /// How many.
    pub bytes: u64,
}
