//! Callbacks that others register with an allocator: reclaimers, which free memory under pressure
//! (`reclaim.rs`), and observers of out-of-memory errors and of mappings.
//!
//! They run while no lock of the heap is held, so they may allocate and free from the same
//! allocator. Observers of mappings run in the middle of a change of mappings, so they get an error
//! where they would need another one. A panic in a callback goes no further.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::LocalKey;

use aquifer_device::fork::Mutex;

use crate::allocator::Allocator;
use crate::recovery::oom::report::OomReport;

/// A change of mapped memory, as observers of [`crate::Allocator::observe_mappings`] get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MappingChange {
    /// Memory is about to be unmapped from these addresses. Nothing that is enqueued uses them;
    /// memory of live allocations among them, which is being moved, is mapped there again next. If
    /// the driver refuses, [`MappingChange::Mapped`] follows, because they still have their memory.
    BeforeUnmap {
        /// First address.
        addr: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// Memory is mapped at these addresses, and the device and its peers can access it.
    Mapped {
        /// First address.
        addr: u64,
        /// Length in bytes.
        bytes: u64,
    },
}

type Observer = Arc<dyn Fn(&OomReport) + Send + Sync>;
type MappingObserver = Arc<dyn Fn(&MappingChange) + Send + Sync>;

#[derive(Default)]
pub(crate) struct Hooks {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// By descending priority, and by number.
    reclaimers: BTreeMap<(Reverse<i32>, u64), Reclaimer>,
    /// By number.
    observers: BTreeMap<u64, Observer>,
    mapping_observers: BTreeMap<u64, MappingObserver>,
    /// Whether a snapshot was saved when a request was refused.
    has_refused: bool,
}

impl Hooks {
    pub(crate) fn add_reclaimer(self: &Arc<Self>, priority: i32, name: &str, reclaim: Reclaim) -> Registration {
        let mut state = self.state.lock();
        let number = state.number();
        let reclaimer = Reclaimer { number, priority, name: name.to_owned(), reclaim };
        state.reclaimers.insert((Reverse(priority), number), reclaimer);
        Registration { hooks: self.clone(), priority, number }
    }

    pub(crate) fn add_observer(self: &Arc<Self>, observe: Observer) -> Registration {
        let mut state = self.state.lock();
        let number = state.number();
        state.observers.insert(number, observe);
        Registration { hooks: self.clone(), priority: 0, number }
    }

    pub(crate) fn add_mapping_observer(self: &Arc<Self>, observe: MappingObserver) -> Registration {
        let mut state = self.state.lock();
        let number = state.number();
        state.mapping_observers.insert(number, observe);
        Registration { hooks: self.clone(), priority: 0, number }
    }

    pub(crate) fn about_to_unmap(&self, addr: u64, bytes: u64) {
        self.tell(&MappingChange::BeforeUnmap { addr, bytes });
    }

    pub(crate) fn mapped(&self, addr: u64, bytes: u64) {
        self.tell(&MappingChange::Mapped { addr, bytes });
    }

    fn tell(&self, change: &MappingChange) {
        let observers: Vec<MappingObserver> = self.state.lock().mapping_observers.values().cloned().collect();
        if observers.is_empty() {
            return;
        }
        // Fails only on a thread that is ending, whose observers cannot be distinguished from
        // others' then.
        let _ = OBSERVING.try_with(|observing| observing.borrow_mut().push(self.address()));
        for observe in observers {
            // A panic must not interrupt the driver's work, or memory would be lost.
            contained(&format_args!("an observer of mappings, notified of {change:?},"), move || observe(change));
        }
        let _ = OBSERVING.try_with(|observing| observing.borrow_mut().pop());
    }

    /// True if this thread is within an observer of these mappings.
    pub(crate) fn is_observing(&self) -> bool {
        OBSERVING.try_with(|observing| observing.borrow().contains(&self.address())).unwrap_or(false)
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// The reclaimers, by descending priority.
    pub(crate) fn reclaimers(&self) -> Vec<Reclaimer> {
        self.state.lock().reclaimers.values().cloned().collect()
    }

    /// Whether this is the first call.
    pub(crate) fn is_first_refusal(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().has_refused, true)
    }

    pub(crate) fn notify(&self, report: &OomReport) {
        let Some(_within) = Within::enter(&NOTIFYING) else { return };
        let observers: Vec<Observer> = self.state.lock().observers.values().cloned().collect();
        for observe in observers {
            contained(&"an observer of out-of-memory errors", move || observe(report));
        }
    }
}

impl State {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

thread_local! {
    static NOTIFYING: Cell<bool> = const { Cell::new(false) };
    /// The hooks whose observers of mappings this thread is within, by address: such an observer
    /// may use other allocators.
    static OBSERVING: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// True if this thread is within an observer of the mappings of any allocator.
pub(crate) fn is_within_an_observer() -> bool {
    OBSERVING.try_with(|observing| !observing.borrow().is_empty()).unwrap_or(true)
}

/// While it lives, this thread is within a callback of one kind.
pub(crate) struct Within(&'static LocalKey<Cell<bool>>);

impl Within {
    /// `None` if the thread is within a callback of this kind already.
    pub(crate) fn enter(kind: &'static LocalKey<Cell<bool>>) -> Option<Within> {
        (!kind.replace(true)).then_some(Within(kind))
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Runs a registered callback. A panic in it is logged, with the description `what`, and goes no
/// further, because the thread may be in the middle of work that must be finished. Returns `None`
/// after a panic.
pub(crate) fn contained<T>(what: &dyn fmt::Display, run: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(run))
        .inspect_err(|panic| tracing::error!("{what} panicked, and is passed over: {}", message(panic.as_ref())))
        .ok()
}

/// The message of a panic.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref().map(String::as_str));
    text.unwrap_or("without a message")
}

/// Keeps a reclaimer or observer registered until it is dropped.
#[must_use = "dropping the registration ends it"]
pub struct Registration {
    hooks: Arc<Hooks>,
    /// That of a reclaimer; otherwise 0.
    priority: i32,
    number: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if aquifer_device::fork::is_child() {
            return;
        }
        let mut state = self.hooks.state.lock();
        // Taken out first and dropped after the lock, because values captured by a callback may
        // call the allocator when dropped.
        let reclaimer = state.reclaimers.remove(&(Reverse(self.priority), self.number));
        let observer = state.observers.remove(&self.number);
        let mapping_observer = state.mapping_observers.remove(&self.number);
        drop(state);
        drop((reclaimer, observer, mapping_observer));
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("number", &self.number).finish_non_exhaustive()
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        let reclaimers: Vec<_> = state.reclaimers.values().map(|of| (of.priority, &of.name)).collect();
        f.debug_struct("Hooks").field("reclaimers", &reclaimers).field("observers", &state.observers.len()).finish()
    }
}

/// The request to a reclaimer.
#[derive(Debug)]
#[non_exhaustive]
pub struct ReclaimRequest {
    /// Bytes to free, as far as possible. At first, these are the bytes that the failing request
    /// needs; in later rounds, more each time.
    pub bytes: u64,
    /// The stream that the memory is for, by its [`Stream::id`](aquifer_device::Stream::id).
    pub stream_id: u32,
    pub(crate) why: Mutex<Option<String>>,
}

impl ReclaimRequest {
    /// Says why no more was freed. If memory still runs out, the report has it
    /// ([`crate::Reclaimed::why`]). The last call counts.
    pub fn explain(&self, why: impl Into<String>) {
        *self.why.lock() = Some(why.into());
    }
}

pub(crate) type Reclaim = Arc<dyn Fn(&ReclaimRequest) -> u64 + Send + Sync>;

/// A registered reclaimer.
#[derive(Clone)]
pub(crate) struct Reclaimer {
    pub(crate) number: u64,
    pub(crate) priority: i32,
    pub(crate) name: String,
    pub(crate) reclaim: Reclaim,
}

impl Allocator {
    /// Registers the callback `reclaim`, which is called when a request would fail otherwise:
    /// unused memory has gone back to the device, streams were waited for, and neither helped. It
    /// is to free [`ReclaimRequest::bytes`] or more by dropping handles, or as much as it can, and
    /// to return how many bytes it freed. 0 means that it has nothing to free.
    ///
    /// *How often.* Reclaimers of higher `priority` are called first, those of equal priority in
    /// the order of registration. After each one that freed something the request is tried again,
    /// once streams that still use the memory are done with it. If the request still does not fit
    /// when all were called, because the freed memory is in pieces, they are called again for twice
    /// as much, and so on up to all that the device has; those that returned 0 or panicked are left
    /// out. So a request fails only when reclaimers have nothing more, and one that only claims to
    /// free memory is called a bounded number of times.
    ///
    /// *Where.* It runs on the thread that made the request, and on several threads at once if
    /// several run out of memory. The allocator holds no lock, but the caller may. So a reclaimer
    /// that shares a lock with code that allocates must only try to take it, and return 0 if it is
    /// taken.
    ///
    /// *The report.* The report of a request that fails lists the reclaimers, what they
    /// freed, and why they freed no more, if they say so ([`ReclaimRequest::explain`]).
    ///
    /// *What it may do.* It may free and allocate, also from this allocator. An allocation that
    /// fails inside it returns an error there and calls no reclaimers. It may end registrations,
    /// including its own. A panic in it is logged and goes no further; it counts as having freed
    /// nothing, but any memory that it freed still serves the request.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use aquifer_allocator::{Allocation, Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::parse("64MiB")?));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.default_stream();
    /// let cache = Arc::new(Mutex::new(Vec::<Allocation>::new()));
    /// let evicted = cache.clone();
    /// let registration = allocator.register_reclaimer(0, "cache", move |request| {
    ///     let Ok(mut cache) = evicted.try_lock() else { return 0 };
    ///     let mut freed = 0;
    ///     while freed < request.bytes {
    ///         let Some(block) = cache.pop() else { break };
    ///         freed += block.bytes();
    ///     }
    ///     freed
    /// });
    /// for _ in 0..60 {
    ///     let block = allocator.alloc_bytes(1 << 20, stream)?;
    ///     cache.lock().unwrap().push(block); // not locked while it allocates
    /// }
    /// let large = allocator.alloc_bytes(40 << 20, stream)?; // 36 blocks are evicted for it
    /// assert!(cache.lock().unwrap().len() >= 20);
    /// # drop((large, registration));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn register_reclaimer(
        &self,
        priority: i32,
        name: &str,
        reclaim: impl Fn(&ReclaimRequest) -> u64 + Send + Sync + 'static,
    ) -> Registration {
        self.hooks().add_reclaimer(priority, name, Arc::new(reclaim))
    }

    /// Registers the callback `observe`, which is called with the report before an out-of-memory
    /// error is returned. It runs with no lock of the allocator held, on the thread that made the
    /// request, so it may free and allocate. An allocation that fails inside it returns an error
    /// there and calls no observer. A panic in it is logged and goes no further: the caller still
    /// gets the error.
    pub fn observe_oom(&self, observe: impl Fn(&OomReport) + Send + Sync + 'static) -> Registration {
        self.hooks().add_observer(Arc::new(observe))
    }

    /// Registers the callback `observe`, which is called before memory is unmapped and after memory
    /// was mapped: by growth, by moving memory, by splitting frames, by giving memory back, by
    /// [`crate::Growable`], and by [`Allocator::sleep`] and [`Allocator::wake`]. It is for
    /// libraries that keep tables of mapped memory, such as network libraries that register it. It
    /// is called neither for segments nor for memory that goes when the allocator itself ends.
    ///
    /// It runs with no lock of the heap held, on the thread that needs the change, so it delays
    /// that thread. It may free, and allocate what free memory serves. What would change mappings,
    /// or wait for such a change to end, returns [`AllocError::Observing`] there, because it would
    /// wait for itself: a request that no free memory serves, [`Allocator::empty_cache`],
    /// [`Allocator::trim_to`], [`crate::Growable::grow_to`], [`Allocator::alloc_exportable`],
    /// [`Allocator::pin_mapping`], [`Allocator::sleep`], [`Allocator::wake`],
    /// [`Allocator::enable_peer_access`]. A [`crate::PrivatePool`] dropped there gives its memory
    /// back later. An access guard on memory of this allocator is refused so, too, while frames are
    /// split. It must not wait for another thread that does one of these. A panic in it is logged
    /// and goes no further: the change still takes place.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use aquifer_allocator::{Allocator, Config, MappingChange};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let mapped = Arc::new(Mutex::new(0));
    /// let seen = mapped.clone();
    /// let registration = allocator.observe_mappings(move |change| match *change {
    ///     MappingChange::Mapped { bytes, .. } => *seen.lock().unwrap() += bytes,
    ///     MappingChange::BeforeUnmap { bytes, .. } => *seen.lock().unwrap() -= bytes,
    ///     _ => {}
    /// });
    /// drop(allocator.alloc_bytes(100 << 20, device.default_stream())?);
    /// assert_eq!(*mapped.lock().unwrap(), 100 << 20);
    /// allocator.empty_cache()?;
    /// assert_eq!(*mapped.lock().unwrap(), 0);
    /// drop(registration); // no more notifications
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn observe_mappings(&self, observe: impl Fn(&MappingChange) + Send + Sync + 'static) -> Registration {
        self.hooks().add_mapping_observer(Arc::new(observe))
    }
}
