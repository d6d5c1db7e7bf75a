//! What the threads of a simulation share: the device, its allocators, what they leave to each
//! other, and the checks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer::device::Capture;
use aquifer::device::sim::{Fault, SimConfig, SimDriver};
use aquifer::memory::{AllocError, Config, PrivatePool, Snapshot, Stat};
use aquifer::{Allocator, Device};
use aquifer_device::fork::Mutex;
use aquifer_device::sim::{Violation, ViolationKind};
use aquifer_device::{Code, Operation};
use aquifer_oracle::Judged;

use super::plan::Plan;
use super::player::Owned;

/// What a thread leaves to another one.
pub(super) enum Handed {
    Buffer(Owned),
    /// To be dropped by a thread that may not be able to end it.
    Capture(Capture, Arc<Dropping>),
}

impl Handed {
    /// Drops a capture, or returns the buffer.
    pub(super) fn into_buffer(self) -> Option<Owned> {
        match self {
            Handed::Buffer(owned) => Some(owned),
            Handed::Capture(capture, dropping) => {
                drop(capture);
                dropping.done.store(true, Ordering::Relaxed);
                None
            }
        }
    }
}

/// Whether a capture was dropped. What its stream enqueued before may have been captured, and what it
/// enqueues afterwards is not.
#[derive(Debug, Default)]
pub(super) struct Dropping {
    done: AtomicBool,
}

impl Dropping {
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Relaxed)
    }
}

/// The world of a simulation.
pub(super) struct World {
    pub(super) memory: Allocator,
    pub(super) second: Allocator,
    pub(super) device: Device,
    pub(super) driver: Arc<SimDriver>,
    /// In front of it.
    judged: Arc<Judged>,
    pub(super) threads: usize,
    handed: Mutex<Vec<Handed>>,
    /// Pools of threads that have ended.
    pools: Mutex<Vec<PrivatePool>>,
    /// A fault was injected: any call may fail, and fail again.
    faulty: AtomicBool,
    lost: AtomicBool,
    /// Bytes that another process holds.
    other_process: AtomicU64,
    /// A stream captures or may have: calls that would break a capture are refused.
    captured: AtomicBool,
    found: Mutex<Option<String>>,
    pub(super) steps: AtomicU64,
}

impl World {
    pub(super) fn new(plan: &Plan) -> Result<World, String> {
        let driver = SimDriver::new(SimConfig::new(plan.capacity).seed(plan.seed));
        let judged = Judged::new(driver.clone());
        let device = Device::new(judged.clone());
        let text = |error: &dyn std::fmt::Display| format!("{:?}: {error}", plan.options);
        let config = Config::parse(&plan.options).map_err(|error| text(&error))?;
        Ok(World {
            memory: Allocator::new(&device, config).map_err(|error| text(&error))?,
            second: Allocator::new(&device, Config::default()).map_err(|error| text(&error))?,
            device,
            driver,
            judged,
            threads: plan.threads.iter().filter(|steps| !steps.is_empty()).count(),
            handed: Mutex::default(),
            pools: Mutex::default(),
            faulty: false.into(),
            lost: false.into(),
            other_process: 0.into(),
            captured: false.into(),
            found: Mutex::default(),
            steps: 0.into(),
        })
    }

    /// Another process holds so much from now on.
    pub(super) fn set_other_process(&self, bytes: u64) {
        self.other_process.store(bytes, Ordering::Relaxed);
        self.driver.set_other_process_bytes(bytes);
    }

    pub(super) fn has_other_process(&self) -> bool {
        self.other_process.load(Ordering::Relaxed) > 0
    }

    /// Reports a failure; the first one counts.
    pub(super) fn report(&self, what: impl Into<String>) {
        self.found.lock().get_or_insert_with(|| what.into());
    }

    pub(super) fn has_failed(&self) -> bool {
        self.found.lock().is_some()
    }

    pub(super) fn found(&self) -> Option<String> {
        self.found.lock().take()
    }

    pub(super) fn hand(&self, what: Handed) {
        if matches!(what, Handed::Capture(..)) {
            self.captured.store(true, Ordering::Relaxed);
        }
        self.handed.lock().push(what);
    }

    pub(super) fn take_handed(&self) -> Option<Handed> {
        self.handed.lock().pop()
    }

    /// Keeps pools of a thread that ends until the program has ended.
    pub(super) fn leave(&self, pools: Vec<PrivatePool>) {
        self.pools.lock().extend(pools);
    }

    /// Contents of buffers that no thread has are not compared any more.
    pub(super) fn forget_contents(&self) {
        for handed in &mut *self.handed.lock() {
            if let Handed::Buffer(owned) = handed {
                owned.pattern = None;
            }
        }
    }

    /// Sets the limit to the share of the device's memory that `bytes` are. That allows `bytes`.
    pub(super) fn set_share(&self, bytes: u64) {
        let total = self.device.info().total_bytes;
        let bytes = bytes.min(total - 1);
        self.allow(self.memory.set_memory_fraction(bytes as f64 / total as f64));
        let limit = self.memory.limit();
        if limit != Some(bytes) {
            self.report(format!("the limit is {limit:?} where a share of {bytes} of {total} was set"));
        }
    }

    /// Makes each call of the driver fail at random, in so many cases of a thousand.
    pub(super) fn inject_rate(&self, thousandths: u32) {
        self.driver.clear_faults();
        if thousandths > 0 {
            self.faulty.store(true, Ordering::Relaxed);
            self.driver.inject(Fault::Rate { operation: None, rate: f64::from(thousandths) / 1000.0, code: Code(999) });
        }
    }

    /// Makes the nth call of the driver fail, or the nth one of an operation.
    pub(super) fn inject(&self, nth: u64, operation: Option<Operation>) {
        self.faulty.store(true, Ordering::Relaxed);
        self.driver.inject(Fault::Nth { operation, nth, code: Code(999) });
    }

    /// Loses the device at the nth call.
    pub(super) fn lose(&self, nth: u64) {
        self.faulty.store(true, Ordering::Relaxed);
        self.lost.store(true, Ordering::Relaxed);
        self.driver.inject(Fault::LostAt { nth });
    }

    /// Reports an error that nothing explains.
    pub(super) fn judge(&self, error: &str) {
        let is_of_capture = error.contains("CAPTURE") || error.contains("capture");
        // Several threads may capture at any time, which forbids calls of others.
        let explained = self.faulty.load(Ordering::Relaxed)
            || (is_of_capture && (self.threads > 1 || self.captured.load(Ordering::Relaxed)));
        if !explained {
            self.report(format!("an error without a cause: {error}"));
        }
    }

    /// What an allocator served, or `None` where it may refuse.
    pub(super) fn served<T>(&self, outcome: Result<T, AllocError>) -> Option<T> {
        match outcome {
            Ok(served) => return Some(served),
            Err(AllocError::OutOfMemory(report)) if report.advice.is_empty() => {
                self.report(format!("a refusal without advice: {report}"));
            }
            Err(AllocError::OutOfMemory(_) | AllocError::NotMapped { .. }) => {}
            Err(error) => self.judge(&error.to_string()),
        }
        None
    }

    /// Compares contents.
    pub(super) fn compare(&self, found: &[u8], pattern: u8) {
        if let Some(at) = found.iter().position(|&byte| byte != pattern) {
            self.report(format!("byte {at} is {:#04x} instead of {pattern:#04x}", found[at]));
        }
    }

    /// Counts a step and checks what must hold after each.
    pub(super) fn check(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.check_violations();
    }

    /// Reports what the race detector, the second race checker and the checks of memory found.
    pub(super) fn check_violations(&self) {
        let (violations, races) = (self.driver.violations(), self.judged.races());
        let is_race = |violation: &Violation| {
            use ViolationKind::{HostAccess, PendingWork, ReadWrite, WriteRead, WriteWrite};
            matches!(violation.kind, WriteWrite | ReadWrite | WriteRead | HostAccess | PendingWork)
        };
        match (violations.iter().find(|violation| is_race(violation)), races.first()) {
            (Some(violation), None) => self.report(format!("only the race detector finds: {violation}")),
            (None, Some(race)) => self.report(format!("only the second race checker finds: {race}")),
            _ => violations.first().into_iter().for_each(|violation| self.report(violation.to_string())),
        }
    }

    /// Reads statistics and, where no other thread works, a snapshot, and compares them.
    pub(super) fn look(&self) {
        let stats = self.memory.stats();
        let named = [
            ("requested", stats.requested_bytes.all),
            ("allocated", stats.allocated_bytes.all),
            ("active", stats.active_bytes.all),
            ("reserved", stats.reserved_bytes.all),
        ];
        let wrong = |stat: &Stat| stat.peak < stat.current || stat.allocated.wrapping_sub(stat.freed) != stat.current;
        let [requested, allocated, active, reserved] = named.map(|(_, stat)| stat);
        // Blocks that other streams still use are active and requested, and not allocated.
        let agree = allocated.current.max(requested.current) <= active.current && active.current <= reserved.current;
        if named.iter().any(|(_, stat)| wrong(stat)) || (self.threads == 1 && !agree) {
            self.report(format!("statistics contradict each other: {named:?}"));
        }
        if self.threads == 1 {
            self.check_snapshot(&self.memory.snapshot(), reserved.current);
        }
    }

    /// The blocks of a snapshot tile their segments, which do not overlap.
    fn check_snapshot(&self, snapshot: &Snapshot, reserved: u64) {
        let mut end = 0;
        let mut total = 0;
        for segment in &snapshot.segments {
            let overlaps = end > segment.address;
            end = segment.address;
            let tiled = segment.blocks.iter().all(|block| {
                let is_next = block.address == end;
                end += block.size;
                is_next
            });
            if overlaps || !tiled || end != segment.address + segment.total_size {
                self.report(format!("the blocks of the segment at {:#x} do not tile it", segment.address));
            }
            total += segment.total_size;
        }
        if total > reserved {
            self.report(format!("the segments of a snapshot have {total} bytes, of {reserved} that are reserved"));
        }
    }

    /// Ends the program: takes faults back, and checks that the allocators still work, give
    /// everything back, and serve what fits.
    pub(super) fn finish(&self) {
        self.driver.clear_faults();
        self.driver.set_other_process_bytes(0);
        self.memory.set_limit(None);
        let handed = std::mem::take(&mut *self.handed.lock());
        handed.into_iter().for_each(|handed| drop(handed.into_buffer()));
        self.check_violations();
        if self.lost.load(Ordering::Relaxed) {
            return;
        }
        if self.memory.is_asleep()
            && let Err(error) = self.memory.wake()
        {
            self.report(format!("at the end, memory stays asleep: {error}"));
        }
        let end = |what: &str, error: &dyn std::fmt::Display| self.report(format!("at the end, {what}: {error}"));
        if let Err(error) = self.device.synchronize() {
            end("the device cannot be waited for", &error);
        }
        let pools = std::mem::take(&mut *self.pools.lock());
        self.check_served(&pools);
        drop(pools);
        for memory in [&self.memory, &self.second] {
            if let Err(error) = memory.empty_cache() {
                end("the cache cannot be emptied", &error);
            }
            let stats = memory.stats();
            let in_use =
                [stats.requested_bytes, stats.allocated_bytes, stats.active_bytes].map(|stat| stat.all.current);
            let reserved = memory.memory_reserved();
            if in_use != [0; 3] || reserved != 0 {
                let [requested, allocated, active] = in_use;
                let what =
                    format!("{requested} requested, {allocated} allocated, {active} active, {reserved} reserved");
                end("memory is not given back", &what);
            }
        }
        let total = self.device.info().total_bytes;
        match self.device.memory_info() {
            Ok(info) if info.free == total => {}
            Ok(info) => end("memory is missing on the device", &format_args!("{} of {total}", total - info.free)),
            Err(error) => end("the device does not say what is free", &error),
        }
        self.check_violations();
    }

    /// Nothing is allocated any more. So memory of allocators that are gone is back, and a request
    /// that fits is served although a cache, an idle pool or another allocator keeps memory.
    fn check_served(&self, pools: &[PrivatePool]) {
        let total = self.device.info().total_bytes;
        let reserved = self.memory.memory_reserved() + self.second.memory_reserved();
        match self.device.memory_info() {
            Ok(info) if total - info.free <= reserved => {}
            Ok(info) => {
                let taken = total - info.free;
                self.report(format!("at the end, {taken} bytes of the device are taken, and {reserved} are reserved"));
            }
            Err(error) => self.report(format!("at the end, the device does not say what is free: {error}")),
        }
        let fits = total - self.memory.config().headroom - total / 16;
        let (stream, refused) = (self.device.default_stream(), "at the end, a request that fits is refused");
        for pool in pools {
            if let Err(error) = pool.alloc_bytes(fits, stream) {
                self.report(format!("{refused} by a pool: {error}"));
            }
        }
        for memory in [&self.memory, &self.second, &self.memory] {
            if let Err(error) = memory.alloc_bytes(fits, stream) {
                self.report(format!("{refused}: {error}"));
            }
        }
    }
}
