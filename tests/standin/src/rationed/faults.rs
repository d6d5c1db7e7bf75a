//! Faults on order, as the simulated device has them: `aquifer_device::sim::Fault`.

use aquifer_device::sim::Fault;
use aquifer_device::{Code, ErrorKind, Operation};

/// The code of a device that fell off: `CUDA_ERROR_ECC_UNCORRECTABLE`.
const LOST: Code = Code(214);

/// The faults in force, with the calls that each has counted.
#[derive(Debug)]
pub(super) struct Faults {
    faults: Vec<(Fault, u64)>,
    chance: u64,
    lost: Option<Code>,
}

impl Faults {
    pub(super) fn new(faults: &[Fault], seed: u64) -> Faults {
        Faults { faults: faults.iter().map(|fault| (fault.clone(), 0)).collect(), chance: seed, lost: None }
    }

    pub(super) fn add(&mut self, fault: Fault) {
        self.faults.push((fault, 0));
    }

    pub(super) fn clear(&mut self) {
        self.faults.clear();
    }

    /// The most bytes that may be held from the device.
    pub(super) fn bytes_max(&self) -> u64 {
        let limits = self.faults.iter().filter_map(|(fault, _)| match fault {
            Fault::OutOfMemoryAt { bytes } => Some(*bytes),
            _ => None,
        });
        limits.min().unwrap_or(u64::MAX)
    }

    /// Counts a call and tells what it fails with. Of several faults the first that was added decides; after one that loses the
    /// device every call fails.
    pub(super) fn strike(&mut self, operation: Operation) -> Option<Code> {
        if self.lost.is_some() {
            return self.lost;
        }
        let mut struck = None;
        for (fault, count) in &mut self.faults {
            let code = match fault {
                Fault::Nth { operation: only, nth, code } if only.is_none_or(|only| only == operation) => {
                    *count += 1;
                    (*count == *nth).then_some(*code)
                }
                Fault::Rate { operation: only, rate, code } if only.is_none_or(|only| only == operation) => {
                    chance(&mut self.chance, *rate).then_some(*code)
                }
                Fault::LostAt { nth } => {
                    *count += 1;
                    (*count == *nth).then_some(LOST)
                }
                _ => None,
            };
            struck = struck.or(code);
        }
        self.lost = struck.filter(|code| code.kind() == ErrorKind::DeviceLost);
        struck
    }
}

/// True in the fraction `rate` of all calls: `SplitMix64`, so that one seed is one run.
fn chance(state: &mut u64, rate: f64) -> bool {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    // 53 bits make every representable fraction of a double in [0, 1).
    ((z >> 11) as f64) < rate * (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_faults_come_about_as_often_as_asked_and_repeat_with_the_seed() {
        let fault = Fault::Rate { operation: Some(Operation::Wait), rate: 0.1, code: Code(999) };
        let run = |seed| {
            let mut faults = Faults::new(std::slice::from_ref(&fault), seed);
            assert_eq!(faults.strike(Operation::Record), None);
            (0..10_000).map(|_| faults.strike(Operation::Wait).is_some()).collect::<Vec<_>>()
        };
        let failures = run(1).iter().filter(|&&failed| failed).count();
        assert!((800..1200).contains(&failures), "{failures}");
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn the_first_fault_decides_and_a_loss_is_for_good() {
        let nth = |nth, code| Fault::Nth { operation: None, nth, code };
        let mut faults = Faults::new(&[nth(1, Code::INVALID_VALUE), nth(1, Code(999)), Fault::LostAt { nth: 2 }], 0);
        let struck: Vec<_> = (0..3).map(|_| faults.strike(Operation::Wait)).collect();
        assert_eq!(struck, [Some(Code::INVALID_VALUE), Some(LOST), Some(LOST)]);
        faults.clear();
        assert_eq!(faults.strike(Operation::Wait), Some(LOST));
    }
}
