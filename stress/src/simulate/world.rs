//! What the threads of a simulation share: the device, its allocators, what they leave to each
//! other, and the checks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer::device::sim::{Fault, SimConfig, SimDriver};
use aquifer::device::{Capture, Graph};
use aquifer::memory::{AllocError, Config, PrivatePool, Snapshot, Stat};
use aquifer::transfer::{Transfer, TransferConfig};
use aquifer::{Allocator, Device, Error};
use aquifer_allocator::snapshot::Segment;
use aquifer_device::fork::Mutex;
use aquifer_device::{Code, Operation};
use aquifer_oracle::Judged;
use aquifer_sim::{Lagging, Violation, ViolationKind};

use super::Counts;
use super::bare::Raw;
use super::graphs::Replayed;
use super::plan::{Plan, Step};
use super::player::Owned;
use super::sleep::Sleeping;

/// What a thread leaves to another one.
pub(super) enum Handed {
    Buffer(Owned),
    Raw(Raw),
    Pool(PrivatePool),
    Graph(Graph),
    Replayed(Box<Replayed>),
    /// To be dropped by a thread that may not be able to end it.
    Capture(Capture, Arc<Dropping>),
}

/// Whether a capture was dropped. What its stream enqueued before may have been captured, and what
/// it enqueues afterwards is not.
#[derive(Debug, Default)]
pub(super) struct Dropping {
    done: AtomicBool,
}

impl Dropping {
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Relaxed)
    }

    pub(super) fn finish(&self, capture: Capture) {
        drop(capture);
        self.done.store(true, Ordering::Relaxed);
    }
}

/// The world of a simulation.
pub(super) struct World {
    pub(super) memory: Allocator,
    pub(super) second: Allocator,
    pub(super) transfer: Transfer,
    pub(super) device: Device,
    pub(super) driver: Arc<SimDriver>,
    /// In front of it: the host sees the device as many steps behind as the plan says.
    lagging: Arc<Lagging>,
    /// In front of that.
    pub(super) judged: Arc<Judged>,
    pub(super) threads: usize,
    /// Some step injects faults.
    pub(super) may_fail: bool,
    /// Allocators are asked for all memory at the end before anything is emptied.
    pub(super) asks_first: bool,
    handed: Mutex<Vec<Handed>>,
    /// A fault was injected: any call may fail, and fail again.
    faulty: AtomicBool,
    lost: AtomicBool,
    /// Bytes that another process holds.
    other_process: AtomicU64,
    /// The allocator has a limit.
    limited: AtomicBool,
    /// A stream captures or may have: calls that would break a capture are refused.
    captured: AtomicBool,
    /// A graph was captured: memory of private pools may be its own.
    has_graphs: AtomicBool,
    /// An upload goes on that no thread has waited for. It keeps memory that was dropped.
    pub(super) uploads: AtomicBool,
    pub(super) sleeping: Sleeping,
    found: Mutex<Option<String>>,
    pub(super) counts: Counters,
}

/// What was done and checked so far.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) steps: AtomicU64,
    /// Comparisons of contents, looks for races and misuse, and readings of statistics and
    /// snapshots.
    pub(super) safety: AtomicU64,
    /// Refusals that were found right, and requests that had to be served.
    pub(super) liveness: AtomicU64,
    /// Requests that waited although the device had more than enough free memory.
    pub(super) needless_waits: AtomicU64,
}

impl Counters {
    pub(super) fn read(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let [steps, safety] = [&self.steps, &self.safety].map(read);
        let [liveness, needless_waits] = [&self.liveness, &self.needless_waits].map(read);
        Counts { steps, safety, liveness, needless_waits, ..Counts::default() }
    }
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl World {
    pub(super) fn new(plan: &Plan) -> Result<World, String> {
        let driver = SimDriver::new(SimConfig::new(plan.capacity).seed(plan.seed));
        let lagging = Lagging::new(driver.clone(), plan.lag);
        let judged = Judged::new(lagging.clone());
        let device = Device::new(judged.clone());
        let text = |error: &dyn std::fmt::Display| format!("{:?}, {:?}: {error}", plan.options, plan.second);
        let open = |options: &str| {
            let mut config = Config::parse(options).map_err(|error| text(&error))?;
            // Mostly as on a GPU.
            config.quarantine = (!plan.seed.is_multiple_of(4)).then_some(0);
            Allocator::new(&device, config).map_err(|error| text(&error))
        };
        let (memory, second) = (open(&plan.options)?, open(&plan.second)?);
        // Sizes that the machine does not choose.
        let config = TransferConfig::default().chunk_bytes(plan.chunk_bytes).chunks(4).threads(plan.copiers);
        let transfer = Transfer::with_config(&memory, config);
        Ok(World {
            memory,
            transfer: transfer.map_err(|error| text(&error))?,
            second,
            device,
            driver,
            lagging,
            judged,
            threads: plan.threads.iter().filter(|steps| !steps.is_empty()).count(),
            may_fail: plan.threads.iter().flatten().any(Step::injects_faults),
            asks_first: plan.seed.is_multiple_of(2),
            handed: Mutex::default(),
            faulty: false.into(),
            lost: false.into(),
            other_process: 0.into(),
            limited: false.into(),
            captured: false.into(),
            has_graphs: false.into(),
            uploads: false.into(),
            sleeping: Sleeping::default(),
            found: Mutex::default(),
            counts: Counters::default(),
        })
    }

    /// Another process holds so much from now on.
    pub(super) fn set_other_process(&self, bytes: u64) {
        self.other_process.store(bytes, Ordering::Relaxed);
        self.driver.set_other_process_bytes(bytes);
    }

    pub(super) fn set_limit(&self, limit: Option<u64>) {
        self.limited.store(limit.is_some(), Ordering::Relaxed);
        self.memory.set_limit(limit);
    }

    /// Sets the limit to the share of the device's memory that `bytes` are. That allows `bytes`.
    pub(super) fn set_share(&self, bytes: u64) {
        self.limited.store(true, Ordering::Relaxed);
        let total = self.device.info().total_bytes;
        let bytes = bytes.min(total - 1);
        self.allow(self.memory.set_memory_fraction(bytes as f64 / total as f64));
        let limit = self.memory.limit();
        if limit != Some(bytes) {
            self.report(format!("the limit is {limit:?} where a share of {bytes} of {total} was set"));
        }
    }

    /// True if nothing is in the way of requests but memory in use: what fits can be told exactly.
    pub(super) fn is_calm(&self) -> bool {
        self.is_alone() && !self.limited.load(Ordering::Relaxed) && !self.sleeping.may_refuse(self.threads)
    }

    /// True if no other thread or process takes memory, no call fails, and the host may wait for
    /// the device.
    pub(super) fn is_alone(&self) -> bool {
        self.threads == 1
            && !self.faulty.load(Ordering::Relaxed)
            && self.other_process.load(Ordering::Relaxed) == 0
            && !self.handed.lock().iter().any(|handed| matches!(handed, Handed::Capture(..)))
    }

    /// Waits for uploads where it is judged what fits.
    pub(super) fn end_uploads(&self) {
        if self.threads == 1 && self.uploads.swap(false, Ordering::Relaxed) {
            self.allow(self.transfer.synchronize());
        }
    }

    /// How often requests waited: the host for streams or for the device, or a stream for another.
    pub(super) fn waits(&self) -> u64 {
        let waits = |memory: &Allocator| {
            let stats = memory.stats();
            stats.num_sync_all_streams + stats.cross_stream_waits
        };
        self.lagging.stalls() + waits(&self.memory) + waits(&self.second)
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

    pub(super) fn take_all_handed(&self) -> Vec<Handed> {
        std::mem::take(&mut *self.handed.lock())
    }

    pub(super) fn note_graph(&self) {
        self.has_graphs.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_graphs(&self) -> bool {
        self.has_graphs.load(Ordering::Relaxed)
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
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
            || (is_of_capture && (self.threads > 1 || self.captured.load(Ordering::Relaxed)))
            || (error.contains("asleep") && self.sleeping.may_refuse(self.threads));
        if !explained {
            self.report(format!("an error without a cause: {error}"));
        }
    }

    /// What an allocator served, or `None` where it may refuse.
    pub(super) fn served<T>(&self, outcome: Result<T, impl Into<Error>>) -> Option<T> {
        match outcome.map_err(Into::into) {
            Ok(served) => return Some(served),
            Err(Error::Alloc(AllocError::OutOfMemory(report))) if report.advice.is_empty() => {
                self.report(format!("a refusal without advice: {report}"));
            }
            Err(Error::Alloc(AllocError::OutOfMemory(_) | AllocError::NotMapped { .. })) => {}
            // Other threads, and transfers under way.
            Err(Error::Alloc(AllocError::KeptAwake(by))) if !by.is_this_thread => {}
            Err(error) => self.judge(&error.to_string()),
        }
        None
    }

    /// Compares contents.
    pub(super) fn compare(&self, found: &[u8], pattern: u8) {
        count(&self.counts.safety);
        if let Some(at) = found.iter().position(|&byte| byte != pattern) {
            self.report(format!("byte {at} is {:#04x} instead of {pattern:#04x}", found[at]));
        }
    }

    /// Counts a step and checks what must hold after each.
    pub(super) fn check(&self) {
        count(&self.counts.steps);
        self.lagging.advance();
        self.check_violations();
    }

    /// Reports what the race detector, the second race checker and the checks of memory found.
    pub(super) fn check_violations(&self) {
        count(&self.counts.safety);
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

    /// Reads statistics and a snapshot, each of which is of one moment, and, where no other thread
    /// works, compares them.
    pub(super) fn look(&self) {
        count(&self.counts.safety);
        let stats = self.memory.stats();
        let named = [
            ("requested", stats.requested_bytes.all),
            ("allocated", stats.allocated_bytes.all),
            ("active", stats.active_bytes.all),
            ("reserved", stats.reserved_bytes.all),
        ];
        let wrong = |stat: &Stat| stat.peak < stat.current || stat.allocated.wrapping_sub(stat.freed) != stat.current;
        let [requested, allocated, active, reserved] = named.map(|(_, stat)| stat);
        let is_awake = !self.sleeping.may_refuse(self.threads);
        // Blocks that other streams still use are active and requested, and not allocated. Memory
        // that sleeps is not reserved, and snapshots show it.
        let in_use = allocated.current.max(requested.current) <= active.current;
        let agree = in_use && (self.threads > 1 || !is_awake || active.current <= reserved.current);
        if named.iter().any(|(_, stat)| wrong(stat)) || !agree {
            self.report(format!("statistics contradict each other: {named:?}"));
        }
        let snapshot = self.memory.snapshot();
        self.check_tiling(&snapshot);
        if self.threads == 1 {
            let sum = |of: fn(&Segment) -> u64| snapshot.segments.iter().map(of).sum::<u64>();
            let shown = [
                sum(|segment| segment.requested_size),
                sum(|segment| segment.allocated_size),
                sum(|segment| segment.active_size),
            ];
            let counted = [requested, allocated, active].map(|stat| stat.current);
            let (total, reserved) = (sum(|segment| segment.total_size), reserved.current);
            if is_awake && (shown != counted || total > reserved) {
                self.report(format!("a snapshot shows {shown:?} and {total} bytes, of {counted:?} and {reserved}"));
            }
        }
    }

    /// The blocks of a snapshot tile their segments, which do not overlap.
    fn check_tiling(&self, snapshot: &Snapshot) {
        let mut end = 0;
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
        }
    }
}
