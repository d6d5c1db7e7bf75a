//! A simulated device that lags behind the host by a number of events of a program.
//!
//! [`Lagging`] says how far the device has got.
//!
//! The device also checks memory, independently of the allocator. The program reports which
//! addresses its allocations cover and when each was last used. The device reports a violation, as
//! the race detector does (`take_violation`), when memory is unmapped that is live or whose last
//! use the device has not reached, when plain memory is freed that is live, and when the same
//! memory is given out twice, at one address or at two. Releasing physical memory needs no
//! check of its own, because memory is gone only once it is unmapped.
//!
//! Invariant: the position never goes back. The state's lock is a leaf: no call is passed on under
//! it.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_device::fork::Mutex;
use aquifer_device::internal::moves_contents;
use aquifer_device::{
    AccessKind, Attribute, CaptureStatus, CapturingStreams, Code, Copy2d, CopyPart, DeviceError, DeviceInfo, DevicePtr,
    Driver, HostPtr, Launch, MemoryInfo, MemoryUsers, Operation, PhysicalOptions, PoolUsage, RawEvent, RawGraph,
    RawModule, RawPhysical, RawStream, Result, StreamFlags, Witness,
};

use crate::SimDriver;
use crate::interval::IntervalMap;

/// Most violations that are kept until they are taken; later ones are dropped.
const KEPT_MAX: usize = 4096;

/// A simulated device that lags behind the host by a number of events of a program.
///
/// The simulated device is fast, and a replayed program enqueues no work, so its memory is always
/// done with. A real device lags. This one wraps the simulator and answers as if the device were
/// behind: the program counts its events ([`Lagging::advance`]), its *now*, and the device stands
/// at
///
/// > position = max(the latest event that the host waited for, now − lag)
///
/// An event (of the driver) is complete if it was recorded at or before the position. Waiting for
/// it moves the position there, and counts as a *stall* ([`Lagging::stalls`]) if that moved
/// anything. Streams and the device as a whole are taken to be busy up to now. Calls that wait for
/// the device, such as `cuMemFree`, do so here.
///
/// It also watches over memory, independently of an allocator: from reports of which addresses are
/// live and when they were last used, it reports memory that is unmapped too early, freed while
/// live, or given out twice.
///
/// ```
/// use aquifer::Device;
/// use aquifer::device::sim::{SimConfig, SimDriver};
/// use aquifer_sim::Lagging;
/// let lagging = Lagging::new(SimDriver::new(SimConfig::parse("24GiB")?), 2);
/// let device = Device::new(lagging.clone());
/// lagging.advance(); // the program's first event
/// let tick = device.default_stream().tick();
/// tick.cover()?; // records an event, which the device reaches two events of the program later
/// assert!(!tick.is_done()?);
/// tick.synchronize()?;
/// assert_eq!((lagging.position(), lagging.stalls()), (1, 1));
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct Lagging {
    inner: Arc<SimDriver>,
    lag: u64,
    /// The program's events so far.
    now: AtomicU64,
    /// The latest event that the host waited for.
    waited: AtomicU64,
    stalls: AtomicU64,
    state: Mutex<LagState>,
}

#[derive(Default)]
struct LagState {
    /// When each live event was last recorded.
    recorded: HashMap<RawEvent, u64>,
    /// The allocations of the program by address, and those that were there before.
    uses: IntervalMap<Use>,
    violations: VecDeque<String>,
}

/// An allocation of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Use {
    /// Its first address.
    start: u64,
    /// The event of its last use.
    last: u64,
    live: bool,
}

impl LagState {
    /// Notes a use at event `now`, 0 for none, of the live allocation that starts at `start`; with
    /// `live` false there is none after it.
    fn touch(&mut self, start: u64, now: u64, live: bool) {
        let (found, end) = self.uses.at(start, u64::MAX);
        if let Some(&Use { last, .. }) = found.filter(|found| found.live && found.start == start) {
            self.uses.insert(start..end, Use { start, last: last.max(now), live });
        }
    }

    fn report(&mut self, violation: String) {
        if self.violations.len() < KEPT_MAX {
            self.violations.push_back(violation);
        }
    }
}

impl fmt::Debug for Lagging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lag, now, position) = (self.lag, self.now(), self.position());
        f.debug_struct("Lagging")
            .field("lag", &lag)
            .field("now", &now)
            .field("position", &position)
            .finish_non_exhaustive()
    }
}

impl Lagging {
    /// Makes the device of `inner` lag behind by `lag` events.
    pub fn new(inner: Arc<SimDriver>, lag: u64) -> Arc<Lagging> {
        Arc::new(Lagging {
            inner,
            lag,
            now: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            stalls: AtomicU64::new(0),
            state: Mutex::default(),
        })
    }

    /// The program goes on to its next event; to be called before the event takes place. Events
    /// count from 1.
    #[inline]
    pub fn advance(&self) {
        // One program drives this, so a plain store will do; others only read it.
        self.now.store(self.now.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// The program's present event.
    pub fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// The event that the device has reached.
    pub fn position(&self) -> u64 {
        self.waited.load(Ordering::Relaxed).max(self.now().saturating_sub(self.lag))
    }

    /// How often the host waited for an event that the device had not reached.
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }

    /// The program got `bytes` bytes at `ptr` and uses them from now on. Neither these addresses
    /// nor others of the same physical memory may be live.
    pub fn allocated(&self, ptr: DevicePtr, bytes: u64) {
        let range = ptr.range(bytes);
        let aliases = self.inner.aliases(&range);
        let mut state = self.state.lock();
        let now = self.now();
        for place in [range.clone()].into_iter().chain(aliases) {
            let overlapped = state.uses.overlapping(place).find(|(_, other)| other.live);
            if let Some(start) = overlapped.map(|(other, _)| other.start) {
                state.report(format!(
                    "{bytes} bytes at {ptr} were given out at event {now}, while those at {start:#x} are live"
                ));
            }
        }
        state.uses.insert(range, Use { start: ptr.0, last: now, live: true });
    }

    /// The program uses the live allocation that starts at `ptr` once more.
    pub fn used(&self, ptr: DevicePtr) {
        self.state.lock().touch(ptr.0, self.now(), true);
    }

    /// The program gives the live allocation that starts at `ptr` back; this counts as its last
    /// use.
    pub fn freed(&self, ptr: DevicePtr) {
        self.state.lock().touch(ptr.0, self.now(), false);
    }

    /// The program gives the live allocation that starts at `ptr` back, and used it before for the
    /// last time: its stream is gone, for instance.
    pub fn given_back(&self, ptr: DevicePtr) {
        self.state.lock().touch(ptr.0, 0, false);
    }

    fn has_reached(&self, event: u64) -> bool {
        event <= self.position()
    }

    /// The host waits for the device to reach `event`.
    fn wait_for(&self, event: u64) {
        if !self.has_reached(event) {
            self.waited.fetch_max(event, Ordering::Relaxed);
            self.stalls.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// When the event was recorded; 0 if it never was.
    fn recorded(&self, event: RawEvent) -> u64 {
        self.state.lock().recorded.get(&event).copied().unwrap_or(0)
    }

    /// Memory is taken away by a call that succeeded when the device stood at `position`.
    fn taken_away(&self, call: &str, ptr: DevicePtr, bytes: u64, position: u64) {
        let mut state = self.state.lock();
        let now = self.now();
        let range = ptr.range(bytes);
        let all: Vec<_> = state.uses.overlapping(range.clone()).map(|(piece, found)| (piece, found.clone())).collect();
        state.uses.remove(range);
        for (piece, found) in all {
            let (start, bytes) = (piece.start, piece.end - piece.start);
            if found.live && moves_contents() {
                // Its contents were copied, and are mapped there again.
                state.uses.insert(piece, found);
            } else if found.live {
                state.report(format!("{call} at event {now} took {bytes} bytes at {start:#x} away, which are live"));
            } else if found.last > position {
                let last = found.last;
                state.report(format!(
                    "{call} at event {now} took {bytes} bytes at {start:#x} away, last used at event {last}, but the \
                     device had only reached event {position}"
                ));
            }
        }
    }

    fn below(&self) -> &dyn Driver {
        &*self.inner
    }

    fn call<T>(&self, _: Operation, make: impl FnOnce(&dyn Driver) -> Result<T>) -> Result<T> {
        make(&*self.inner)
    }

    /// Length of the plain allocation at an address.
    fn bytes_at(&self, ptr: DevicePtr) -> u64 {
        self.inner.allocation_at(ptr).map_or(0, |range| range.end - range.start)
    }

    /// Whether work is done that was enqueued at `event`, asking the simulator once the device has
    /// reached it. Asking has its price before that, too.
    fn answer(&self, operation: Operation, event: u64, done: impl FnOnce() -> Result<bool>) -> Result<bool> {
        if self.has_reached(event) { done() } else { self.inner.ask(operation).map(|()| false) }
    }
}

/// Answers calls about order by the position, checks memory that goes away, and forwards all calls.
impl Driver for Lagging {
    // The simulator answers `wait_peer` at once, at any position of the peer: only the host's
    // knowledge lags.
    aquifer_device::forward_calls! {
        info as_any capturing_streams adopt_stream release_stream host_access witness
        memory_info memory_users attribute alloc alloc_async
        reserve unreserve create_physical release_physical map set_access
        host_alloc host_free host_register create_stream destroy_stream stream_id create_event wait wait_peer
        copy_to_device copy_to_host copy_on_device copy_peer copy_2d copy_batch memset load_module unload_module launch
        begin_capture capture_status end_capture launch_graph destroy_graph
        pool_usage trim_pool trim_graph_memory can_access_peer
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.wait_for(self.now());
        let bytes = self.bytes_at(ptr);
        self.inner.free(ptr)?;
        self.taken_away(Operation::Free.name(), ptr, bytes, self.position());
        Ok(())
    }

    fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()> {
        if self.inner.capture_of(stream).is_some() {
            return self.inner.free_async(ptr, stream);
        }
        let bytes = self.bytes_at(ptr);
        self.inner.free_async(ptr, stream)?;
        // The stream gets there after its own uses, at any position of the device.
        self.taken_away(Operation::FreeAsync.name(), ptr, bytes, self.now());
        Ok(())
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let position = self.position();
        self.inner.unmap(ptr, bytes)?;
        self.taken_away(Operation::Unmap.name(), ptr, bytes, position);
        Ok(())
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.inner.record(event, stream)?;
        self.state.lock().recorded.insert(event, self.now());
        Ok(())
    }

    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.inner.destroy_event(event)?;
        self.state.lock().recorded.remove(&event);
        Ok(())
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.answer(Operation::QueryEvent, self.recorded(event), || self.inner.query_event(event))
    }

    fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        self.wait_for(self.recorded(event));
        self.inner.synchronize_event(event)
    }

    fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64> {
        if [start, end].into_iter().all(|event| self.has_reached(self.recorded(event))) {
            return self.inner.elapsed_ms(start, end);
        }
        self.inner.ask(Operation::ElapsedTime)?;
        Err(DeviceError::new(Operation::ElapsedTime, Code::NOT_READY)
            .with_detail("the lagging device has not reached the event"))
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.answer(Operation::QueryStream, self.now(), || self.inner.query_stream(stream))
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.wait_for(self.now());
        self.inner.synchronize_stream(stream)
    }

    fn synchronize(&self) -> Result<()> {
        self.wait_for(self.now());
        self.inner.synchronize()
    }

    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        self.wait_for(self.now());
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        unsafe { self.inner.host_unregister(ptr) }
    }

    fn take_violation(&self) -> Option<String> {
        let violation = self.state.lock().violations.pop_front();
        violation.or_else(|| self.inner.take_violation())
    }
}
