//! A device with transfers, and a clock: the virtual one of a simulated device, or the host's, from
//! before the first call until the wait has returned.

use std::sync::Arc;
use std::time::Instant;

use aquifer::device::sim::SimDriver;
use aquifer::tensor::Place;
use aquifer::transfer::Route;
use aquifer::transfer::Transfer;
use aquifer::{Buffer, PinnedBuffer, Stream};

use crate::cli::{Part, TransferArgs};
use crate::exit::Failure;
use crate::session::Session;

/// The smallest copies, in bytes.
const LEAST: u64 = 4 << 10;

/// The clock of simulated devices.
pub(super) const VIRTUAL: &str = "virtual";

/// The clock of everything else.
pub(super) const HOST: &str = "host";

/// Another device, the source of copies.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) transfer: Transfer,
    pub(super) stream: Stream,
    pub(super) name: String,
    pub(super) route: Route,
    /// The largest copies that its memory allows.
    pub(super) most: u64,
}

/// A device, a clock and sizes.
#[derive(Debug)]
pub(super) struct Meter {
    pub(super) transfer: Transfer,
    pub(super) stream: Stream,
    pub(super) device: String,
    /// `None` if there is no other device, or copies are not measured.
    pub(super) peer: Option<Peer>,
    simulated: Option<Arc<SimDriver>>,
    begun: Instant,
    rounds: u32,
    most: u64,
}

impl Meter {
    pub(super) fn new(session: &Session, args: &TransferArgs) -> Result<Meter, Failure> {
        let (device, simulated) = session.open_with_simulator()?;
        let transfer = Transfer::new(&session.allocator(&device, session.config()?)?)?;
        let peer = if args.measures(Part::Copies) { Peer::open(session, &transfer)? } else { None };
        Ok(Meter {
            transfer,
            peer,
            stream: device.stream()?,
            device: session.device_text().to_owned(),
            simulated,
            begun: Instant::now(),
            rounds: args.rounds,
            // A quarter of the device, as some methods use rows with gaps at both ends.
            most: args.largest.min(device.memory_info()?.free / 4),
        })
    }

    /// Whether times are the simulator's.
    pub(super) fn is_modelled(&self) -> bool {
        self.simulated.is_some()
    }

    /// The name of the clock.
    pub(super) fn clock(&self) -> &'static str {
        if self.is_modelled() { VIRTUAL } else { HOST }
    }

    /// Sizes of copies, in bytes.
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

    pub(super) fn buffer(&self, bytes: u64) -> Result<Buffer<u8>, Failure> {
        Ok(self.transfer.allocator().alloc(usize::try_from(bytes).unwrap_or(usize::MAX), &self.stream)?)
    }

    /// Nanoseconds that `work` takes by the clock, the median of all rounds but a first one. The
    /// device is idle before each.
    pub(super) fn time(&self, work: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
        self.time_by(|| self.now_ns(), work)
    }

    /// The same by the host's clock, for work without a device.
    pub(super) fn time_on_host(&self, work: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
        self.time_by(|| self.host_ns(), work)
    }

    fn time_by(&self, now_ns: impl Fn() -> u64, mut work: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
        let mut times = Vec::new();
        for round in 0..=self.rounds {
            self.transfer.device().synchronize()?;
            let start = now_ns();
            work()?;
            if round > 0 {
                times.push(now_ns().saturating_sub(start));
            }
        }
        times.sort_unstable();
        #[expect(clippy::cast_precision_loss, reason = "a time to display")]
        Ok(times.get(times.len() / 2).map_or(0.0, |&ns| ns as f64))
    }

    fn now_ns(&self) -> u64 {
        match &self.simulated {
            Some(simulated) => simulated.now_ns(),
            None => self.host_ns(),
        }
    }

    fn host_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Counts and reports the violations that simulated devices found.
    pub(super) fn violations(&self, session: &Session) -> u64 {
        let devices = [Some(self.transfer.device()), self.peer.as_ref().map(|peer| peer.transfer.device())];
        devices.into_iter().flatten().map(|device| crate::commands::violations(session, "transfer", device)).sum()
    }
}

impl Peer {
    /// Another device than that of `beside`, if there is a usable one.
    fn open(session: &Session, beside: &Transfer) -> Result<Option<Peer>, Failure> {
        let Some(device) = session.open_another(beside.device()) else { return Ok(None) };
        let transfer = Transfer::new(&session.allocator(&device, session.config()?)?)?;
        Ok(Some(Peer {
            stream: device.stream()?,
            name: Place::from(&transfer).to_string(),
            route: beside.route_from(&transfer)?,
            most: device.memory_info()?.free / 4,
            transfer,
        }))
    }

    pub(super) fn buffer(&self, bytes: u64) -> Result<Buffer<u8>, Failure> {
        Ok(self.transfer.allocator().alloc(usize::try_from(bytes).unwrap_or(usize::MAX), &self.stream)?)
    }
}

/// Gigabytes (10^9) a second.
#[expect(clippy::cast_precision_loss, reason = "a rate to display")]
pub(super) fn rate(bytes: u64, ns: f64) -> f64 {
    if ns > 0.0 { bytes as f64 / ns } else { 0.0 }
}
