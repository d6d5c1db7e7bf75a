//! Recovery: the attempts to serve a request that no cached block serves, up to the report that
//! memory has run out.
//!
//! `ladder.rs` tries one rung after the other, among them reclaimers (`reclaim.rs`). `hooks.rs`
//! keeps the callbacks that are registered with an allocator. The last rung is the out-of-memory
//! report (`oom/`).

use std::sync::Arc;

use crate::allocator::Allocator;
use crate::recovery::hooks::{Hook, Reclaimer};

pub(crate) mod hooks;
pub(crate) mod ladder;
pub(crate) mod oom;
pub(crate) mod reclaim;

pub use hooks::{MappingChange, ReclaimRequest, Registration};
pub use oom::{Advice, OomReport, Reclaimed};

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
    /// use aquifer::memory::Allocation;
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:64MiB")?;
    /// let memory = Allocator::of(&device)?;
    /// let stream = device.default_stream();
    /// let cache = Arc::new(Mutex::new(Vec::<Allocation>::new()));
    /// let evicted = cache.clone();
    /// let registration = memory.register_reclaimer(0, "cache", move |request| {
    ///     let Ok(mut cache) = evicted.try_lock() else { return 0 };
    ///     let mut freed = 0;
    ///     while freed < request.bytes {
    ///         let Some(block) = cache.pop() else { break };
    ///         freed += block.bytes();
    ///     }
    ///     freed
    /// });
    /// for _ in 0..60 {
    ///     let block = memory.alloc_bytes(1 << 20, stream)?;
    ///     cache.lock().unwrap().push(block); // not locked while it allocates
    /// }
    /// let large = memory.alloc_bytes(40 << 20, stream)?; // 36 blocks are evicted for it
    /// assert!(cache.lock().unwrap().len() >= 20);
    /// # drop((large, registration));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn register_reclaimer(
        &self,
        priority: i32,
        name: &str,
        reclaim: impl Fn(&ReclaimRequest) -> u64 + Send + Sync + 'static,
    ) -> Registration {
        let reclaimer = Reclaimer { name: name.to_owned(), reclaim: Arc::new(reclaim) };
        self.hooks().register(priority, Hook::Reclaimer(reclaimer))
    }

    /// Registers the callback `observe`, which is called with the report before an out-of-memory
    /// error is returned. It runs with no lock of the allocator held, on the thread that made the
    /// request, so it may free and allocate. An allocation that fails inside it returns an error
    /// there and calls no observer. A panic in it is logged and goes no further: the caller still
    /// gets the error.
    pub fn observe_oom(&self, observe: impl Fn(&OomReport) + Send + Sync + 'static) -> Registration {
        self.hooks().register(0, Hook::Observer(Arc::new(observe)))
    }

    /// Registers the callback `observe`, which is called before memory is unmapped and after memory
    /// was mapped: by growth, by moving memory, by splitting frames, by giving memory back, by
    /// [`crate::Growable`], and by [`Allocator::sleep`] and [`Allocator::wake`]. It is for
    /// libraries that keep tables of mapped memory, such as network libraries that register it. It
    /// is called neither for segments nor for memory that goes when the allocator itself ends.
    ///
    /// It runs with no lock of the heap held, on the thread that needs the change, so it delays
    /// that thread. It may free, and allocate what free memory serves. What would change mappings,
    /// or wait for such a change to end, returns [`crate::AllocError::Observing`] there, because it
    /// would wait for itself: a request that no free memory serves, [`Allocator::empty_cache`],
    /// [`Allocator::trim_to`], [`crate::Growable::grow_to`], [`Allocator::alloc_exportable`],
    /// [`Allocator::pin_mapping`], [`Allocator::sleep`], [`Allocator::wake`],
    /// [`Allocator::enable_peer_access`]. A [`crate::PrivatePool`] dropped there gives its memory
    /// back later. An access guard on memory of this allocator is refused so, too, while frames are
    /// split. It must not wait for another thread that does one of these. A panic in it is logged
    /// and goes no further: the change still takes place.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use aquifer::memory::MappingChange;
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let memory = Allocator::of(&device)?;
    /// let mapped = Arc::new(Mutex::new(0));
    /// let seen = mapped.clone();
    /// let registration = memory.observe_mappings(move |change| match *change {
    ///     MappingChange::Mapped { bytes, .. } => *seen.lock().unwrap() += bytes,
    ///     MappingChange::BeforeUnmap { bytes, .. } => *seen.lock().unwrap() -= bytes,
    ///     _ => {}
    /// });
    /// drop(memory.alloc_bytes(96 << 20, device.default_stream())?);
    /// assert_eq!(*mapped.lock().unwrap(), 96 << 20);
    /// memory.empty_cache()?;
    /// assert_eq!(*mapped.lock().unwrap(), 0);
    /// drop(registration); // no more notifications
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn observe_mappings(&self, observe: impl Fn(&MappingChange) + Send + Sync + 'static) -> Registration {
        self.hooks().register(0, Hook::MappingObserver(Arc::new(observe)))
    }
}
