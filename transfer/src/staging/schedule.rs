//! Schedules in virtual time: proof that the ring keeps the copy engine busy.
//!
//! Virtual workers (`virtual_crew`) do what threads do, with real data on a simulated device. Only the time that the host takes is modelled:
//! a copy in host memory takes what its bytes take, a driver call takes a constant, and calls of different workers wait for each
//! other, as under a driver's lock. What the copy engine does, and when, is the simulator's. So a schedule is the same on every machine
//! and at every run.

use std::sync::Arc;
use std::time::Duration;

use aquifer_allocator::{Allocator, Buffer, Config};
use aquifer_device::sim::{SimConfig, SimDriver};
use aquifer_device::{AccessKind, Device, RequestError, Stream};

use super::config::StagingConfig;
use super::made_up::MadeUp;
use super::task::Way;
use super::tune::{Speeds, plan};
use super::virtual_crew::Play;
use super::work::{DeviceEnd, HostEnd, Work};
use crate::counters::Direction;
use crate::error::TransferError;
use crate::host_vec;
use crate::pinned::{PinnedConfig, PinnedPool};

/// A staged transfer to be played in virtual time.
///
/// ```
/// use aquifer_transfer::{Direction, VirtualSchedule};
/// let report = VirtualSchedule::new(Direction::Upload, 25).bytes(64 << 20).run()?;
/// assert!(report.intact && report.idle_share <= 0.1, "{report:?}");
/// # Ok::<(), aquifer_transfer::TransferError>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VirtualSchedule {
    /// Which way the bytes go: [`Direction::Upload`] or [`Direction::Download`].
    pub direction: Direction,
    /// Speed of the link to the device in GB/s.
    pub link_gb_s: u64,
    /// What one thread copies in host memory, in GB/s. 0 counts as 1.
    pub copy_gb_s: u64,
    /// What a driver call takes.
    pub call: Duration,
    /// Bytes of the transfer. There are at least as many as four times the ring holds, so that there is a steady state.
    pub bytes: u64,
    /// Sizes of the ring; what is `None` is chosen for the speeds above.
    pub config: StagingConfig,
}

/// How a [`VirtualSchedule`] went. Times are virtual.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ScheduleReport {
    /// Bytes that were moved.
    pub bytes: u64,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Chunks.
    pub chunks: u64,
    /// Workers.
    pub workers: u64,
    /// From the call to when the last byte was where it belongs, in ns.
    pub total_ns: u64,
    /// Time that the copy engine was busy with this, in ns, what starting each copy takes included.
    pub engine_busy_ns: u64,
    /// Length of the steady state in ns: from when the ring had been gone through once, to a ring's length before the end.
    pub steady_ns: u64,
    /// Share of the steady state in which the link carried nothing: 1 − bytes / (time × speed of the link). What starting a copy takes
    /// counts as idle.
    pub idle_share: f64,
    /// Copies of the steady state that ended more than a tenth later after the one before than they take.
    pub stalls: u64,
    /// Whether every byte arrived, and the simulator saw no race.
    pub intact: bool,
}

impl VirtualSchedule {
    /// A transfer of 256 MiB over such a link, with the figures that this project measures by: 10 GB/s a thread and 5 µs a driver call.
    pub fn new(direction: Direction, link_gb_s: u64) -> VirtualSchedule {
        VirtualSchedule {
            direction,
            link_gb_s: link_gb_s.max(1),
            copy_gb_s: 10,
            call: Duration::from_micros(5),
            bytes: 256 << 20,
            config: StagingConfig::default(),
        }
    }

    /// Sets [`VirtualSchedule::bytes`].
    #[must_use]
    pub fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    /// Sets [`VirtualSchedule::config`].
    #[must_use]
    pub fn config(mut self, config: StagingConfig) -> Self {
        self.config = config;
        self
    }

    /// Plays it.
    ///
    /// # Errors
    /// A direction that does not cross the link, and sizes that the simulated device or the host has no memory for.
    pub fn run(&self) -> Result<ScheduleReport, TransferError> {
        let way = match self.direction {
            Direction::Upload => Way::Up,
            Direction::Download => Way::Down,
            _ => {
                return Err(TransferError::Request(RequestError::Unsupported {
                    what: "a direction between the host and the device",
                }));
            }
        };
        let speeds = Speeds { copy: self.copy_gb_s.max(1) as f64, link: self.link_gb_s.max(1) as f64 };
        let sizes = self.config.sizes(plan(speeds, usize::MAX));
        let bytes = self.bytes.max(4 * (sizes.chunk_bytes as u64) * sizes.chunks as u64);
        let stage = Stage::new(self.link_gb_s, bytes)?;
        let work = stage.work(way)?;

        let mut play = Play::new(self, sizes, &stage);
        let start = stage.sim.now_ns();
        let busy_before = stage.busy_ns(way);
        play.run(work)?;
        let total_ns = stage.sim.now_ns() - start;
        let engine_busy_ns = stage.busy_ns(way) - busy_before;
        let intact = stage.is_intact(way)? && stage.sim.violations().is_empty();

        let (chunks, chunk_bytes) = play.chunks();
        let steady = Steady::of(play.arrivals(), chunks, speeds.link);
        Ok(ScheduleReport {
            bytes,
            chunk_bytes: chunk_bytes as u64,
            chunks: chunks as u64,
            workers: sizes.threads as u64,
            total_ns,
            engine_busy_ns,
            steady_ns: steady.ns,
            idle_share: steady.idle_share,
            stalls: steady.stalls,
            intact,
        })
    }
}

/// The part of a schedule between its start and its end.
struct Steady {
    ns: u64,
    idle_share: f64,
    stalls: u64,
}

impl Steady {
    /// Of copies that were done at such times.
    fn of(arrivals: &[(u64, u64)], chunks: usize, link_gb_s: f64) -> Steady {
        let window = arrivals.get(chunks..arrivals.len().saturating_sub(chunks)).unwrap_or_default();
        let (Some(first), Some(last)) = (window.first(), window.last()) else {
            return Steady { ns: 0, idle_share: 1.0, stalls: 0 };
        };
        let ns = last.0 - first.0;
        let carried: u64 = window[1..].iter().map(|&(_, bytes)| bytes).sum();
        let took = |bytes: u64| bytes as f64 / link_gb_s;
        let late = |pair: &&[(u64, u64)]| (pair[1].0 - pair[0].0) as f64 > 1.1 * took(pair[1].1);
        let stalls = window.windows(2).filter(late).count() as u64;
        Steady { ns, idle_share: (1.0 - took(carried) / ns.max(1) as f64).max(0.0), stalls }
    }
}

/// What a schedule is played on.
pub(super) struct Stage {
    pub(super) sim: Arc<SimDriver>,
    pub(super) pool: PinnedPool,
    stream: Stream,
    buffer: Buffer<u8>,
    content: Arc<MadeUp>,
}

impl Stage {
    fn new(link_gb_s: u64, bytes: u64) -> Result<Stage, TransferError> {
        let capacity = bytes.saturating_mul(2).max(1 << 30);
        let sim = SimDriver::new(SimConfig::new(capacity).jitter(false).link_gb_s(link_gb_s));
        let device = Device::new(sim.clone());
        let allocator = Allocator::new(&device, Config::default())?;
        let stream = device.stream()?;
        let buffer = allocator.alloc(host_vec::len_of(bytes, 1)?, &stream)?;
        let pool = PinnedPool::new(&device, PinnedConfig::default())?;
        Ok(Stage { sim, pool, stream, buffer, content: Arc::new(MadeUp::new(bytes)) })
    }

    /// The transfer.
    fn work(&self, way: Way) -> Result<Work, TransferError> {
        let (host, access) = match way {
            Way::Up => (HostEnd::Source(self.content.clone()), AccessKind::Write),
            Way::Down => {
                self.content.put(self.buffer.ptr(), &self.stream)?;
                (HostEnd::Target(self.content.clone()), AccessKind::Read)
            }
        };
        Work::new(host, DeviceEnd::claim(&self.buffer, access)?, &self.stream, 0)
    }

    fn busy_ns(&self, way: Way) -> u64 {
        let engines = self.sim.engines();
        if way == Way::Up { engines.to_device_busy_ns } else { engines.to_host_busy_ns }
    }

    /// Whether the device holds the content, and what came from there is the same.
    fn is_intact(&self, way: Way) -> Result<bool, TransferError> {
        let here = way == Way::Up || self.content.has_arrived();
        Ok(here && self.content.is_at(self.buffer.ptr(), &self.stream)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_engine_is_busy_in_the_steady_state() {
        for direction in [Direction::Upload, Direction::Download] {
            for link in [25, 55] {
                let report = VirtualSchedule::new(direction, link).run().unwrap();
                println!("{direction:?} at {link} GB/s: {report:?}");
                assert!(report.intact, "{report:?}");
                assert!(report.steady_ns > 0 && report.idle_share <= 0.1, "{direction:?} at {link} GB/s: {report:?}");
                assert_eq!(report.stalls, 0, "{report:?}");
                assert!(report.engine_busy_ns >= report.bytes / link && report.engine_busy_ns <= report.total_ns);
            }
        }
    }

    #[test]
    fn what_is_too_small_shows_as_idle() {
        let one = StagingConfig::default().chunks(1).threads(1);
        let report = VirtualSchedule::new(Direction::Upload, 25).bytes(32 << 20).config(one).run().unwrap();
        // Nothing overlaps: 100 µs/MiB are filled, then 40 are sent.
        assert!(report.idle_share > 0.6 && report.stalls > 0 && report.intact, "{report:?}");
        let few = StagingConfig::default().threads(2);
        let report = VirtualSchedule::new(Direction::Download, 55).bytes(64 << 20).config(few).run().unwrap();
        assert!(report.idle_share > 0.5 && report.intact, "{report:?}");
    }

    #[test]
    fn a_schedule_is_the_same_at_every_run() {
        let schedule = VirtualSchedule::new(Direction::Download, 55).bytes(64 << 20);
        assert_eq!(schedule.run().unwrap(), schedule.run().unwrap());
        assert!(VirtualSchedule::new(Direction::OnDevice, 25).run().is_err());
    }
}
