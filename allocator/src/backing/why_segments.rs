//! Why memory comes in segments where it could be mapped.

use std::fmt;

use aquifer_device::DeviceError;

use crate::format::Bytes;

/// Why an allocator's memory comes in segments: [`crate::Allocator::why_segments`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhySegments {
    /// The configuration says so: `backing:segments`.
    Chosen,
    /// The configuration says that nothing is cached: `no_cache:True`.
    NoCache,
    /// The device, or its driver, cannot map memory.
    DeviceCannot,
    /// The device has less memory than one granule.
    GranuleTooLarge {
        /// The least granule that the configuration and the device allow, if there is one.
        granule: Option<u64>,
        /// The device's memory in bytes.
        total: u64,
    },
    /// A driver call failed when the allocator was made and tried to map memory. It does not try
    /// again; another allocator does.
    Failed(DeviceError),
}

impl fmt::Display for WhySegments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WhySegments::Chosen => {
                write!(f, "segments were asked for (`backing:segments`; `backing:paged` maps memory)")
            }
            WhySegments::NoCache => write!(f, "nothing is cached (`no_cache:True`)"),
            WhySegments::DeviceCannot => write!(f, "the device cannot map memory"),
            WhySegments::GranuleTooLarge { granule: Some(granule), total } => {
                write!(
                    f,
                    "the device has {}, less than one granule of {} (`granule_mb`)",
                    Bytes(*total),
                    Bytes(*granule)
                )
            }
            WhySegments::GranuleTooLarge { granule: None, total } => {
                write!(f, "the device has {}, less than one granule (`granule_mb`)", Bytes(*total))
            }
            WhySegments::Failed(error) => {
                write!(f, "mapping memory failed when the allocator was made, and is tried again by a new one: {error}")
            }
        }
    }
}
