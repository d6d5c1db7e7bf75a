//! What the threads of a simulation share: the device, its allocators, what they leave to each
//! other, and the checks.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer::device::sim::{Fault, SimConfig};
use aquifer::kernels::Kernels;
use aquifer::memory::{AllocError, Config};
use aquifer::transfer::{Transfer, TransferConfig};
use aquifer::{Allocator, Device, Error};
use aquifer_allocator::{MappingChange, PinnedMapping, Registration};
use aquifer_device::fork::Mutex;
use aquifer_device::{Code, DevicePtr, Driver, ErrorKind, Operation};
use aquifer_oracle::Judged;
use aquifer_sim::{Lagging, ViolationKind};

use crate::held::Handed;
use crate::plan::{Plan, Step};
use crate::sleeping::Sleeping;
use crate::subject::Subject;
use crate::{Counts, check};

/// Whether it is time to stop.
pub(crate) type IsOver = Arc<dyn Fn() -> bool + Send + Sync>;

/// The world of a simulation.
pub(crate) struct World {
    pub(crate) memory: Allocator,
    pub(crate) second: Allocator,
    pub(crate) transfer: Transfer,
    pub(crate) device: Device,
    pub(crate) subject: Subject,
    /// In front of a simulated one: the host sees it as many steps behind as the plan says.
    lagging: Option<Arc<Lagging>>,
    /// In front of that, unless threads interrupt each other at any time.
    pub(crate) judged: Option<Arc<Judged>>,
    /// For buffers with a pattern.
    pub(crate) kernels: Option<Kernels>,
    pub(crate) threads: usize,
    /// Some step puts memory to sleep.
    sleeps: bool,
    /// Memory may outlive its allocator.
    pub(crate) outlives: bool,
    /// Some step injects faults.
    pub(crate) may_fail: bool,
    /// No more steps are to be made.
    pub(crate) is_over: IsOver,
    /// Allocators are asked for all memory at the end before anything is emptied.
    pub(crate) asks_first: bool,
    pub(crate) handed: Mutex<Vec<Handed>>,
    /// A fault was injected: any call may fail, and fail again.
    faulty: AtomicBool,
    /// Another process holds memory, or wants to.
    pub(crate) others: AtomicBool,
    pub(crate) lost: AtomicBool,
    /// Bytes reserved after the step before.
    reserved: AtomicU64,
    /// Pinned mappings, and their ranges, which an observer knows.
    pinned: Mutex<Vec<PinnedMapping>>,
    pinned_ranges: Arc<Mutex<Vec<Range<u64>>>>,
    _observer: Registration,
    /// A stream captures or may have: calls that would break a capture are refused.
    captured: AtomicBool,
    /// A graph was captured: memory of private pools may be its own.
    pub(crate) has_graphs: AtomicBool,
    /// An upload goes on that no thread has waited for. It keeps memory that was dropped.
    pub(crate) uploads: AtomicBool,
    pub(crate) sleeping: Sleeping,
    pub(crate) found: Arc<Mutex<Option<String>>>,
    pub(crate) counts: parking_lot::Mutex<Counts>,
}

impl World {
    pub(crate) fn new(plan: &Plan, is_scheduled: bool, is_over: &IsOver) -> Result<World, String> {
        let subject = Subject::open(&SimConfig::new(plan.capacity).seed(plan.seed));
        let lagging = subject.simulator.as_ref().map(|simulator| Lagging::new(simulator.clone(), plan.lag));
        let judged =
            lagging.clone().filter(|_| is_scheduled || plan.threads.len() == 1).map(|below| Judged::new(below));
        let driver: Arc<dyn Driver> = match (&judged, &lagging) {
            (Some(judged), _) => judged.clone(),
            (None, Some(lagging)) => lagging.clone(),
            (None, None) => subject.driver.clone(),
        };
        let device = Device::new(driver);
        let text = |error: &dyn Display| format!("{:?}, {:?}: {error}", plan.options, plan.second);
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
        let kernels = plan.is_patterned.then(|| Kernels::load(&device)).transpose().map_err(|error| text(&error))?;
        let (found, pinned_ranges) =
            (Arc::<Mutex<Option<String>>>::default(), Arc::<Mutex<Vec<Range<u64>>>>::default());
        let (observed, ranges) = (found.clone(), pinned_ranges.clone());
        let observer = memory.observe_mappings(move |change| {
            if let MappingChange::BeforeUnmap { addr, bytes } = *change
                && ranges.lock().iter().any(|range| range.start < addr + bytes && addr < range.end)
            {
                observed.lock().get_or_insert_with(|| format!("{bytes} bytes at {addr:#x} are pinned, and unmapped"));
            }
        });
        Ok(World {
            memory,
            transfer: transfer.map_err(|error| text(&error))?,
            second,
            device,
            subject,
            lagging,
            judged,
            kernels,
            threads: plan.threads.iter().filter(|steps| !steps.is_empty()).count(),
            sleeps: plan.threads.iter().flatten().any(|step| matches!(step, Step::Sleep { .. })),
            outlives: plan.threads.iter().flatten().any(|step| matches!(step, Step::Outlive { .. })),
            may_fail: plan.threads.iter().flatten().any(Step::injects_faults),
            is_over: is_over.clone(),
            asks_first: plan.seed.is_multiple_of(2),
            handed: Mutex::default(),
            faulty: false.into(),
            others: false.into(),
            lost: false.into(),
            reserved: 0.into(),
            pinned: Mutex::default(),
            pinned_ranges,
            _observer: observer,
            captured: false.into(),
            has_graphs: false.into(),
            uploads: false.into(),
            sleeping: Sleeping::default(),
            found,
            counts: parking_lot::Mutex::default(),
        })
    }

    /// Sets the limit to the share of the device's memory that `bytes` are. That allows `bytes`.
    pub(crate) fn set_share(&self, bytes: u64) {
        let total = self.device.info().total_bytes;
        let bytes = bytes.min(total - 1);
        self.allow(self.memory.set_memory_fraction(bytes as f64 / total as f64));
        let limit = self.memory.limit();
        if limit != Some(bytes) {
            self.report(format!("the limit is {limit:?} where a share of {bytes} of {total} was set"));
        }
    }

    /// True if nothing is in the way of requests but memory in use: what fits can be told exactly.
    pub(crate) fn is_calm(&self) -> bool {
        self.is_alone() && !self.sleeping.may_refuse(self.threads)
    }

    /// True if no other thread or process takes memory, none is pinned, no call fails, and the host
    /// may wait for the device.
    pub(crate) fn is_alone(&self) -> bool {
        self.threads == 1
            && !self.faulty.load(Ordering::Relaxed)
            && !self.others.load(Ordering::Relaxed)
            && self.pinned.lock().is_empty()
            && !self.handed.lock().iter().any(|handed| matches!(handed, Handed::Capture(..)))
    }

    /// Waits for uploads where it is judged what fits.
    pub(crate) fn end_uploads(&self) {
        if self.threads == 1 && self.uploads.swap(false, Ordering::Relaxed) {
            self.allow(self.transfer.synchronize());
        }
    }

    /// How often requests waited: the host for streams or for the device, or a stream for another.
    pub(crate) fn waits(&self) -> u64 {
        let waits = |memory: &Allocator| {
            let stats = memory.stats();
            stats.num_sync_all_streams + stats.cross_stream_waits
        };
        self.lagging.as_ref().map_or(0, |lagging| lagging.stalls()) + waits(&self.memory) + waits(&self.second)
    }

    /// The checks of a device that lags, which do not know of sleep and follow one thread.
    pub(crate) fn watch(&self) -> Option<&Lagging> {
        self.lagging.as_deref().filter(|_| self.threads == 1 && !self.sleeps)
    }

    /// Changes which mappings are pinned. Those that are no longer go once the observer knows.
    pub(crate) fn pin<T>(&self, change: impl FnOnce(&mut Vec<PinnedMapping>) -> T) -> T {
        let mut pinned = self.pinned.lock();
        let changed = change(&mut pinned);
        *self.pinned_ranges.lock() = pinned.iter().map(PinnedMapping::range).collect();
        changed
    }

    /// Reports a failure; the first one counts.
    pub(crate) fn report(&self, what: impl Into<String>) {
        self.found.lock().get_or_insert_with(|| what.into());
    }

    pub(crate) fn hand(&self, what: Handed) {
        if matches!(what, Handed::Capture(..)) {
            self.captured.store(true, Ordering::Relaxed);
        }
        self.handed.lock().push(what);
    }

    /// True if a raw pointer to this address is left to other threads.
    pub(crate) fn has_handed(&self, ptr: DevicePtr) -> bool {
        self.handed.lock().iter().any(|handed| matches!(handed, Handed::Raw(raw) if raw.is_raw_at(ptr)))
    }

    pub(crate) fn note_graph(&self) {
        self.has_graphs.store(true, Ordering::Relaxed);
    }

    /// Makes each call of the driver fail at random, in so many cases of a thousand.
    pub(crate) fn inject_rate(&self, thousandths: u32) {
        self.subject.clear_faults();
        if thousandths > 0 {
            self.faulty.store(true, Ordering::Relaxed);
            self.subject.inject(Fault::Rate {
                operation: None,
                rate: f64::from(thousandths) / 1000.0,
                code: Code(999),
            });
        }
    }

    /// Makes the nth call of the driver fail, or the nth one of an operation.
    pub(crate) fn inject(&self, nth: u64, operation: Option<Operation>, code: Code) {
        self.faulty.store(true, Ordering::Relaxed);
        self.lost.fetch_or(code.kind() == ErrorKind::DeviceLost, Ordering::Relaxed);
        self.subject.inject(Fault::Nth { operation, nth, code });
    }

    /// Loses the device at the nth call.
    pub(crate) fn lose(&self, nth: u64) {
        self.faulty.store(true, Ordering::Relaxed);
        self.lost.store(true, Ordering::Relaxed);
        self.subject.inject(Fault::LostAt { nth });
    }

    /// Reports an error that nothing explains.
    pub(crate) fn judge(&self, error: &str) {
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
    pub(crate) fn served<T>(&self, outcome: Result<T, impl Into<Error>>) -> Option<T> {
        match outcome.map_err(Into::into) {
            Ok(served) => return Some(served),
            Err(Error::Alloc(AllocError::OutOfMemory(report))) if report.advice.is_empty() => {
                self.report(format!("a refusal without advice: {report}"));
            }
            Err(Error::Alloc(AllocError::OutOfMemory(_) | AllocError::NotMapped { .. })) => {}
            Err(Error::Alloc(AllocError::TooLarge { requested })) if requested >= 1 << 60 => {}
            // Other threads, and transfers under way.
            Err(Error::Alloc(AllocError::KeptAwake(by))) if !by.is_this_thread => {}
            Err(error) => self.judge(&error.to_string()),
        }
        None
    }

    /// The value, or `None` where an error is possible. Reports other errors.
    pub(crate) fn allow<T, E: Display>(&self, outcome: Result<T, E>) -> Option<T> {
        outcome.inspect_err(|error| self.judge(&error.to_string())).ok()
    }

    /// Compares contents.
    pub(crate) fn compare(&self, found: &[u8], pattern: u8) {
        let mut counts = self.counts.lock();
        (counts.safety, counts.compared) = (counts.safety + 1, counts.compared + found.len() as u64);
        drop(counts);
        if let Some(at) = found.iter().position(|&byte| byte != pattern) {
            self.report(format!("byte {at} is {:#04x} instead of {pattern:#04x}", found[at]));
        }
    }

    /// Counts a step and checks what must hold after each.
    pub(crate) fn check(&self) {
        self.counts.lock().steps += 1;
        self.lagging.iter().for_each(|lagging| lagging.advance());
        self.check_violations();
        let reserved = self.memory.memory_reserved();
        if self.threads == 1 && reserved > self.reserved.swap(reserved, Ordering::Relaxed) && !self.sleeps {
            let (limit, headroom) = (self.memory.limit(), self.memory.headroom());
            if limit.is_some_and(|limit| reserved > limit) {
                self.report(format!("{reserved} bytes are reserved, and the limit is {limit:?}"));
            }
            if self.is_alone() && headroom > 0 && self.subject.free() < headroom {
                self.report(format!("{} bytes are free, less than the headroom", self.subject.free()));
            }
        }
    }

    /// Reports what the race detector, the second race checker and the checks of memory found.
    pub(crate) fn check_violations(&self) {
        self.counts.lock().safety += 1;
        let violations = self.subject.violations();
        if let Some(judged) = &self.judged {
            let is_race = |violation: &&String| {
                use ViolationKind::{HostAccess, PendingWork, ReadWrite, WriteRead, WriteWrite};
                let kinds = [WriteWrite, ReadWrite, WriteRead, HostAccess, PendingWork];
                kinds.iter().any(|kind| violation.starts_with(&kind.to_string()))
            };
            match (violations.iter().find(is_race), judged.races().first()) {
                (Some(violation), None) => self.report(format!("only the race detector finds: {violation}")),
                (None, Some(race)) => self.report(format!("only the second race checker finds: {race}")),
                _ => {}
            }
        }
        let behind = self.lagging.as_ref().and_then(|lagging| lagging.take_violation());
        violations.into_iter().chain(behind).take(1).for_each(|violation| self.report(violation));
    }

    /// Reads statistics and a snapshot, each of which is of one moment, and, where no other thread
    /// works, compares them.
    pub(crate) fn look(&self) {
        self.counts.lock().safety += 1;
        check::plausible(&self.memory.stats());
        if self.threads > 1 || self.sleeping.may_refuse(self.threads) {
            check::snapshot_is_whole(&self.memory.snapshot());
        } else {
            check::consistent(&self.memory);
            check::readers(&self.memory);
        }
    }
}
