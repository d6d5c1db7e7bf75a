//! A device with transfers, and a clock: the virtual one of a simulated device, or the host's, from
//! before the first call until the wait has returned.

use std::sync::Arc;
use std::time::Instant;

use aquifer::device::sim::SimDriver;
use aquifer::device::{DeviceSpec, gpus};
use aquifer::tensor::Place;
use aquifer::transfer::Route;
use aquifer::transfer::Transfer;
use aquifer::{Buffer, Device, PinnedBuffer, Stream};
use aquifer_stress::commands::violations;
use aquifer_stress::exit::Failure;
use aquifer_stress::session::Session;

use crate::Bench;
use crate::row::Row;

/// The smallest copies, in bytes.
const LEAST: u64 = 4 << 10;

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
    /// `None` if there is no other device, or it is not asked for.
    pub(super) peer: Option<Peer>,
    simulated: Option<Arc<SimDriver>>,
    begun: Instant,
    rounds: u32,
    /// The largest copies that were asked for.
    asked: Option<u64>,
    /// The largest copies that the device has room for.
    room: u64,
    /// The most that the link to the host carries in a direction, in GB/s, as far as it is known.
    pub(super) link_gb_s: Option<f64>,
}

/// How often each copy is measured, unless asked for.
const ROUNDS: u32 = 5;

/// The largest copies unless asked for, in bytes.
const USUAL: u64 = 64 << 20;

impl Meter {
    /// With `peer`, also another device.
    pub(super) fn new(bench: &Bench, peer: bool) -> Result<Meter, Failure> {
        let Bench { session, config, args } = bench;
        let (device, simulated) = match session.sim().cloned() {
            Some(mut sim) => {
                // Jitter would be most of the difference of copies.
                sim.jitter &= session.device_text().contains("jitter=");
                let driver = SimDriver::new(sim);
                (Device::new(driver.clone()), Some(driver))
            }
            None => (session.open()?, None),
        };
        let transfer = Transfer::new(&session.allocator(&device, config)?)?;
        let peer = if peer { Peer::open(bench, &transfer)? } else { None };
        Ok(Meter {
            transfer,
            peer,
            stream: device.stream()?,
            simulated,
            begun: Instant::now(),
            rounds: args.rounds.unwrap_or(ROUNDS),
            asked: args.max_mb.map(|mib| u64::from(mib) << 20),
            // A quarter of the device, as some methods use rows with gaps at both ends.
            room: device.memory_info()?.free / 4,
            link_gb_s: session.sim().map(|sim| sim.card_link_gb_s() as f64).or_else(pcie_gb_s),
        })
    }

    /// Whether times are the simulator's.
    pub(super) fn is_modelled(&self) -> bool {
        self.simulated.is_some()
    }

    /// A row of figures by the device's clock, or by the host's on every device.
    pub(super) fn row(&self, by_host: bool) -> Row {
        let is_virtual = self.is_modelled() && !by_host;
        Row::new().with("modelled", is_virtual).with("clock", if is_virtual { "virtual" } else { "host" })
    }

    /// Sizes of copies, in bytes.
    pub(super) fn sizes(&self) -> Vec<u64> {
        let most = self.asked.unwrap_or(USUAL).min(self.room);
        let mut sizes: Vec<u64> =
            std::iter::successors(Some(LEAST), |size| size.checked_mul(16)).take_while(|&size| size <= most).collect();
        if sizes.last().is_none_or(|&last| last < most) && most >= LEAST {
            sizes.push(most / LEAST * LEAST);
        }
        sizes.dedup();
        sizes
    }

    /// The size of a copy of `bytes` bytes, as far as the device has room for it and no smaller one
    /// was asked for. On a simulated device it is smaller, too: there it takes time alone.
    pub(super) fn most_of(&self, bytes: u64) -> u64 {
        let usual = if self.is_modelled() { USUAL } else { bytes };
        self.asked.unwrap_or(usual).min(bytes).min(self.room).max(LEAST)
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
        self.time_by(|| self.now_ns(), || Ok(()), work)
    }

    /// The same by the host's clock, for the host's own work. `prepare` comes before each, and does
    /// not count.
    pub(super) fn time_on_host(
        &self,
        prepare: impl FnMut() -> Result<(), Failure>,
        work: impl FnMut() -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        self.time_by(|| self.host_ns(), prepare, work)
    }

    fn time_by(
        &self,
        now_ns: impl Fn() -> u64,
        mut prepare: impl FnMut() -> Result<(), Failure>,
        mut work: impl FnMut() -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        let mut times = Vec::new();
        for round in 0..=self.rounds {
            prepare()?;
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
        devices.into_iter().flatten().map(|device| violations(session, "transfer", device)).sum()
    }
}

impl Peer {
    /// Another device than that of `beside`, if there is a usable one.
    fn open(bench: &Bench, beside: &Transfer) -> Result<Option<Peer>, Failure> {
        let Some(device) = another(&bench.session, beside.device()) else { return Ok(None) };
        let transfer = Transfer::new(&bench.session.allocator(&device, &bench.config)?)?;
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

/// Another GPU, the first that can be opened, or a simulated device with the same configuration.
fn another(session: &Session, device: &Device) -> Option<Device> {
    let own = device.info().ordinal;
    if let Some(sim) = session.sim() {
        return Some(Device::new(SimDriver::new(sim.clone().ordinal(own ^ 1))));
    }
    for other in gpus().unwrap_or_default().iter().filter(|other| other.ordinal != own) {
        match DeviceSpec::Cuda(other.ordinal).open() {
            Ok(device) => return Some(device),
            Err(error) => session.message(format_args!("warning: cuda:{} is left out: {error}", other.ordinal)),
        }
    }
    None
}

/// The bandwidth of the PCIe links of this machine's GPUs in a direction, in GB/s, if Linux tells it
/// and all have the same.
fn pcie_gb_s() -> Option<f64> {
    let devices = std::fs::read_dir("/sys/bus/pci/devices").ok()?.flatten().map(|entry| entry.path());
    let limits = devices.filter_map(|device| {
        let read = |name: &str| std::fs::read_to_string(device.join(name)).ok();
        let is_gpu = read("vendor")?.trim() == "0x10de" && read("class")?.starts_with("0x03");
        is_gpu.then(|| link_gb_s(&read("max_link_speed")?, &read("max_link_width")?)).flatten()
    });
    let limits: Vec<f64> = limits.collect();
    limits.first().copied().filter(|first| limits.iter().all(|limit| limit == first))
}

/// What a PCIe link carries: transfers a second of a bit on each lane, with the code of the
/// generation.
fn link_gb_s(speed: &str, lanes: &str) -> Option<f64> {
    let transfers: f64 = speed.split_whitespace().next()?.parse().ok()?;
    let lanes: f64 = lanes.trim().parse().ok()?;
    let code = if transfers < 8.0 { 8.0 / 10.0 } else { 128.0 / 130.0 };
    (transfers > 0.0 && lanes > 0.0).then_some(transfers * lanes / 8.0 * code)
}

/// Gigabytes (10^9) a second.
#[expect(clippy::cast_precision_loss, reason = "a rate to display")]
pub(super) fn rate(bytes: u64, ns: f64) -> f64 {
    if ns > 0.0 { bytes as f64 / ns } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::link_gb_s;

    #[test]
    fn a_link_carries_its_lanes_without_the_code() {
        let rounded = |speed, lanes| link_gb_s(speed, lanes).map(|limit| (limit * 10.0).round() / 10.0);
        assert_eq!(rounded("32.0 GT/s PCIe\n", "16\n"), Some(63.0));
        assert_eq!(rounded("5.0 GT/s PCIe\n", "8\n"), Some(4.0));
        assert_eq!((rounded("Unknown\n", "16\n"), rounded("8.0 GT/s PCIe\n", "0\n")), (None, None));
    }
}
