//! Backings: where an allocator's memory comes from, and why it comes in segments where it could be mapped.

pub(crate) mod headroom;
pub(crate) mod paged;
pub(crate) mod segments;
mod trim;

pub use headroom::Refusal;
pub use paged::{Contents, Exportable, Growable, PinnedMapping};

use std::fmt;

use aquifer_device::{Device, DeviceError, ErrorKind};

use crate::allocator::Allocator;
use crate::backing::paged::{Paged, probe};
use crate::config::validate::GRANULE_MIN;
use crate::config::{Backing, Config};
use crate::error::AllocError;
use crate::format::Bytes;

/// Why an allocator's memory comes in segments: [`Allocator::why_segments`].
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
    /// A driver call failed when the allocator was made and tried to map memory. It does not try again; another allocator does.
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

impl Allocator {
    /// The backing in use: [`Config::backing`] where the device can map memory, else [`Backing::Segments`]. In the latter case a warning was
    /// logged, and [`Allocator::why_segments`] says why.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, WhySegments, config::Backing};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::parse("1GiB,vmm=off")?));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// assert_eq!(allocator.config().backing, Backing::Paged);
    /// assert_eq!(allocator.backing(), Backing::Segments);
    /// assert_eq!(allocator.why_segments(), Some(&WhySegments::DeviceCannot));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn backing(&self) -> Backing {
        if self.why_segments().is_some() { Backing::Segments } else { Backing::Paged }
    }

    /// The size in bytes of a granule, the unit in which physical memory is counted and mapped; `None` if memory comes in segments.
    pub fn granule_bytes(&self) -> Option<u64> {
        self.shell().core().paged.as_ref().map(|paged| paged.granule)
    }

    /// That memory has to be mapped for `what`, and why it is not.
    pub(crate) fn not_mapped(&self, what: &'static str) -> AllocError {
        // There is a reason wherever there is no mapped memory.
        let why = self.why_segments().cloned().unwrap_or(WhySegments::DeviceCannot);
        AllocError::NotMapped { what, why: Box::new(why) }
    }
}

/// The state of the paged backing; or why memory comes in segments.
pub(crate) fn choose(device: &Device, config: &Config) -> Result<Result<Paged, WhySegments>, AllocError> {
    if config.backing != Backing::Paged {
        return Ok(Err(WhySegments::Chosen));
    }
    if config.no_cache {
        return Ok(Err(WhySegments::NoCache));
    }
    let tried = try_paged(device, config);
    match &tried {
        Err(WhySegments::Failed(error)) if error.kind == ErrorKind::DeviceLost => Err(error.clone().into()),
        Err(why) => {
            tracing::warn!("memory comes in segments and not in mapped granules: {why}");
            Ok(tried)
        }
        Ok(_) => Ok(tried),
    }
}

/// Most granules that the memory of a device is divided into, unless the configuration says how large they are. Each takes some hundred
/// bytes of host memory.
const GRANULES_MAX: u64 = 1 << 18;

fn try_paged(device: &Device, config: &Config) -> Result<Paged, WhySegments> {
    let total = device.info().total_bytes;
    let granularity = device.info().granularity_bytes.filter(|&bytes| bytes > 0).ok_or(WhySegments::DeviceCannot)?;
    let wanted = config.granule.unwrap_or_else(|| total.div_ceil(GRANULES_MAX).max(GRANULE_MIN));
    let granule = wanted.max(granularity).checked_next_power_of_two();
    let fits = granule.filter(|&bytes| bytes <= total).ok_or(WhySegments::GranuleTooLarge { granule, total })?;
    let options = probe(device, fits).map_err(WhySegments::Failed)?;
    // Frames are at least as large as granules, and fit on the device.
    let frame = config.frame.map(|bytes| u32::try_from(bytes.min(total) / fits).unwrap_or(u32::MAX));
    let frame = frame.map(|granules| 1 << granules.max(1).ilog2());
    Ok(Paged::new(fits, frame, options, device.info().ordinal))
}

#[cfg(test)]
mod tests {
    use aquifer_device::sim::{SimConfig, SimDriver};

    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    #[test]
    fn granules_are_larger_where_there_would_be_too_many() {
        let granule = |capacity: u64, options: &str| {
            let device = Device::new(SimDriver::new(SimConfig::new(capacity)));
            Allocator::new(&device, Config::parse(options).unwrap()).unwrap().granule_bytes()
        };
        for (capacity, mib) in [(GIB, 2), (192 * GIB, 2), (512 * GIB, 2), (513 * GIB, 4), (1 << 46, 256)] {
            assert_eq!(granule(capacity, ""), Some(mib * MIB), "{capacity}");
        }
        assert_eq!(granule(1 << 46, "granule_mb:2"), Some(2 * MIB));
        assert_eq!(granule(1 << 46, "backing:segments"), None);
    }
}
