//! Runs a program step by step and compares it with a model.
//!
//! After every step: no live blocks overlap, the race detector is silent, the statistics agree with
//! the blocks that are live, limit and headroom are kept, and only faults on order lead to other
//! errors than lack of memory. At the end everything is back on the device. Blocks that are
//! compared still hold what was last written to them.

mod blocks;
mod captures;
mod dedicated;
mod ending;

use std::sync::Arc;
use std::time::Duration;

use aquifer::Allocator;
use aquifer_allocator::{ALIGNMENT, AllocError, Allocation, PoolOptions, PoolRoute, PrivatePool};
use aquifer_device::{Code, Device, DevicePtr, Driver as _, RawStream, Stream};
use aquifer_sim::{Fault, Lagging, SimConfig};
use dedicated::Pins;

use crate::model::{Blocks, Handle, Live};
use crate::op::Op;
use crate::setup::Setup;
use crate::{MIB, Subject, check};

/// A device, an allocator, and the objects that a program made with them.
#[derive(Debug)]
pub struct Interpreter {
    // Dropped in this order: pins, routes and pools belong to the allocator.
    pins: Pins,
    routes: Vec<PoolRoute>,
    pools: Vec<PrivatePool>,
    allocator: Allocator,
    blocks: Blocks,
    streams: Vec<Stream>,
    device: Device,
    driver: Subject,
    /// Stands before the driver if the device lags.
    lagging: Option<Arc<Lagging>>,
    other: u64,
    /// Faults may strike, or may have struck and left streams without events.
    faulty: bool,
    /// The device is lost: nothing works any more, but nothing breaks either.
    lost: bool,
    next_pattern: u8,
    next_check: u32,
}

impl Interpreter {
    /// A device and an allocator. Stream 0 is the legacy stream, 1 that of this thread, 2 and 3 are
    /// streams of their own.
    pub fn new(setup: &Setup) -> Interpreter {
        let config = SimConfig::new(setup.capacity).seed(setup.seed);
        let (driver, lagging) = match setup.lag {
            0 => (Subject::open(&config), None),
            lag => {
                let (driver, lagging) = Subject::lagging(&config, lag);
                (driver, Some(lagging))
            }
        };
        let device = driver.device();
        let mut config = setup.config.clone();
        // Mostly as on a GPU.
        config.quarantine = config.quarantine.or((!setup.seed.is_multiple_of(4)).then_some(0));
        let allocator = Allocator::new(&device, config).unwrap_or_else(|error| panic!("{error}"));
        let mut streams = vec![device.default_stream().clone(), device.per_thread_stream()];
        for _ in 0..2 {
            streams.push(device.stream().unwrap_or_else(|error| panic!("{error}")));
        }
        let mut interpreter = Interpreter {
            pins: Pins::new(&allocator),
            routes: Vec::new(),
            pools: Vec::new(),
            allocator,
            blocks: Blocks::default(),
            streams,
            device,
            driver,
            lagging,
            other: 0,
            faulty: false,
            lost: false,
            next_pattern: 1,
            next_check: 0,
        };
        for n in 0..setup.crowd {
            // Most are one stream's.
            let stream = if n % 8 == 0 { n / 8 } else { 2 };
            interpreter.alloc(stream, 1 + n as u64 * 611 % 6000, 0, false);
        }
        interpreter
    }

    /// Runs a program to its end.
    pub fn run(setup: &Setup, program: &[Op]) {
        let mut interpreter = Interpreter::new(setup);
        interpreter.steps(program);
        interpreter.finish(setup.ending);
    }

    /// Runs several steps.
    pub fn steps(&mut self, program: &[Op]) {
        program.iter().for_each(|op| self.step(op));
    }

    /// Makes the nth driver call from now fail.
    pub fn inject(&mut self, nth: u64, code: Code) {
        self.faulty = true;
        self.lost |= code.kind() == aquifer_device::ErrorKind::DeviceLost;
        self.driver.inject(Fault::Nth { operation: None, nth, code });
    }

    /// Driver calls made so far.
    pub fn calls_made(&self) -> u64 {
        self.driver.calls_made()
    }

    /// The allocator's statistics.
    pub fn stats(&self) -> aquifer_allocator::MemoryStats {
        self.allocator.stats()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Takes one step and checks what must hold.
    pub fn step(&mut self, op: &Op) {
        let reserved = self.allocator.memory_reserved();
        self.lagging.iter().for_each(|lagging| lagging.advance());
        match *op {
            Op::Alloc { stream, bytes, align, on_thread } => self.alloc(stream, bytes, align, on_thread),
            Op::AllocRaw { stream, bytes } => self.alloc_raw(stream, bytes),
            Op::AllocFrom { pool, stream, bytes } => self.alloc_from(pool, stream, bytes),
            Op::Free { pick, how, verify } => self.free(pick, how, verify),
            Op::Replace { pick, stream, blocks, bytes } => self.replace(pick, stream, blocks, bytes),
            Op::FreeWrong(pick) => self.free_wrong(pick),
            Op::Use { pick, stream, write, record } => self.touch(pick, stream, write, record),
            Op::Wait { stream, on } => {
                let tick = self.stream(on).tick();
                self.judge(self.stream(stream).wait_for(&tick));
            }
            Op::Synchronize(stream) => self.judge(self.stream(stream).synchronize()),
            Op::Advance(us) => self.driver.advance(Duration::from_micros(us)),
            Op::Stall(stream, us) => {
                let stream = self.stream(stream);
                if stream.raw() != RawStream::PER_THREAD {
                    self.judge(self.driver.stall(stream, Duration::from_micros(us)));
                }
            }
            Op::NewStream { stream, blocking } => self.replace_stream(stream, blocking),
            Op::EmptyCache => self.judge(self.allocator.empty_cache()),
            Op::TrimTo(mib) => self.judge(self.allocator.trim_to(mib * MIB)),
            Op::SetLimit(mib) => self.allocator.set_limit(mib.map(|mib| mib * MIB)),
            Op::OtherProcess(mib) => {
                self.other = mib * MIB;
                self.driver.set_other_process_bytes(self.other);
            }
            Op::CreatePool { use_on_oom, no_split } => {
                if self.pools.len() < 3 {
                    match self.allocator.create_pool(PoolOptions { use_on_oom, no_split, ..PoolOptions::default() }) {
                        Ok(pool) => self.pools.push(pool),
                        Err(error) => self.judge::<(), _>(Err(error)),
                    }
                }
            }
            Op::DropPool(pick) => drop(take(&mut self.pools, pick)),
            Op::EmptyPool(pick) => {
                if let Some(pool) = self.pools.get(pick % self.pools.len().max(1)) {
                    self.judge(pool.empty_cache());
                }
            }
            Op::Route(pick) => {
                if let Some(pool) = self.pools.get(pick % self.pools.len().max(1)).filter(|_| self.routes.len() < 4) {
                    self.routes.push(pool.route_thread());
                }
            }
            Op::EndRoute(pick) => drop(take(&mut self.routes, pick)),
            Op::Capture { stream, pool, bytes, end } => self.capture(stream, pool, bytes, end),
            Op::AllocExportable { stream, bytes } => self.alloc_exportable(stream, bytes),
            Op::MakeGrowable { stream, capacity } => self.make_growable(stream, capacity),
            Op::Resize { pick, stream, bytes } => self.resize(pick, stream, bytes),
            Op::Pin(pick) => self.pin(pick),
            Op::Unpin(pick) => self.pins.unpin(pick),
            Op::Nap { save, frees } => self.nap(save, frees),
            Op::Fault(nth, code) => self.inject(nth, code),
            Op::ClearFaults => self.driver.clear_faults(),
        }
        self.check(reserved);
    }

    fn stream(&self, pick: usize) -> &Stream {
        &self.streams[pick % self.streams.len()]
    }

    /// Whether a call succeeded; it must have, unless a fault may have struck.
    fn allows<T, E: std::fmt::Display>(&self, outcome: Result<T, E>) -> Option<T> {
        outcome.map_err(|error| assert!(self.faulty, "without a fault: {error}")).ok()
    }

    fn judge<T, E: std::fmt::Display>(&self, outcome: Result<T, E>) {
        self.allows(outcome);
    }

    fn check(&mut self, reserved_before: u64) {
        self.assert_no_violation();
        self.pins.assert_kept();
        check::statistics(&self.allocator, self.blocks.totals());
        let reserved = self.allocator.memory_reserved();
        if reserved > reserved_before {
            let limit = self.allocator.limit();
            assert!(limit.is_none_or(|limit| reserved <= limit), "{reserved} bytes reserved, limit {limit:?}");
            let headroom = self.allocator.config().headroom;
            if headroom > 0 && !self.faulty {
                assert!(self.driver.free() >= headroom, "grown into the headroom");
            }
        }
        self.next_check += 1;
        if self.next_check.is_multiple_of(16) && !self.faulty {
            let free = self.driver.free();
            let held = self.device.info().total_bytes.saturating_sub(self.other + reserved);
            assert_eq!(free, held, "the device and the statistics disagree on what is free");
            check::readers(&self.allocator);
        }
    }

    /// Panics if the race detector, or the checks of a lagging device, found anything.
    fn assert_no_violation(&self) {
        self.driver.assert_no_violation();
        let violation = self.lagging.as_ref().and_then(|lagging| lagging.take_violation());
        assert_eq!(violation, None, "found on a device that lags");
    }

    /// Notes that a live block is given back now, up to which its own stream may use it.
    fn note_end(&self, live: &Live) {
        if let Some(lagging) = self.lagging.as_ref().filter(|_| live.bytes > 0) {
            if self.is_live(live.own) { lagging.freed(live.ptr) } else { lagging.given_back(live.ptr) }
        }
    }

    fn alloc(&mut self, stream: usize, bytes: u64, align: u32, on_thread: bool) {
        let stream = self.stream(stream).clone();
        let alignment = if align == 0 { ALIGNMENT } else { 1 << align };
        let allocator = &self.allocator;
        let alloc = || match align {
            0 => allocator.alloc_bytes(bytes, &stream),
            _ => allocator.alloc_aligned(bytes, alignment, &stream),
        };
        // Another thread cannot speak for this thread's own stream.
        let outcome = if on_thread && stream.raw() != RawStream::PER_THREAD {
            std::thread::scope(|scope| scope.spawn(alloc).join().unwrap_or_else(|_| panic!("the thread panicked")))
        } else {
            alloc()
        };
        if let Some(allocation) = self.served(outcome, bytes, bytes.saturating_add(alignment - ALIGNMENT)) {
            assert!(allocation.ptr().0.is_multiple_of(alignment), "{:?} not aligned to {alignment}", allocation.ptr());
            self.add_owned(allocation, bytes, &stream);
        }
    }

    fn alloc_from(&mut self, pool: usize, stream: usize, bytes: u64) {
        let stream = self.stream(stream).clone();
        let Some(pool) = self.pools.get(pool % self.pools.len().max(1)) else { return };
        let outcome = pool.alloc_bytes(bytes, &stream);
        if let Some(allocation) = self.served(outcome, bytes, bytes) {
            self.add_owned(allocation, bytes, &stream);
        }
    }

    fn alloc_raw(&mut self, stream: usize, bytes: u64) {
        let stream = self.stream(stream).clone();
        let outcome = self.allocator.alloc_raw(bytes, &stream);
        let Some(ptr) = self.served(outcome, bytes, bytes) else { return };
        if ptr.0 != 0 {
            let size = self.allocator.size_of_raw(ptr).unwrap_or_else(|error| panic!("{error}"));
            assert!(size >= bytes);
            self.add(Handle::Raw, ptr, bytes, &stream);
        }
    }

    /// An allocation, or `None` where it was right to refuse it; `padded` is `bytes` with padding
    /// for the alignment.
    fn served<T>(&self, outcome: Result<T, AllocError>, bytes: u64, padded: u64) -> Option<T> {
        match outcome {
            Ok(served) => return Some(served),
            Err(AllocError::OutOfMemory(report)) => {
                assert!(report.requested >= bytes, "{report}");
                assert!(!report.advice.is_empty(), "no advice: {report}");
                assert!(report.to_string().starts_with("out of memory. Tried to allocate"), "{report}");
                if !self.faulty && self.pins.is_empty() {
                    check::out_of_memory_was_right(&self.allocator, &report, padded, self.other);
                }
            }
            Err(AllocError::TooLarge { requested }) => assert!(requested >= 1 << 60),
            Err(error) => assert!(self.faulty && matches!(error, AllocError::Device(_)), "without a fault: {error}"),
        }
        None
    }

    fn add_owned(&mut self, allocation: Allocation, bytes: u64, stream: &Stream) {
        assert_eq!((allocation.bytes(), allocation.stream_id()), (bytes, stream.id()));
        let ptr = allocation.ptr();
        assert_eq!(ptr.0 == 0, bytes == 0);
        self.add(Handle::Owned(allocation), ptr, bytes, stream);
    }

    /// Adds a block that was handed out; its first use is a write on its own stream.
    fn add(&mut self, handle: Handle, ptr: DevicePtr, bytes: u64, stream: &Stream) {
        let mut live = Live { handle, ptr, bytes, own: stream.id(), pattern: None, uses: Vec::new() };
        live.note(stream, true, true);
        if bytes > 0 {
            self.lagging.iter().for_each(|lagging| lagging.allocated(ptr, bytes));
            self.next_pattern = self.next_pattern.wrapping_add(1);
            self.judge(live.touch(stream, Some(self.next_pattern), true));
        }
        self.blocks.add(live);
    }
}

/// Takes the element out that `pick` stands for.
fn take<T>(from: &mut Vec<T>, pick: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.remove(pick % from.len()))
}
