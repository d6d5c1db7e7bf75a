//! Fault injection: driver calls that fail, take long, or lose the device.
//!
//! A fault strikes before the call does anything, so a call that fails by a fault has no effect.

use std::fmt;
use std::time::Duration;

#[cfg(doc)]
use aquifer_device::ErrorKind;
use aquifer_device::{Code, Operation};

use crate::rng::Rng;

/// A fault to inject.
///
/// Calls are counted from the moment the fault is added (for faults of a [`crate::SimConfig`], from
/// the start). They are added to a [`crate::SimConfig`] in code ([`crate::SimConfig::fault`]) or as
/// text ([`crate::SimConfig::parse`]), or to a device that is in use:
///
/// ```
/// use aquifer::Device;
/// use aquifer::device::{Code, Operation};
/// use aquifer::device::sim::{Fault, SimConfig, SimDriver};
/// let driver = SimDriver::new(SimConfig::default());
/// let device = Device::new(driver.clone()); // the driver stays at hand
/// let stream = device.stream()?;
///
/// // The next stream cannot be created, and the one after it can.
/// let fault = Fault::Nth { operation: Some(Operation::CreateStream), nth: 1, code: Code::OUT_OF_MEMORY };
/// driver.inject(fault);
/// let error = device.stream().unwrap_err();
/// assert!(error.is_out_of_memory());
/// device.stream()?;
///
/// // From now on nothing works, as if the card had fallen off the bus.
/// driver.inject(Fault::LostAt { nth: 1 });
/// assert!(stream.synchronize().unwrap_err().is_device_lost());
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    /// The `nth` call (from 1) of `operation`, or of all operations where it is `None`, fails with
    /// `code`. A code of kind [`ErrorKind::DeviceLost`] loses the device.
    Nth {
        /// Which calls are counted; `None` counts all.
        operation: Option<Operation>,
        /// Which of them fails, from 1.
        nth: u64,
        /// The code that it fails with.
        code: Code,
    },
    /// Calls fail at random.
    Rate {
        /// Which calls; `None` means all.
        operation: Option<Operation>,
        /// Fraction of calls that fail, 0 to 1.
        rate: f64,
        /// The code that they fail with.
        code: Code,
    },
    /// Allocations that would bring the bytes held from the device above `bytes` fail with
    /// `OUT_OF_MEMORY`.
    OutOfMemoryAt {
        /// Most bytes that can be held, pinned host memory not counted.
        bytes: u64,
    },
    /// At the `nth` call (from 1) of all operations the device is lost: that call and all later
    /// ones fail.
    LostAt {
        /// Which call, from 1.
        nth: u64,
    },
    /// Calls take longer at random.
    Spike {
        /// Fraction of calls, 0 to 1.
        rate: f64,
        /// Virtual time that such a call takes in addition.
        duration: Duration,
    },
}

/// As [`crate::SimConfig::parse`] reads it.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |operation: &Option<Operation>| operation.map_or("any", Operation::name);
        match self {
            Fault::Nth { operation, nth, code } => write!(f, "fault={}#{nth}:{}", name(operation), code.0),
            Fault::Rate { operation, rate, code } => write!(f, "fault_rate={}:{rate}:{}", name(operation), code.0),
            Fault::OutOfMemoryAt { bytes } => write!(f, "oom_at={bytes}"),
            Fault::LostAt { nth } => write!(f, "lost_at={nth}"),
            Fault::Spike { rate, duration } => write!(f, "spike={rate}:{}ns", duration.as_nanos()),
        }
    }
}

/// The effect of the faults on one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verdict {
    /// The code that it fails with.
    pub code: Option<Code>,
    /// Virtual time that it takes in addition, in ns.
    pub spike_ns: u64,
}

/// Faults in force, with the calls that they counted so far: for a driver whose calls fail as those
/// of the simulated device do.
///
/// ```
/// use aquifer::device::{Code, Operation};
/// use aquifer_sim::{Fault, FaultPlan};
/// let fault = Fault::Nth { operation: Some(Operation::Alloc), nth: 2, code: Code::OUT_OF_MEMORY };
/// let mut plan = FaultPlan::new(&[fault], 0);
/// let codes = [Operation::Alloc, Operation::Free, Operation::Alloc].map(|operation| plan.strike(operation).code);
/// assert_eq!(codes, [None, None, Some(Code::OUT_OF_MEMORY)]);
/// ```
#[derive(Debug)]
pub struct FaultPlan {
    faults: Vec<(Fault, u64)>,
    rng: Rng,
}

impl FaultPlan {
    /// These faults; chance is drawn from `seed`.
    pub fn new(faults: &[Fault], seed: u64) -> Self {
        FaultPlan { faults: faults.iter().map(|fault| (fault.clone(), 0)).collect(), rng: Rng::new(seed, 2) }
    }

    /// Adds a fault, which counts calls from now on.
    pub fn add(&mut self, fault: Fault) {
        self.faults.push((fault, 0));
    }

    /// Removes all faults.
    pub fn clear(&mut self) {
        self.faults.clear();
    }

    /// The most bytes that may be held from the device.
    pub fn bytes_max(&self) -> u64 {
        let limits = self.faults.iter().filter_map(|(fault, _)| match fault {
            Fault::OutOfMemoryAt { bytes } => Some(*bytes),
            _ => None,
        });
        limits.min().unwrap_or(u64::MAX)
    }

    /// Counts a call and returns its fate. Of several faults the first that was added
    /// decides the code. After one that loses the device ([`ErrorKind::DeviceLost`]) it is for the
    /// driver to let every call fail.
    #[inline]
    pub fn strike(&mut self, operation: Operation) -> Verdict {
        if self.faults.is_empty() { Verdict::default() } else { self.strike_one(operation) }
    }

    fn strike_one(&mut self, operation: Operation) -> Verdict {
        let mut verdict = Verdict::default();
        let rng = &mut self.rng;
        for (fault, count) in &mut self.faults {
            let code = match fault {
                Fault::Nth { operation: only, nth, code } if only.is_none_or(|only| only == operation) => {
                    *count += 1;
                    (*count == *nth).then_some(*code)
                }
                Fault::Rate { operation: only, rate, code } if only.is_none_or(|only| only == operation) => {
                    rng.chance(*rate).then_some(*code)
                }
                Fault::LostAt { nth } => {
                    *count += 1;
                    (*count == *nth).then_some(LOST)
                }
                Fault::Spike { rate, duration } => {
                    if rng.chance(*rate) {
                        let spike_ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
                        verdict.spike_ns = verdict.spike_ns.saturating_add(spike_ns);
                    }
                    None
                }
                _ => None,
            };
            verdict.code = verdict.code.or(code);
        }
        verdict
    }
}

/// The code of a device that fell off: `CUDA_ERROR_ECC_UNCORRECTABLE`.
const LOST: Code = Code(214);

/// The code that random failures of `operation` have when none is given.
pub(crate) fn default_code(operation: Option<Operation>) -> Code {
    match operation {
        Some(Operation::Alloc | Operation::AllocAsync | Operation::CreatePhysical | Operation::HostAlloc) => {
            Code::OUT_OF_MEMORY
        }
        _ => Code(999),
    }
}
