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
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::LocalKey;

use aquifer_device::fork::Mutex;

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

/// A registered callback.
pub(crate) enum Hook {
    Reclaimer(Reclaimer),
    /// Is told of out-of-memory errors.
    Observer(Arc<dyn Fn(&OomReport) + Send + Sync>),
    MappingObserver(Arc<dyn Fn(&MappingChange) + Send + Sync>),
}

/// The order in which callbacks are called: by descending priority, and by number.
type Key = (Reverse<i32>, u64);

#[derive(Default)]
pub(crate) struct Hooks {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    hooks: BTreeMap<Key, Hook>,
    /// Whether a snapshot was saved when a request was refused.
    has_refused: bool,
}

impl Hooks {
    pub(crate) fn register(self: &Arc<Self>, priority: i32, hook: Hook) -> Registration {
        let mut state = self.state.lock();
        state.next += 1;
        let key = (Reverse(priority), state.next);
        state.hooks.insert(key, hook);
        Registration { hooks: self.clone(), key }
    }

    /// What `pick` takes of the callbacks, in their order.
    fn all<T>(&self, pick: impl Fn(&Key, &Hook) -> Option<T>) -> Vec<T> {
        self.state.lock().hooks.iter().filter_map(|(key, hook)| pick(key, hook)).collect()
    }

    pub(crate) fn about_to_unmap(&self, addr: u64, bytes: u64) {
        self.tell(&MappingChange::BeforeUnmap { addr, bytes });
    }

    pub(crate) fn mapped(&self, addr: u64, bytes: u64) {
        self.tell(&MappingChange::Mapped { addr, bytes });
    }

    fn tell(&self, change: &MappingChange) {
        let observers = self.all(|_, hook| match hook {
            Hook::MappingObserver(observe) => Some(observe.clone()),
            _ => None,
        });
        if observers.is_empty() {
            return;
        }
        OBSERVING.with_borrow_mut(|observing| observing.push(self.address()));
        for observe in observers {
            // A panic must not interrupt the driver's work, or memory would be lost.
            contained(&format_args!("an observer of mappings, notified of {change:?},"), move || observe(change));
        }
        OBSERVING.with_borrow_mut(|observing| {
            observing.pop();
            observing.shrink_to_fit();
        });
    }

    /// True if this thread is within an observer of these mappings.
    pub(crate) fn is_observing(&self) -> bool {
        OBSERVING.with_borrow(|observing| observing.contains(&self.address()))
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// The reclaimers, by descending priority, with their numbers.
    pub(crate) fn reclaimers(&self) -> Vec<(u64, Reclaimer)> {
        self.all(|&(_, number), hook| match hook {
            Hook::Reclaimer(reclaimer) => Some((number, reclaimer.clone())),
            _ => None,
        })
    }

    /// Whether this is the first call.
    pub(crate) fn is_first_refusal(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().has_refused, true)
    }

    pub(crate) fn notify(&self, report: &OomReport) {
        let Some(_within) = Within::enter(&NOTIFYING) else { return };
        let observers = self.all(|_, hook| match hook {
            Hook::Observer(observe) => Some(observe.clone()),
            _ => None,
        });
        for observe in observers {
            contained(&"an observer of out-of-memory errors", move || observe(report));
        }
    }
}

thread_local! {
    static NOTIFYING: Cell<bool> = const { Cell::new(false) };
    /// The hooks whose observers of mappings this thread is within, by address: such an observer
    /// may use other allocators. Without a destructor, so that destructors of other thread-locals
    /// can allocate.
    static OBSERVING: RefCell<ManuallyDrop<Vec<usize>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// True if this thread is within an observer of the mappings of any allocator.
pub(crate) fn is_within_an_observer() -> bool {
    OBSERVING.with_borrow(|observing| !observing.is_empty())
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
    key: Key,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if aquifer_device::fork::is_child() {
            return;
        }
        // Dropped after the lock, because values captured by a callback may call the allocator when
        // dropped.
        let hook = self.hooks.state.lock().hooks.remove(&self.key);
        drop(hook);
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("number", &self.key.1).finish_non_exhaustive()
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks").field("registered", &self.state.lock().hooks.len()).finish()
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

/// A registered reclaimer.
#[derive(Clone)]
pub(crate) struct Reclaimer {
    pub(crate) name: String,
    pub(crate) reclaim: Arc<dyn Fn(&ReclaimRequest) -> u64 + Send + Sync>,
}
