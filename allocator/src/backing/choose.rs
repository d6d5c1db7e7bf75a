//! Chooses where an allocator's memory comes from.

use aquifer_device::{Device, ErrorKind};

use crate::backing::paged::probe::probe;
use crate::backing::why_segments::WhySegments;
use crate::config::{Backing, Config, GRANULE_MIN};
use crate::core::paged::granules::Paged;
use crate::error::AllocError;

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

/// Most granules that the memory of a device is divided into, unless the configuration says how
/// large they are. Each takes some hundred bytes of host memory.
const GRANULES_MAX: u64 = 1 << 18;

fn try_paged(device: &Device, config: &Config) -> Result<Paged, WhySegments> {
    let total = device.info().total_bytes;
    let granularity = device.info().granularity_bytes.filter(|&bytes| bytes > 0).ok_or(WhySegments::DeviceCannot)?;
    let wanted = config.granule.unwrap_or_else(|| total.div_ceil(GRANULES_MAX).max(GRANULE_MIN));
    let granule = wanted.max(granularity).checked_next_power_of_two();
    let fits = granule.filter(|&bytes| bytes <= total).ok_or(WhySegments::GranuleTooLarge { granule, total })?;
    let ability = probe(device, fits).map_err(WhySegments::Failed)?;
    Ok(Paged::new(fits, config.frame.map(|bytes| bytes.min(total)), ability, device.info().ordinal))
}

#[cfg(test)]
mod tests {
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::allocator::Allocator;

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
