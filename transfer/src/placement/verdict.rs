//! Verdicts on devices, and the error that has those of all devices.

use std::fmt;

use aquifer_allocator::Bytes;
use aquifer_device::{DeviceInfo, DeviceLabel};
use aquifer_kernels::DType;

/// The verdict on one device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Verdict {
    /// Facts about the device.
    pub info: DeviceInfo,
    /// Bytes that could be allocated there, if known.
    pub free: Option<u64>,
    /// The reasons against it; empty if it can be chosen.
    pub refusals: Vec<Refused>,
}

/// A reason against a device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Refused {
    /// It has too little free memory.
    Memory {
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// Its compute capability is too low.
    Capability {
        /// The requirement, major and minor number.
        needed: (u32, u32),
        /// The device's, major and minor number.
        has: (u32, u32),
    },
    /// It lacks instructions for a dtype.
    DType {
        /// The dtype.
        dtype: DType,
        /// The missing instructions.
        missing: &'static str,
    },
    /// Its driver is too old. Install a newer one.
    Driver {
        /// The CUDA version that it must know, major and minor number.
        needed: (u32, u32),
        /// The driver's, major and minor number.
        has: (u32, u32),
    },
    /// It could not be opened or queried.
    Failed(String),
}

/// No device serves; the verdicts have the reasons. Free memory, ask for less, or allow
/// [`crate::Fallback::Host`].
#[derive(Clone, Debug, thiserror::Error)]
#[error("no device serves: {}", Verdicts { all: verdicts, except: None })]
#[non_exhaustive]
pub struct NoDevice {
    /// The verdict on each device, in the order of the candidates.
    pub verdicts: Vec<Verdict>,
}

/// Verdicts in a message, without the one on the chosen device.
pub(super) struct Verdicts<'a> {
    pub(super) all: &'a [Verdict],
    pub(super) except: Option<usize>,
}

impl fmt::Display for Verdicts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.all.is_empty() {
            return f.write_str("none was given");
        }
        let others = self.all.iter().enumerate().filter(|(index, _)| Some(*index) != self.except);
        for (position, (_, verdict)) in others.enumerate() {
            write!(f, "{}{}: ", if position > 0 { "; " } else { "" }, DeviceLabel::from(&verdict.info))?;
            if verdict.refusals.is_empty() {
                write!(f, "would serve, with {} free", Bytes(verdict.free.unwrap_or(0)))?;
            }
            for (position, refused) in verdict.refusals.iter().enumerate() {
                write!(f, "{}{refused}", if position > 0 { ", " } else { "" })?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Memory { needed, free } => write!(f, "has {} free of the {} needed", Bytes(*free), Bytes(*needed)),
            Refused::Capability { needed, has } => {
                write!(f, "has compute capability {}.{}, {}.{} is needed", has.0, has.1, needed.0, needed.1)
            }
            Refused::DType { dtype, missing } => write!(f, "cannot compute {dtype} natively: it lacks {missing}"),
            Refused::Driver { needed, has } => {
                write!(f, "has a driver for CUDA {}.{}, {}.{} is needed", has.0, has.1, needed.0, needed.1)
            }
            Refused::Failed(what) => f.write_str(what),
        }
    }
}
