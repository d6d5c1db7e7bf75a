//! Configurations and faults as the text that the library takes: what [`SimConfig::parse`] reads.

use aquifer_device::Operation;
use aquifer_device::sim::{Fault, SimConfig};

/// A configuration. `None` for one that text cannot say. The ordinal is not part of it.
pub(crate) fn config(config: &SimConfig) -> Option<String> {
    (!config.panic_on_violation).then(|| config.to_string())
}

/// A fault. `None` for one that text cannot say.
pub(crate) fn fault(fault: &Fault) -> Option<String> {
    let name = |operation: &Option<Operation>| operation.map_or("any", Operation::name);
    Some(match fault {
        Fault::Nth { operation, nth, code } => format!("fault={}#{nth}:{}", name(operation), code.0),
        Fault::Rate { operation, rate, code } => format!("fault_rate={}:{rate}:{}", name(operation), code.0),
        Fault::OutOfMemoryAt { bytes } => format!("oom_at={bytes}"),
        Fault::LostAt { nth } => format!("lost_at={nth}"),
        Fault::Spike { rate, duration } => format!("spike={rate}:{}ns", duration.as_nanos()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_device::Code;
    use aquifer_device::sim::Preset;
    use std::time::Duration;

    #[test]
    fn text_says_the_same() {
        let faults = [
            Fault::Nth { operation: Some(Operation::Alloc), nth: 3, code: Code::OUT_OF_MEMORY },
            Fault::Nth { operation: None, nth: 1, code: Code(999) },
            Fault::Rate { operation: None, rate: 0.123_456_789, code: Code(999) },
            Fault::OutOfMemoryAt { bytes: 5 << 30 },
            Fault::LostAt { nth: 17 },
            Fault::Spike { rate: 0.001, duration: Duration::from_micros(5) },
        ];
        let full = SimConfig::preset(Preset::Rtx4090).seed(7).jitter(false).vmm(false).export(false);
        let full = faults.into_iter().fold(full.other_process_bytes(1 << 20).link_gb_s(55), SimConfig::fault);
        for whole in [SimConfig::default(), SimConfig::new(123_456_789), full] {
            assert_eq!(SimConfig::parse(&config(&whole).unwrap()), Ok(whole));
        }
        assert_eq!(config(&SimConfig::default().panic_on_violation(true)), None);
    }
}
