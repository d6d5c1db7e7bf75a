//! What measures: a device with transfers, and a clock. That of a simulated device is its own; on a real one it is the host's,
//! from before the first call until the wait has returned.

use std::sync::Arc;
use std::time::Instant;

use aquifer_allocator::DeviceBuffer;
use aquifer_device::Stream;
use aquifer_device::sim::SimDriver;
use aquifer_transfer::{PinnedBuffer, Transfer};

use crate::cli::TransferArgs;
use crate::exit::Failure;
use crate::session::Session;

/// The smallest copies, in bytes.
const LEAST: u64 = 4 << 10;

/// The clock of simulated devices.
pub(super) const VIRTUAL: &str = "virtual";

/// A device, a clock, and what is copied.
#[derive(Debug)]
pub(super) struct Meter {
    pub(super) transfer: Transfer,
    pub(super) stream: Stream,
    pub(super) device: String,
    simulated: Option<Arc<SimDriver>>,
    begun: Instant,
    rounds: u32,
    most: u64,
}

impl Meter {
    pub(super) fn new(session: &Session, args: &TransferArgs) -> Result<Meter, Failure> {
        let (device, simulated) = session.open_with_simulator()?;
        let allocator = session.allocator(&device, session.config()?)?;
        Ok(Meter {
            transfer: Transfer::new(&allocator)?,
            stream: device.create_stream()?,
            device: session.device_text().to_owned(),
            simulated,
            begun: Instant::now(),
            rounds: args.rounds,
            // A quarter of the device, as some ways need room at both ends of a gap.
            most: (args.max_mb << 20).min(device.memory_info()?.free / 4),
        })
    }

    /// Whether times are the simulator's.
    pub(super) fn is_modelled(&self) -> bool {
        self.simulated.is_some()
    }

    /// Whose clock times are of.
    pub(super) fn clock(&self) -> &'static str {
        if self.is_modelled() { VIRTUAL } else { "host" }
    }

    /// Sizes to be copied, in bytes.
    pub(super) fn sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<u64> = std::iter::successors(Some(LEAST), |size| size.checked_mul(16))
            .take_while(|&size| size <= self.most)
            .collect();
        if sizes.last().is_none_or(|&last| last < self.most) && self.most >= LEAST {
            sizes.push(self.most / LEAST * LEAST);
        }
        sizes.dedup();
        sizes
    }

    /// The largest of them.
    pub(super) fn largest(&self) -> u64 {
        self.sizes().last().copied().unwrap_or(LEAST)
    }

    pub(super) fn pinned(&self, bytes: u64) -> Result<PinnedBuffer<u8>, Failure> {
        Ok(self.transfer.pinned().alloc_zeroed(usize::try_from(bytes).unwrap_or(usize::MAX))?)
    }

    pub(super) fn buffer(&self, bytes: u64) -> Result<DeviceBuffer<u8>, Failure> {
        Ok(self.transfer.allocator().alloc_buffer(bytes, &self.stream)?)
    }

    /// Nanoseconds that `work` takes by the clock, the median of all rounds but a first one. The device is idle before each.
    pub(super) fn time(&self, mut work: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
        let mut times = Vec::new();
        for round in 0..=self.rounds {
            self.transfer.device().synchronize()?;
            let start = self.now_ns();
            work()?;
            if round > 0 {
                times.push(self.now_ns().saturating_sub(start));
            }
        }
        times.sort_unstable();
        #[expect(clippy::cast_precision_loss, reason = "a time for people")]
        Ok(times.get(times.len() / 2).map_or(0.0, |&ns| ns as f64))
    }

    fn now_ns(&self) -> u64 {
        match &self.simulated {
            Some(simulated) => simulated.now_ns(),
            None => u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX),
        }
    }

    /// What the simulated device found unordered; told on standard error.
    pub(super) fn hazards(&self, session: &Session) -> u64 {
        crate::commands::replay::hazards(session, "transfer", self.transfer.device())
    }
}

/// Gigabytes (10^9) a second.
#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
pub(super) fn rate(bytes: u64, ns: f64) -> f64 {
    if ns > 0.0 { bytes as f64 / ns } else { 0.0 }
}
