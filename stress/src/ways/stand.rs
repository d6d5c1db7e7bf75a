//! The fixture of all ways: an allocator on a new device, and blocks with known content.

use std::ops::Range;
use std::sync::Arc;

use aquifer::device::sim::SimDriver;
use aquifer::memory::{AllocError, Allocation, OomReport, Snapshot, TagScope};
use aquifer::{Allocator, Device, Stream};
use aquifer_allocator::config::Backing;

use crate::cli::ConfigArg;
use crate::commands::record_history;
use crate::content::Filled;
use crate::exit::Failure;
use crate::session::Session;
use crate::text::Bytes;

/// The least available memory: below this, granules, segments and the memory for spilling leave too
/// little for the ways.
const ROOM_MIN: u64 = 32 << 20;
/// The same for segments, where the smallest blocks of the ways have segments of their own.
const ROOM_MIN_IN_SEGMENTS: u64 = 400 << 20;

/// Dedicated segments are multiples of this.
const STEP: u64 = 2 << 20;
/// A smaller block shares a segment, or has a larger one.
const ALONE: u64 = 16 << 20;

/// The part of the free memory of a real device that is left alone, and its minimum.
const SPARE_SHARE: u64 = 64;
const SPARE_MIN: u64 = 256 << 20;

/// Rounds a size down to one that a dedicated segment may have.
pub(super) fn in_steps(bytes: u64) -> u64 {
    bytes / STEP * STEP
}

/// An allocator on a new device, and blocks with known content.
#[derive(Debug)]
pub struct Stand {
    /// First, so that blocks are dropped before the allocator. An allocator that is dropped with
    /// live blocks gives its memory back only when the next one is made.
    marked: Vec<Marked>,
    /// The allocator.
    pub allocator: Allocator,
    /// The stream of all operations that name no other.
    pub stream: Stream,
    /// The simulator, if the device is a simulated one.
    pub simulator: Option<Arc<SimDriver>>,
    /// Bytes of the device that were free at the start.
    pub free: u64,
    /// The available part of them: within the user's options, and without the spare bytes.
    pub room: u64,
    /// The options that the way sets.
    pub options: String,
    /// Bytes that are left alone: not all memory that a real driver reports as free is available.
    pub spare: u64,
    written: u8,
    takes_snapshots: bool,
}

/// The bytes of the device that a way's options depend on.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Given {
    /// All.
    pub total: u64,
    /// Free, without the spare bytes.
    pub free: u64,
    /// The part of them that the user's options allow.
    pub room: u64,
}

/// A block with known content.
#[derive(Debug)]
struct Marked {
    filled: Filled,
    _block: Allocation,
}

/// A request that was expected to be refused.
#[derive(Debug)]
#[non_exhaustive]
pub struct Refusal {
    /// The requested bytes.
    pub requested: u64,
    /// Why it was refused; `None` if it was served.
    pub report: Option<Box<OomReport>>,
    /// Allocated and reserved bytes before it.
    pub before: (u64, u64),
    /// The same after it.
    pub after: (u64, u64),
    /// The memory after it, if the stand takes snapshots.
    pub snapshot: Option<Box<Snapshot>>,
}

impl Stand {
    /// A new device, and an allocator with the session's options and the given ones.
    ///
    /// # Errors
    /// Those of the device and the allocator; the device is too small to tell the ways apart.
    pub fn new(session: &Session, options: fn(&Given) -> String) -> Result<Stand, Failure> {
        let (device, simulator) = session.open_with_simulator()?;
        let memory = device.memory_info()?;
        let spare = if simulator.is_some() { 0 } else { (memory.free / SPARE_SHARE).max(SPARE_MIN) };
        let mut config = session.config()?.clone();
        let room = room(session, &device, &config, memory.free.saturating_sub(spare))?;
        let given = Given { total: memory.total, free: memory.free - spare, room };
        let options = options(&given);
        config.config.apply(&options).map_err(AllocError::from)?;
        let allocator = session.allocator(&device, &config)?;
        let stream = device.stream()?;
        let free = memory.free;
        let (marked, written, takes_snapshots) = (Vec::new(), 0, false);
        Ok(Stand { allocator, stream, simulator, options, free, room, spare, marked, written, takes_snapshots })
    }

    /// Takes a snapshot, with the history from here on, after each request that should be refused.
    pub fn take_snapshots(&mut self) {
        self.takes_snapshots = true;
        record_history(&self.allocator, usize::MAX);
    }

    /// `percent` of the room.
    pub fn percent(&self, percent: u64) -> u64 {
        self.room / 100 * percent
    }

    /// Fills up to about `bytes` of memory with few blocks named `name`. Returns their numbers.
    ///
    /// # Errors
    /// Those of the allocator and the driver.
    pub fn fill(&mut self, name: &str, bytes: u64) -> Result<Range<usize>, Failure> {
        let first = self.marked.len();
        let mut left = bytes;
        loop {
            let size = in_steps(left);
            self.mark(name, size)?;
            left -= size;
            if left < ALONE || size == 0 {
                return Ok(first..self.marked.len());
            }
        }
    }

    /// Allocates a block named `name` and fills it with the next byte. Returns its number.
    ///
    /// # Errors
    /// Those of the allocator and the driver.
    pub fn mark(&mut self, name: &str, bytes: u64) -> Result<usize, Failure> {
        let _name = TagScope::new(name);
        let block = self.allocator.alloc_bytes(bytes, &self.stream)?;
        self.written = self.written.wrapping_add(1);
        let filled = Filled::fill(block.ptr(), bytes, self.written, &self.stream)?;
        self.marked.push(Marked { filled, _block: block });
        Ok(self.marked.len() - 1)
    }

    /// Frees the blocks whose number satisfies `which`.
    pub fn free(&mut self, which: impl Fn(usize) -> bool) {
        let mut number = 0..;
        self.marked.retain(|_| !number.next().is_some_and(&which));
    }

    /// Makes a request that should be refused.
    ///
    /// # Errors
    /// When something other than a lack of memory fails.
    pub fn request(&self, bytes: u64) -> Result<Refusal, Failure> {
        let figures = || (self.allocator.memory_allocated(), self.allocator.memory_reserved());
        let before = figures();
        let answer = self.allocator.alloc_bytes(bytes, &self.stream);
        let snapshot = self.takes_snapshots.then(|| Box::new(self.allocator.snapshot()));
        let report = match answer {
            Ok(block) => {
                self.stream.fill(block.ptr(), u8::MAX, bytes)?;
                None
            }
            Err(AllocError::OutOfMemory(report)) => Some(report),
            Err(other) => return Err(other.into()),
        };
        Ok(Refusal { requested: bytes, report, before, after: figures(), snapshot })
    }

    /// Whether a request is served. The block is written to and freed.
    ///
    /// # Errors
    /// When something other than a lack of memory fails.
    pub fn is_served(&self, bytes: u64) -> Result<bool, Failure> {
        Ok(self.request(bytes)?.report.is_none())
    }

    /// How many blocks with known content there are.
    pub fn blocks(&self) -> usize {
        self.marked.len()
    }

    /// Whether every block reads as it was written.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_intact(&self) -> Result<bool, Failure> {
        for Marked { filled, .. } in &self.marked {
            if !filled.is_intact(&self.stream)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Frees everything. Returns whether the allocator then releases all memory and serves nine
    /// tenths of the allowed memory.
    ///
    /// # Errors
    /// Those of the allocator and the driver.
    pub fn is_usable(&mut self) -> Result<bool, Failure> {
        self.marked.clear();
        self.allocator.empty_cache()?;
        let empty = self.allocator.memory_allocated() == 0 && self.allocator.memory_reserved() == 0;
        let free = self.allocator.device().memory_info()?.free.saturating_sub(self.allocator.headroom());
        let most = free.min(self.allocator.limit().unwrap_or(u64::MAX));
        Ok(empty && self.is_served(in_steps(most / 10 * 9))? && self.allocator.memory_allocated() == 0)
    }
}

/// The part of `free` bytes of a device that the user's options allow.
fn room(session: &Session, device: &Device, config: &ConfigArg, free: u64) -> Result<u64, Failure> {
    let allocator = session.allocator(device, config)?;
    let room = free.saturating_sub(allocator.headroom()).min(allocator.limit().unwrap_or(u64::MAX));
    let segments =
        config.config.backing == Backing::Segments || config.config.no_cache || allocator.why_segments().is_some();
    let least = if segments { ROOM_MIN_IN_SEGMENTS } else { ROOM_MIN };
    if room >= least {
        return Ok(room);
    }
    let (name, needed) = (session.device_text(), Bytes(least));
    Err(Failure::OutOfMemory(if free >= least {
        let allowed = Bytes(room);
        format!(
            "the options allow too little memory for this: {needed} are needed, and {allowed} of {name} may be used"
        )
    } else {
        format!("{name} is too small for this: {needed} must be free, and {} are", Bytes(free))
    }))
}

#[cfg(test)]
mod tests {
    use aquifer_device::Driver;

    use super::*;
    use crate::cli::Global;

    /// A way that fails leaves its blocks; the next way needs their memory.
    #[test]
    fn a_dropped_stand_with_live_blocks_releases_all_memory() {
        let global = Global { device: Some("sim:1GiB".parse().unwrap()), ..Global::default() };
        let mut stand = Stand::new(&Session::new(&global).unwrap(), |_| String::new()).unwrap();
        stand.fill("weights", 300 << 20).unwrap();
        let simulator = stand.simulator.clone().unwrap();
        assert!(simulator.memory_info().unwrap().free <= 724 << 20);
        drop(stand);
        assert_eq!(simulator.memory_info().unwrap().free, 1 << 30);
    }
}
