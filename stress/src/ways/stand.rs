//! What every way works with: an allocator on a device of its own, and blocks with known content.

use std::sync::Arc;

use aquifer_allocator::{AllocError, Allocation, Allocator, Bytes, OomReport, TagScope};
use aquifer_device::Stream;
use aquifer_device::sim::SimDriver;

use crate::content::Filled;
use crate::exit::Failure;
use crate::session::Session;

/// What must be free on a device: with less, granules, segments and what spilling needs leave no room for what the ways
/// do.
const ROOM_MIN: u64 = 32 << 20;

/// What is left alone of what a real device has free: this share of it, and no less than so many bytes.
const SPARE_SHARE: u64 = 64;
const SPARE_MIN: u64 = 256 << 20;

/// An allocator on a device of its own, and blocks with known content.
#[derive(Debug)]
pub struct Stand {
    /// The allocator.
    pub allocator: Allocator,
    /// The stream that everything is done on unless said otherwise.
    pub stream: Stream,
    /// The simulator below, if the device is a simulated one.
    pub simulator: Option<Arc<SimDriver>>,
    /// Bytes of the device that were free at the start, less what is left alone.
    pub room: u64,
    /// Bytes that are left alone: on a real device not all can be had that the driver says is free.
    pub spare: u64,
    marked: Vec<Marked>,
    written: u8,
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
    /// Bytes it asked for.
    pub requested: u64,
    /// Why it was refused; `None` if it was served.
    pub report: Option<Box<OomReport>>,
    /// Allocated and reserved bytes before it.
    pub before: (u64, u64),
    /// The same when it was answered.
    pub after: (u64, u64),
}

impl Stand {
    /// A device of its own, and an allocator with the session's options and those given.
    ///
    /// # Errors
    /// Those of the device and the allocator, and a device that is too small to tell the ways apart.
    pub fn new(session: &Session, options: fn(u64) -> String) -> Result<Stand, Failure> {
        let (device, simulator) = session.open_with_simulator()?;
        let free = device.memory_info()?.free;
        let spare = if simulator.is_some() { 0 } else { (free / SPARE_SHARE).max(SPARE_MIN) };
        let room = free.saturating_sub(spare);
        if room < ROOM_MIN {
            let (needed, name) = (Bytes(ROOM_MIN), session.device_text());
            let text = format!("{name} is too small for this: {needed} must be free, and {} are", Bytes(room));
            return Err(Failure::OutOfMemory(text));
        }
        let mut config = session.config()?.clone();
        config.config.apply(&options(room)).map_err(AllocError::from)?;
        let allocator = session.allocator(&device, &config)?;
        let stream = device.create_stream()?;
        Ok(Stand { allocator, stream, simulator, room, spare, marked: Vec::new(), written: 0 })
    }

    /// `percent` of the room.
    pub fn percent(&self, percent: u64) -> u64 {
        self.room / 100 * percent
    }

    /// Allocates a block named `name` and fills it with a byte that no block before had, as far as there are bytes. Tells
    /// its number.
    ///
    /// # Errors
    /// Those of the allocator and the driver.
    pub fn mark(&mut self, name: &str, bytes: u64) -> Result<usize, Failure> {
        let _name = TagScope::new(name);
        let block = self.allocator.alloc(bytes, &self.stream)?;
        self.written = self.written.wrapping_add(1);
        let filled = Filled::fill(block.ptr(), bytes, self.written, &self.stream)?;
        self.marked.push(Marked { filled, _block: block });
        Ok(self.marked.len() - 1)
    }

    /// Frees the blocks for whose number `which` holds.
    pub fn free(&mut self, which: impl Fn(usize) -> bool) {
        let mut number = 0..;
        self.marked.retain(|_| !number.next().is_some_and(&which));
    }

    /// Makes a request that should be refused.
    ///
    /// # Errors
    /// When something other than a lack of memory comes up.
    pub fn request(&self, bytes: u64) -> Result<Refusal, Failure> {
        let figures = || (self.allocator.allocated_bytes(), self.allocator.reserved_bytes());
        let before = figures();
        let answer = self.allocator.alloc(bytes, &self.stream);
        let report = match answer {
            Ok(block) => {
                self.stream.fill(block.ptr(), u8::MAX, bytes)?;
                None
            }
            Err(AllocError::OutOfMemory(report)) => Some(report),
            Err(other) => return Err(other.into()),
        };
        Ok(Refusal { requested: bytes, report, before, after: figures() })
    }

    /// Whether a request is served. The block is written to and freed.
    ///
    /// # Errors
    /// When something other than a lack of memory comes up.
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
    /// Those of the driver.
    pub fn is_intact(&self) -> Result<bool, Failure> {
        for Marked { filled, .. } in &self.marked {
            if !filled.is_intact(&self.stream)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Frees everything, and tells whether the allocator gives all of it back and serves nine tenths of what it may.
    ///
    /// # Errors
    /// Those of the allocator and the driver.
    pub fn is_usable(&mut self) -> Result<bool, Failure> {
        self.marked.clear();
        self.allocator.empty_cache()?;
        let empty = self.allocator.allocated_bytes() == 0 && self.allocator.reserved_bytes() == 0;
        let free = self.allocator.device().memory_info()?.free.saturating_sub(self.allocator.config().headroom);
        let most = free.min(self.allocator.limit().unwrap_or(u64::MAX));
        Ok(empty && self.is_served(most / 10 * 9)? && self.allocator.allocated_bytes() == 0)
    }
}
